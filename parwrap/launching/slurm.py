"""``--launcher slurm``: writes a job's batch script, submits it and follows the job to its end.

The batch script is a pure function of the job. Each node runs ``parwrap run`` in one task. ``ranks/world.py`` detects ranks that your own
``srun`` starts.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
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
    "job-name": "name of the job [that of the script]",
    "partition": "partition to run in",
    "account": "account to charge",
    "qos": "quality of service",
    "time": "time limit, as in 2:30:00",
    "cpus-per-task": "CPU cores per node: one task starts all its ranks",
    "mem": "memory per node, as in 64G",
    "output": "log file [slurm-%%j.out in this directory]",
}
"""Options of sbatch that are offered by name, with their help texts."""

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""The states in which a job has ended, in SLURM's words."""
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
"""The states in which a job waits to run."""
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
        help="any other of sbatch, as in --sbatch constraint=a100; may be repeated",
    )


def launch(job: Job) -> int:
    """Submit ``job``, print its log as it grows, and return its exit code; cancel it on Ctrl-C. In a dry run, only print its script.

    Raises:
        UsageError: the options create several jobs, set the number of nodes by ``--sbatch``, or name a log that SLURM could not write.
        LaunchError: SLURM is not installed here, rejects the job, or no longer answers; or a variable ties several nodes to the loopback.
    """
    _check(job)
    text = batch_script(job, sys.executable, os.getcwd())
    if job.dry_run:
        sys.stdout.buffer.write(os.fsencode(text))  # an argument of the script may be no text
        sys.stdout.flush()
        return 0
    arrays = [f"--sbatch {option}" for option in job.options.sbatch if _is_option(option, "-a", "--array")]
    if arrays or os.environ.get("SBATCH_ARRAY_INX"):
        raise UsageError(
            f"{(*arrays, 'the environment variable SBATCH_ARRAY_INX')[0]} creates several jobs, but only one can be followed: remove it, "
            "or print the batch script with --dry-run, and submit it with sbatch."
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
        printed = _slurm("sbatch", "--parsable", *options, given=text).strip()
    except _Refused as refused:
        raise LaunchError(
            "SLURM rejected the job; sbatch printed:\n"
            f"{refused}\n"
            "If an option is wrong, change it. If no cluster answers, run this on a node from which you can submit jobs and where "
            "`sinfo` lists partitions. To print the batch script instead, add --dry-run."
        ) from None
    number, _, cluster = printed.partition(";")
    if not number.isdecimal():
        raise LaunchError(
            f"sbatch printed no number of a job, but {printed!r}, so no job can be followed: remove options such as --sbatch test-only. "
            "`squeue --me` lists your jobs."
        )
    where = [f"--clusters={cluster}"] if cluster else []
    cancel = " ".join(["scancel", *where, number])
    print_line(f"submitted job {number}; Ctrl-C cancels it")
    try:
        return _follow(number, where, submitted)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter complains at its end
        status = _status(number, where)
        if not status.ended:
            print_line(f"nobody reads this command's output any longer, but {_described(number, status)}. Cancel it with `{cancel}`")
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        try:
            _slurm("scancel", *where, number)
        except _Refused as refused:
            raise LaunchError(f"job {number} is still running, because scancel failed: {refused}. Try again with `{cancel}`.") from None
        print_line(f"cancelled job {number}")
        return 130


def _check(job: Job) -> None:
    """Raise an error for options with which the job would run otherwise than parwrap expects, or could write no log."""
    for option in job.options.sbatch:
        if _is_option(option, "-N", "--nodes"):
            raise UsageError(f"--sbatch {option}: parwrap run sets the number of nodes, and starts ranks on each: use --nodes N instead.")
    log = job.options.output or ""
    folder = os.path.dirname(log) or "."
    if os.path.isdir(log):
        raise UsageError(f"--output {log} is a folder: add the name of a file, as in {os.path.join(log, '%j.out')}.")
    if "%" not in folder and not os.path.isdir(folder):
        raise UsageError(
            f"--output {log} needs the folder {folder}, which SLURM does not create: create it with `mkdir -p {shlex.quote(folder)}`. If "
            "only the nodes have it, use --sbatch output=PATH."
        )


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
        command=shlex.join(job.command).replace("\r", "'$'\\r''"),  # sbatch refuses a script with \r\n
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
        *(shlex.join(_words(option)) for option in job.options.sbatch),
    ]


def _words(option: str) -> list[str]:
    """The words of an option in the form of ``--sbatch``. What follows ``NAME=`` is one value; all else is split as a shell does.

    >>> _words("comment=it's here"), _words("--exclusive"), _words("-C 'a b'")
    (["--comment=it's here"], ['--exclusive'], ['-C', 'a b'])
    """
    option = option if option.startswith("-") else f"--{option}"
    if re.match(r"--[\w-]+=", option):
        return [option]
    try:
        return shlex.split(option)
    except ValueError:
        raise UsageError(
            f"--sbatch {option} has a quote without an end: write --sbatch NAME=VALUE, where a value needs no quotes."
        ) from None


def _is_option(option: str, short: str, long: str) -> bool:
    """Whether one of the words of ``option``, in the form of ``--sbatch``, is this option of sbatch, which may be abbreviated.

    >>> [_is_option(each, "-a", "--array") for each in ("array=0-3", "-a1-3", "--arr 1", "-A me", "account=me", "-C -x")]
    [True, True, True, False, False, False]
    """
    names = [word.partition("=")[0] for word in _words(option)]
    return any(name.startswith(short) or (long.startswith(name) and len(name) > 3) for name in names)


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

    code, _, killed_by = value("ExitCode").partition(":")
    of_batch = {"N": value("BatchHost").partition(".")[0] or "%N", "n": "0", "s": "batch", "t": "0"}  # scontrol shows these as they are
    state = value("JobState")
    return Status(
        state=state,
        reason=value("Reason"),
        restarts=int(value("Restarts") or 0),
        code=int(code or 0) or (128 + int(killed_by) if int(killed_by or 0) else int(state != "COMPLETED")),
        log=re.sub("%([Nnst])", lambda found: of_batch[found[1]], value("StdOut", ".*")),
        ran=value("NodeList") not in ("", "(null)"),
    )


def _follow(number: str, where: list[str], since: float) -> int:
    """Print the log of job ``number``, and its state on stderr, until it ends. Returns its exit code."""
    log = shown = None
    read, shown_at = 0, 0.0
    while True:
        status = _status(number, where)
        if log != status.log:  # for the first time, or a log with %N in its name once the node is known
            log = status.log
            older = os.path.exists(log) and os.path.getmtime(log) < since  # SLURM appends to it
            read = os.path.getsize(log) if older else 0
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
    # a job that is submitted from inside of another would get its memory in two ways, which srun refuses
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_MEM_")}
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, errors="surrogateescape", env=environ, check=True)
    except FileNotFoundError:
        raise LaunchError(
            f"cannot find {command[0]}: run --launcher slurm on a node from which you can submit jobs. To print the batch script "
            "instead, add --dry-run."
        ) from None
    except subprocess.CalledProcessError as error:
        raise _Refused(error.stderr.strip()) from None
    return done.stdout
