"""``python -m parwrap.run [options] train.py ARGS``: run a plain script on several ranks.

The command itself: starts the fork server, makes the plan, carries it out and ends with the script's exit code. Nothing may import
torch before the fork server runs, so that both processes import it at the same time.
"""

from __future__ import annotations

import atexit
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from glob import glob
from typing import NoReturn

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return its exit code; 2 if it cannot be run."""
    argv = sys.argv[1:] if argv is None else argv
    environ = dict(os.environ)
    early = _several_ranks_likely(argv, environ)
    if early:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
        _start_fork_server(_modules_needed(argv))
    working_directory = sys.path.pop(0)
    import torch.distributed.run  # not something of this name that lies about where the command runs

    sys.path.insert(0, working_directory)
    from parwrap.errors import ParwrapError
    from parwrap.plan import describe, plan_launch
    from parwrap.script import run_alone

    try:
        plan = plan_launch(argv, environ, torch.cuda.device_count(), _cores())
        if plan.show:
            print(describe(plan))
            return 0
        if not plan.in_this_process:
            from parwrap.agent import launch

            if plan.torchrun.start_method == "forkserver":
                _start_fork_server(_modules_needed(argv))  # unless it runs already
            _leave(launch(plan))
    except ParwrapError as error:
        print(f"parwrap.run: {error}", file=sys.stderr)
        return 2
    if early:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run_alone(plan.script)
    return 0


def _leave(status: int) -> NoReturn:
    """End this process without taking torch apart, which takes a quarter of a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _several_ranks_likely(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """A look at the command line without torch's parser: being wrong costs time and nothing else."""
    if not {"--show", "--help", "-h"}.isdisjoint(argv):
        return False
    asked = environ.get("PET_NPROC_PER_NODE")
    for option, following in zip(argv, [*argv[1:], ""], strict=False):
        if option.startswith(("--nproc-per-node", "--nproc_per_node")):
            asked = option.partition("=")[2] or following
            break
    if asked is not None:
        return asked != "1"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return len(glob("/dev/nvidia[0-9]*") if visible is None else visible.split(",")) > 1


def _modules_needed(argv: Sequence[str]) -> list[str]:
    """What ranks will import in any case, so that it is imported once: also for seconds with the first optimizer."""
    script = next((argument for argument in argv if argument.endswith(".py") and os.path.isfile(argument)), os.devnull)
    with open(script, errors="replace") as source:
        optimizes = "optim" in source.read()
    modules = ["torch.distributed.run", "numpy.random", "parwrap.features.distributed", *(["torch._dynamo"] if optimizes else [])]
    return modules + (["parwrap.strategies.fsdp"] if {"fsdp", "--strategy=fsdp"} & {*argv} else [])


def _start_fork_server(modules: list[str]) -> None:
    """Start the process that imports ``modules`` for all ranks; their threads are set when they are forked."""
    before = dict(os.environ)
    os.environ["PARWRAP_FORK_SERVER"] = ",".join(modules)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    multiprocessing.forkserver.set_forkserver_preload(["parwrap.preloaded"])
    multiprocessing.forkserver.ensure_running()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
