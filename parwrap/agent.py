"""Carries out a launch plan with torch's elastic agent, which starts the ranks, watches them and starts them again.

Two things are added to it: a single node meets without waiting and without listening beyond its loopback, and a rank ends with its
exit code, as a script does, rather than by returning a value.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args

from parwrap.errors import UsageError
from parwrap.failures import Failure, read_failures, report
from parwrap.patching import Patch, installed
from parwrap.plan import ONE_NODE, LaunchPlan
from parwrap.script import run_rank

__all__ = ["launch"]


def launch(plan: LaunchPlan) -> int:
    """Run all ranks of this node to their end, and tell how they failed if they did; returns the exit code for that.

    Raises:
        UsageError: torch refuses the value of one of torchrun's options.
    """
    os.environ.update(plan.variables)  # for ranks that are spawned; those of a fork server are handed them
    if "LOGLEVEL" not in os.environ:
        _silence("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run", "torch.multiprocessing")
    rendezvous_handler_registry.register(ONE_NODE, lambda parameters: _OneNode(parameters.run_id))
    directory = tempfile.mkdtemp(prefix="parwrap-")  # TemporaryDirectory would remove it at the end of a forked rank
    try:
        failures = Path(directory, "failures")
        failures.mkdir()
        config = _config(plan, directory)
        ranks = elastic_launch(config, run_rank)
        status = 0
        may_die = _may_die(plan)
        with installed([Patch(MultiprocessContext, "_poll", _ends_by_exit_code(failures, config.monitor_interval, may_die))]):
            try:
                ranks(plan.script, plan.variables, plan.threads, str(failures))
            except ChildFailedError:
                status = 1
            except SignalException as signalled:
                status = 128 + signalled.sigval
        told = read_failures(failures)
        if not told:
            return status
        survived = [str(failure) for failure in told if may_die(failure.rank, failure.size)]
        if text := report(told) if status else "\n".join(survived):  # who failed before a restart is no news
            print(text, file=sys.stderr)
        return told[0].status if status == 1 else status
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _OneNode(RendezvousHandler):
    """The meeting of a single node: nobody to wait for, and a new store on a free port of the loopback at each start."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server(("127.0.0.1", 0))
        address, port = listener.getsockname()
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(address, port))

    def get_backend(self) -> str:
        return ONE_NODE

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def _config(plan: LaunchPlan, directory: str) -> LaunchConfig:
    changes = {"log_dir": plan.torchrun.log_dir or directory}
    if plan.torchrun.rdzv_backend == ONE_NODE and plan.torchrun.rdzv_id == "none":
        changes["rdzv_id"] = str(uuid.uuid4())
    try:
        return config_from_args(argparse.Namespace(**{**vars(plan.torchrun), **changes}))[0]
    except (ValueError, AssertionError, OSError) as error:
        raise UsageError(str(error)) from error


def _may_die(plan: LaunchPlan) -> Callable[[int, int], bool]:
    """Whether a rank, of that many, may fail without the end of the others: workers of parameter servers if they are to be survived."""
    scope = plan.script.scope or {}
    return lambda rank, size: bool(scope.get("survive")) and 0 < rank < size - scope.get("servers", 1)


def _ends_by_exit_code(failures: Path, interval: float, may_die: Callable[[int, int], bool]) -> Callable:
    """A wrapper for torch's look at the processes, which by itself waits for ever for a value from one that has ended with 0.

    It also writes down who ended without a word, before torch ends the others too. At those that ``may_die`` torch does not look.
    """

    def poll(wrapped: Callable, context: MultiprocessContext, args: tuple, kwargs: dict) -> RunProcsResult | None:
        processes: Any = context._pc
        passed_over = {each for each, environ in context.envs.items() if may_die(int(environ["RANK"]), int(environ["WORLD_SIZE"]))}
        for local_rank in passed_over:
            processes.sentinels.pop(processes.processes[local_rank].sentinel, None)
        codes = [process.exitcode for process in processes.processes]
        for local_rank, code in enumerate(codes):
            if code:
                _unexplained(context.envs[local_rank], code, time.time() - interval).write(failures)
        result = wrapped(*args, **kwargs)
        if result is None and all(code == 0 or (code and each in passed_over) for each, code in enumerate(codes)):
            context.close()
            return RunProcsResult(dict.fromkeys(range(context.nprocs)), stdouts=context.stdouts, stderrs=context.stderrs)
        return result

    return poll


def _unexplained(environ: dict[str, str], code: int, since: float) -> Failure:
    return Failure(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        attempt=int(environ["TORCHELASTIC_RESTART_COUNT"]),
        time=since,
        ending="exited" if code > 0 else "killed",
        status=code if code > 0 else 128 - code,
    )


def _silence(*names: str) -> None:
    for name in names:
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
