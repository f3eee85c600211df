"""``--launcher slurm``: the batch script of a job, and following the job from here to its end.

The text is a pure function of the job. What runs on each node is ``parwrap.run`` itself, one task a node; how a rank knows who it is when
a user's own ``srun`` starts it is ``world.py``'s.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command.job_launchers import add_node_options
from parwrap.launching.jobs.job import Job, say
from parwrap.world.launchers import LOOPBACK

__all__ = ["SHARES_FILES", "Status", "add_options", "batch_script", "launch", "read_status"]

SHARES_FILES = True
OPTIONS = {
    "job-name": "Its name; by default the script's.",
    "partition": "Where to run.",
    "account": "Who is charged.",
    "qos": "Quality of service.",
    "time": "How long it may run, as in 2:30:00.",
    "cpus-per-task": "CPU cores of each node: there is one task on it, which starts the ranks.",
    "mem": "Memory of each node, as in 64G.",
    "output": "Its log; by default slurm-%%j.out in this directory.",
}
"""Those of sbatch that have a name here, with what they say."""

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
LOOK = 0.5
"""Seconds between two looks at the log."""
ASK = (1.0, 10.0)
"""Seconds between two questions to SLURM, at the least and at the most: else a tenth of the time since it last said something new."""
PATIENCE = 600.0
"""Seconds for which SLURM may leave them unanswered, as while its controller is started again."""

ONE_NODE = """\
srun --ntasks=1{cpus} {python} -m parwrap.run \\
    {command}
"""
MANY_NODES = """\
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
# nodes that srun ends because one has failed exit with 143, which is not to hide that one's exit code
srun --ntasks-per-node=1{cpus} --kill-on-bad-exit=1 bash -c '
    trap : TERM
    "$3" -m parwrap.run --nnodes {nodes} {meeting} "${{@:4}}"
    status=$?
    exit $((status == 143 ? 1 : status))
' bash "$host" "$port" {python} \\
    {command}
"""
STATIC = '--node-rank "$SLURM_NODEID" --master-addr "$1" --master-port "$2"'
ELASTIC = (
    '--rdzv-backend c10d --rdzv-endpoint "$1:$2" --rdzv-id "$SLURM_JOB_ID" --rdzv-conf "is_host=$((SLURM_NODEID == 0))" '
    '--local-addr "$SLURMD_NODENAME"'
)
"""Only with this do all nodes start again when a rank fails on one."""


def add_options(group: argparse._ActionsContainer) -> None:
    """Tell argparse of this launcher's options."""
    add_node_options(group)
    for name, help in OPTIONS.items():
        group.add_argument(f"--{name}", metavar=name.upper(), help=help)
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="Any other option of sbatch, as in --sbatch constraint=a100; may be given several times.",
    )


def launch(job: Job) -> int:
    """Submit ``job``, print its log as it grows, and return its exit code when it has ended; cancel it on Ctrl-C.

    Raises:
        UsageError: it would be several jobs.
        LaunchError: SLURM is not here, or does not take it.
    """
    text = batch_script(job, sys.executable, os.getcwd())
    if job.dry_run:
        print(text, end="")
        return 0
    if any(re.match(r"-*a(rray)?\b", option) for option in job.options.sbatch):
        raise UsageError("--sbatch array makes several jobs, but only one is followed: give sbatch the script that --dry-run prints.")
    for name, loopback in LOOPBACK.items():
        if job.nodes > 1 and os.environ.get(name) == loopback:
            raise LaunchError(f"{name}={loopback} is set here and goes along with the job, whose nodes cannot meet there: unset it.")
    submitted = time.time()
    # also as options, for variables such as SBATCH_ACCOUNT go before what the script says
    options = [word for directive in _directives(job, os.getcwd()) for word in shlex.split(directive)]
    try:
        number, _, cluster = _slurm("sbatch", "--parsable", *options, given=text).strip().partition(";")
    except _Refused as refused:
        raise LaunchError(
            f"SLURM has not taken the job, of which sbatch says:\n{refused}\nIf it is an option, change that one; if no cluster answers, "
            "run this where jobs are submitted, where `sinfo` lists its partitions. With --dry-run it prints the batch script."
        ) from None
    where = [f"--clusters={cluster}"] if cluster else []
    say(f"job {number} is submitted; Ctrl-C cancels it")
    try:
        return _follow(number, where, submitted)
    except KeyboardInterrupt:
        try:
            _slurm("scancel", *where, number)
        except _Refused as refused:
            raise LaunchError(f"job {number} goes on, for scancel says: {refused}: cancel it with `scancel {number}`.") from None
        say(f"job {number} is cancelled")
        return 130


def batch_script(job: Job, python: str, directory: str) -> str:
    """The text that ``sbatch`` takes.

    Args:
        job: what to run.
        python: the interpreter, as the nodes find it.
        directory: where the command runs.
    """
    cpus = job.options.cpus_per_task
    form = ONE_NODE if job.nodes == 1 else MANY_NODES
    lines = form.format(
        cpus=f" --cpus-per-task={shlex.quote(cpus)}" if cpus else "",  # srun does not take it over
        python=shlex.quote(python),
        command=shlex.join(job.command),
        nodes=job.nodes,
        meeting=ELASTIC if job.max_restarts else STATIC,
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {directive}" for directive in _directives(job, directory)), "", lines])


def _directives(job: Job, directory: str) -> list[str]:
    """The options of sbatch, quoted, which it takes apart as a shell does."""
    asked = {name: getattr(job.options, name.replace("-", "_")) for name in OPTIONS}
    asked["job-name"] = asked["job-name"] or Path(job.plan.script.target).name.removesuffix(".py")
    return [
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *(f"--{name}={shlex.quote(value)}" for name, value in asked.items() if value),
        f"--chdir={shlex.quote(directory)}",
        "--requeue",
        "--open-mode=append",
        *(option if option.startswith("-") else f"--{_value_quoted(option)}" for option in job.options.sbatch),
    ]


def _value_quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return name + equals + (shlex.quote(value) if value else "")


@dataclass(frozen=True)
class Status:
    """How a job stands.

    Attributes:
        state: SLURM's word for it.
        reason: why it waits.
        restarts: how often it was queued again.
        code: its exit code as a shell has it, once it has ended; never 0 unless it was completed.
        log: the path of its output.
        ran: whether it has had nodes.
    """

    state: str
    reason: str
    restarts: int
    code: int
    log: str
    ran: bool

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ENDED


def read_status(told: str) -> Status:
    """From what ``scontrol show job`` prints."""

    def value(name: str, form: str = r"\S*") -> str:
        found = re.search(rf"^   (?:.* )?{name}=({form})", told, re.MULTILINE)  # the first line has what the user calls it
        return found[1] if found else ""

    code, _, signal = value("ExitCode").partition(":")
    state = value("JobState")
    return Status(
        state=state,
        reason=value("Reason"),
        restarts=int(value("Restarts") or 0),
        code=int(code or 0) or (128 + int(signal) if int(signal or 0) else int(state != "COMPLETED")),
        log=value("StdOut", ".*"),
        ran=value("NodeList") not in ("", "(null)"),
    )


def _follow(number: str, where: list[str], since: float) -> int:
    """Print what job ``number`` writes to its log, and on stderr what becomes of it, until it has ended; returns its exit code."""
    read = said = None
    news_at = 0.0
    while True:
        status = _status(number, where)
        if read is None:  # SLURM adds to a log that is there already
            older = os.path.exists(status.log) and os.path.getmtime(status.log) < since
            read = os.path.getsize(status.log) if older else 0
        news = _news(number, status)
        if news != said:
            said, news_at = news, time.monotonic()
            if news:
                say(news)
        until = time.monotonic() + min(max(ASK[0], (time.monotonic() - news_at) / 10), ASK[1])
        while not status.ended and time.monotonic() < until:
            time.sleep(LOOK)
            read = _print_from(read, status.log)
        if status.ended:
            time.sleep(LOOK)  # a shared file system may be behind
            _print_from(read, status.log)
            if status.ran and not os.path.exists(status.log):
                say(f"the log of job {number} is not here: it is {status.log} on its first node; give --output a path that all see")
            return status.code


def _status(number: str, where: list[str]) -> Status:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return read_status(_slurm("scontrol", *where, "show", "job", number))
        except _Refused as error:
            if "Invalid job id" in str(error) or time.monotonic() > until:
                raise LaunchError(f"job {number} cannot be followed any more, though it may go on: scontrol says: {error}") from None
            time.sleep(ASK[0])


def _news(number: str, status: Status) -> str:
    if status.ended:
        return "" if status.state == "COMPLETED" else f"job {number} has ended: {status.state}, exit code {status.code}"
    again = " again" if status.restarts else ""
    if status.state in WAITING:
        return f"job {number} is in the queue{again}" + (f": {status.reason}" if status.reason != "None" else "")
    return f"job {number} runs{again}; its log is {status.log.removeprefix(f'{os.getcwd()}/')}"


def _print_from(position: int, log: str) -> int:
    """Print what is in the file ``log`` after ``position``, if it can be read already; returns where it ends."""
    try:
        with open(log, "rb") as file:
            file.seek(position)
            text = file.read()
    except OSError:
        return position
    sys.stdout.buffer.write(text)
    sys.stdout.flush()
    return position + len(text)


class _Refused(Exception):
    """What one of SLURM's programs has said against it."""


def _slurm(*command: str, given: str | None = None) -> str:
    """What one of SLURM's programs prints.

    Raises:
        _Refused: it has failed.
        LaunchError: it is not here.
    """
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {command[0]} here: --launcher slurm runs where jobs are submitted. With --dry-run it prints the batch script."
        ) from None
    except subprocess.CalledProcessError as error:
        raise _Refused(error.stderr.strip()) from None
    return done.stdout
