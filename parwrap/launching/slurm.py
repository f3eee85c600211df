"""``--launcher slurm``: writes a job's batch script, submits it and follows the job to its end.

The batch script is a pure function of the job. Each node runs ``parwrap.run`` in one task. ``ranks/world.py`` detects ranks that your own
``srun`` starts.
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
from parwrap.launching.job_launchers import add_node_options
from parwrap.launching.jobs import Job, print_line
from parwrap.ranks.launchers import LOOPBACK

__all__ = ["SHARES_FILES", "Status", "add_options", "batch_script", "launch", "read_status"]

SHARES_FILES = True
OPTIONS = {
    "job-name": "Name of the job; by default the name of the script.",
    "partition": "Partition to run in.",
    "account": "Account to charge.",
    "qos": "Quality of service.",
    "time": "Time limit, as in 2:30:00.",
    "cpus-per-task": "CPU cores per node: one task per node starts all its ranks.",
    "mem": "Memory per node, as in 64G.",
    "output": "Log file; by default slurm-%%j.out in this directory.",
}
"""Options of sbatch that are offered by name, with their help texts."""

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
LOOK = 0.5
"""Seconds between two reads of the log."""
ASK = (1.0, 10.0)
"""The minimum and maximum number of seconds between two queries to SLURM.

Between these limits, the interval is a tenth of the time since the last change.
"""
QUERY_TIMEOUT = 600.0
"""Seconds for which SLURM may not answer queries, for example while its controller restarts."""

ONE_NODE = """\
srun --export=ALL --ntasks=1{cpus} {python} -m parwrap.run \\
    {command}
"""
MANY_NODES = """\
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export PARWRAP_SECRET="${{PARWRAP_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}}"  # srun passes it to all nodes, by --export
# nodes that srun ends because one has failed exit with 143, which is not to hide that one's exit code
srun --export=ALL --ntasks-per-node=1{cpus} --kill-on-bad-exit=1 bash -c '
    trap : TERM USR1 USR2
    "$3" -m parwrap.run --nnodes {nodes} {rendezvous} "${{@:4}}"
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
"""The options of a c10d rendezvous: only with it can all nodes restart together after a failure."""


def add_options(group: argparse._ActionsContainer) -> None:
    """Add this launcher's options to argparse."""
    add_node_options(group)
    for name, help in OPTIONS.items():
        group.add_argument(f"--{name}", metavar=name.upper(), help=help)
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="Any other option of sbatch, as in --sbatch constraint=a100; may be repeated.",
    )


def launch(job: Job) -> int:
    """Submit ``job`` and print its log as it grows, or in a dry run only its script. Return its exit code; cancel it on Ctrl-C.

    Raises:
        UsageError: the options create several jobs.
        LaunchError: SLURM is not installed here, or rejects the job.
    """
    text = batch_script(job, sys.executable, os.getcwd())
    if job.dry_run:
        print(text, end="")
        return 0
    if any(re.match(r"-*a(rray)?\b", option) for option in job.options.sbatch):
        raise UsageError(
            "--sbatch array creates several jobs, but only one can be followed: print the batch script with --dry-run, and submit it "
            "with sbatch."
        )
    for name, loopback in LOOPBACK.items():
        if job.nodes > 1 and os.environ.get(name) == loopback:
            raise LaunchError(
                f"{name}={loopback} is set here and passed to the job, but the job's nodes cannot reach each other through a loopback "
                "interface: unset the variable."
            )
    submitted = time.time()
    # also as options, because variables such as SBATCH_ACCOUNT override the script
    options = [word for directive in _directives(job, os.getcwd()) for word in shlex.split(directive)]
    try:
        number, _, cluster = _slurm("sbatch", "--parsable", *options, given=text).strip().partition(";")
    except _Refused as refused:
        raise LaunchError(
            "SLURM rejected the job; sbatch printed:\n"
            f"{refused}\n"
            "If an option is wrong, change it. If no cluster answers, run this on a node from which you can submit jobs and where "
            "`sinfo` lists partitions. To print the batch script instead, add --dry-run."
        ) from None
    where = [f"--clusters={cluster}"] if cluster else []
    print_line(f"submitted job {number}; Ctrl-C cancels it")
    try:
        return _follow(number, where, submitted)
    except KeyboardInterrupt:
        try:
            _slurm("scancel", *where, number)
        except _Refused as refused:
            raise LaunchError(
                f"job {number} is still running, because scancel failed: {refused}: cancel it with `scancel {number}`."
            ) from None
        print_line(f"cancelled job {number}")
        return 130


def batch_script(job: Job, python: str, directory: str) -> str:
    """The batch script for ``sbatch``.

    Args:
        job: what to run.
        python: path of the interpreter on the nodes.
        directory: where the command runs.
    """
    cpus = job.options.cpus_per_task
    form = ONE_NODE if job.nodes == 1 else MANY_NODES
    lines = form.format(
        cpus=f" --cpus-per-task={shlex.quote(cpus)}" if cpus else "",  # srun does not inherit it
        python=shlex.quote(python),
        command=shlex.join(job.command),
        nodes=job.nodes,
        rendezvous=ELASTIC if job.max_restarts else STATIC,
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {directive}" for directive in _directives(job, directory)), "", lines])


def _directives(job: Job, directory: str) -> list[str]:
    """The options of sbatch, quoted; sbatch splits them as a shell does."""
    given = {name: getattr(job.options, name.replace("-", "_")) for name in OPTIONS}
    given["job-name"] = given["job-name"] or Path(job.plan.script.target).name.removesuffix(".py")
    return [
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *(f"--{name}={shlex.quote(value)}" for name, value in given.items() if value),
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
    """The state of a job.

    Attributes:
        state: the state in SLURM's words.
        reason: why the job waits.
        restarts: how often it was queued again.
        code: its exit code as in a shell, once it has ended; 0 only if it completed.
        log: the path of its output.
        ran: whether nodes were ever allocated to it.
    """

    state: str
    reason: str
    restarts: int
    code: int
    log: str
    ran: bool

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in ENDED


def read_status(text: str) -> Status:
    """Parse what ``scontrol show job`` prints."""

    def value(name: str, form: str = r"\S*") -> str:
        found = re.search(rf"^   (?:.* )?{name}=({form})", text, re.MULTILINE)  # the first line has the job's name, which the user chooses
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
    """Print the log of job ``number``, and its state on stderr, until it ends. Returns its exit code."""
    read = shown = None
    shown_at = 0.0
    while True:
        status = _status(number, where)
        if read is None:  # SLURM appends to an existing log
            older = os.path.exists(status.log) and os.path.getmtime(status.log) < since
            read = os.path.getsize(status.log) if older else 0
        text = _described(number, status)
        if text != shown:
            shown, shown_at = text, time.monotonic()
            if text:
                print_line(text)
        until = time.monotonic() + min(max(ASK[0], (time.monotonic() - shown_at) / 10), ASK[1])
        while not status.ended and time.monotonic() < until:
            time.sleep(LOOK)
            read = _print_from(read, status.log)
        if status.ended:
            time.sleep(LOOK)  # a shared file system may lag behind
            _print_from(read, status.log)
            if status.ran and not os.path.exists(status.log):
                print_line(
                    f"cannot read the log of job {number} from here: the log is {status.log} on the first node of the job. Set --output to "
                    "a path that all nodes share"
                )
            return status.code


def _status(number: str, where: list[str]) -> Status:
    until = time.monotonic() + QUERY_TIMEOUT
    while True:
        try:
            return read_status(_slurm("scontrol", *where, "show", "job", number))
        except _Refused as error:
            if "Invalid job id" in str(error) or time.monotonic() > until:
                raise LaunchError(
                    f"cannot follow job {number} any longer. See whether it still runs with `squeue -j {number}`. scontrol printed: {error}"
                ) from None
            time.sleep(ASK[0])


def _described(number: str, status: Status) -> str:
    if status.ended:
        return "" if status.state == "COMPLETED" else f"job {number} ended: {status.state}, exit code {status.code}"
    again = " again" if status.restarts else ""
    if status.state in WAITING:
        return f"job {number} is queued{again}" + (f": {status.reason}" if status.reason != "None" else "")
    return f"job {number} is running{again}; its log is {status.log.removeprefix(f'{os.getcwd()}/')}"


def _print_from(position: int, log: str) -> int:
    """Print the file ``log`` from ``position`` on, if it can be read yet. Returns the position of its end."""
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
    """One of SLURM's programs failed. The text is what it printed."""


def _slurm(*command: str, given: str | None = None) -> str:
    """The output of one of SLURM's programs.

    Raises:
        _Refused: it failed.
        LaunchError: it is not installed here.
    """
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise LaunchError(
            f"cannot find {command[0]}: run --launcher slurm on a node from which you can submit jobs. To print the batch script "
            "instead, add --dry-run."
        ) from None
    except subprocess.CalledProcessError as error:
        raise _Refused(error.stderr.strip()) from None
    return done.stdout
