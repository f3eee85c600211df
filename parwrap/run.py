"""``parwrap run [options] train.py ARGS``: run a plain script on several ranks.

The command itself: it loads torch, starts the fork server, makes the plan, carries it out and ends with the script's exit code.
``launching/reexec.py`` decides when it has to restart.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from glob import glob
from typing import TYPE_CHECKING, NoReturn, TextIO

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command_line import in_files
from parwrap.launching.defaults import Defaults, defaults_here
from parwrap.launching.fork_server import loading, start, stop
from parwrap.launching.reexec import Reexec
from parwrap.ranks.environment import environment
from parwrap.ranks.platform import FORKS
from parwrap.ranks.world import detect
from parwrap.torch_private.dynamo import DYNAMO

if TYPE_CHECKING:
    from parwrap.launching.plan import LaunchPlan

__all__ = ["command", "main"]


def command() -> int:
    """Run the command line of this process. Returns its exit code."""
    try:
        return main(sys.argv[1:], is_command=True)
    except KeyboardInterrupt:
        print("parwrap run: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def main(argv: Sequence[str], is_command: bool = False) -> int:
    """Run the command line ``argv``. Returns its exit code, or 2 if it cannot run.

    Args:
        argv: the options and the script with its arguments.
        is_command: whether this process runs nothing else, so that it may restart or end itself.
    """
    try:
        defaults = defaults_here()
    except UsageError as error:
        print(f"parwrap run: {error}", file=sys.stderr)
        return 2
    likely = _likely(argv, defaults)
    reexec = Reexec(os.environ, possible=is_command)
    environ = reexec.environ
    forks = reexec.for_ranks or (reexec.first and _several_ranks_likely(likely, environ))
    if forks:
        reexec.with_what_ranks_need()
    working_directory = [] if _is_safe() else [sys.path.pop(0)]
    with loading(to_share=forks), _torchs_warnings_off(likely), _ended_by_ctrl_c():
        import torch.distributed.run  # noqa: F401 - not a module of this name in the directory that the command runs in
    reexec.clean_environment()
    if forks:
        _start_fork_server(likely)
    sys.path[:0] = working_directory
    from parwrap.errors import ParwrapError
    from parwrap.launching.plan import plan_launch
    from parwrap.ranks.device import cores, gpu_count

    try:
        if _launcher_likely(likely):
            from parwrap.launching.job_launchers import launcher_named
            from parwrap.launching.jobs import requested_job

            job = requested_job(argv, environ, cores(), defaults)
            if job is not None:
                return launcher_named(job.launcher).launch(job)
        plan = plan_launch(argv, environ, gpu_count(), cores(), defaults=defaults)
        if plan.dry_run:
            return _describe(plan, environ)
        if os.environ.get("PARWRAP_LOG") == "debug":
            _describe(plan, environ, sys.stderr)
        if not plan.in_this_process:
            _print_notice(plan)
            if plan.torchrun.start_method == "forkserver" and not forks:
                reexec.with_what_ranks_need()
                _start_fork_server(likely)
            from parwrap.launching.agent import launch

            status = launch(plan)
            if is_command and sys.getprofile() is None:
                _leave(status)
            return status
    except ParwrapError as error:
        print(f"parwrap run: {error}", file=sys.stderr)
        if defaults.table and isinstance(error, UsageError) and str(defaults.file) not in str(error):
            keys = ", ".join(defaults.table)
            print(f"parwrap run: {defaults.file} has defaults for {keys}. --no-defaults leaves them out.", file=sys.stderr)
        return 2
    if forks:
        stop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    reexec.as_plain_python()
    from parwrap.launching.script import run_alone

    _print_notice(plan)
    run_alone(plan.script)
    return 0


def _likely(argv: Sequence[str], defaults: Defaults) -> list[str]:
    """The command line for guesses: with what files and ``defaults`` add to it, at the script's side too."""
    try:
        return [*in_files(argv), *defaults.likely()]
    except UsageError:  # the file may be the script's
        return list(argv)


def _print_notice(plan: LaunchPlan) -> None:
    if plan.notice:
        print(f"parwrap run: {plan.notice}", file=sys.stderr)


def _describe(plan: LaunchPlan, environ: Mapping[str, str], stream: TextIO | None = None) -> int:
    from parwrap.launching.plan import describe
    from parwrap.launching.routes import with_way

    print(describe(with_way(plan, environ)), file=stream)
    return 0


def _leave(status: int) -> NoReturn:
    """End this process without torch's shutdown, which takes a quarter of a second."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed
            stream.flush()
    os._exit(status)


def _several_ranks_likely(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Guess from the command line whether it starts several ranks, without torch's parser. A wrong guess only costs time."""
    if not FORKS or not {"--dry-run", "--dry_run", "--help", "-h"}.isdisjoint(argv) or _launcher_likely(argv) or _is_rank(environ):
        return False
    if (_given(argv, "--nnodes") or environ.get("PET_NNODES", "1")) not in ("1", "1:1"):
        return True
    asked = _given(argv, "--nproc-per-node", "--nproc_per_node") or environ.get("PET_NPROC_PER_NODE")
    if asked is not None:
        return asked != "1"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return len(glob("/dev/nvidia[0-9]*") if visible is None else visible.split(",")) > 1


def _is_safe() -> bool:
    """Whether Python has an option, such as ``-P``, not to search the current directory for modules."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _given(argv: Sequence[str], *spellings: str) -> str | None:
    """The value of the option with one of these ``spellings``; ``None`` if the command line does not have it."""
    for option, following in zip(argv, [*argv[1:], ""], strict=False):
        if option.partition("=")[0] in spellings:
            return option.partition("=")[2] or following
    return None


def _launcher_likely(argv: Sequence[str]) -> bool:
    """Whether the command line contains ``--launcher``, which may also be an option of the script."""
    return any(argument == "--launcher" or argument.startswith("--launcher=") for argument in argv)


def _is_rank(environ: Mapping[str, str]) -> bool:
    """Whether another launcher has started several processes on this node, of which this is one."""
    try:
        world = detect(environ)
    except LaunchError:
        return False
    return world.size > 1 and world.local_size != 1


def _modules_needed(argv: Sequence[str]) -> list[str]:
    """The modules that the fork server imports once for all ranks.

    If the script's source contains ``optim``, they include the module that a process's first optimizer imports, which takes a second.
    """
    scripts = (argument for argument in argv if argument.endswith(".py") and os.path.isfile(argument) and os.access(argument, os.R_OK))
    with open(next(scripts, os.devnull), errors="replace") as source:
        optimizes = "optim" in source.read()
    return ["numpy.random", "parwrap.decorators.distributed", "parwrap.strategies.ddp", *([DYNAMO] if optimizes else [])]


def _start_fork_server(argv: Sequence[str]) -> None:
    """Start the process that loads the ranks' modules and forks the ranks."""
    start(_modules_needed(argv))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no process is left behind


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end this process immediately: there is nothing to clean up yet, and an import may swallow an exception."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, handler)


def _torchs_warnings_off(argv: Sequence[str]) -> AbstractContextManager[None]:
    """Keep torch from printing a page of C++ stack trace for each store that is lost with a node."""
    off = "TORCH_CPP_LOG_LEVEL" not in os.environ and any(argument.startswith(("--nnodes", "--rdzv")) for argument in argv)
    return environment({"TORCH_CPP_LOG_LEVEL": "ERROR"} if off else {})


if __name__ == "__main__":
    sys.exit(command())
