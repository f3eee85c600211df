"""Carries out a launch plan with torch's elastic agent, which starts, watches and restarts the ranks.

This file adds two things. A single node starts without waiting and listens only on its loopback interface. A rank ends with an exit code,
as a script does, instead of returning a value. ``network_route.py`` and ``node_monitor.py`` add what several nodes need, ``rank_output.py``
handles what ranks write.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command.plan import ONE_NODE, LaunchPlan
from parwrap.launching.elastic.failure_report import Failure, read_failures, report, unexplained
from parwrap.launching.elastic.forwarded_signals import forward_once
from parwrap.launching.elastic.network_route import await_rendezvous, endpoint
from parwrap.launching.elastic.node_monitor import Nodes
from parwrap.launching.elastic.rank_output import RankOutput
from parwrap.launching.elastic.script_run import run_rank
from parwrap.launching.elastic.waiting_for_nodes import reporting_wait
from parwrap.patching.patch import Patch, installed
from parwrap.system.scratch import SCRATCH
from parwrap.torch_private.elastic import CLOSE, POLL, RENDEZVOUS, process_context

__all__ = ["launch"]

FOLLOWING = 0.3
"""Seconds to wait for ranks that leave at the same place as the first one."""


def launch(plan: LaunchPlan) -> int:
    """Run all ranks of this node until they end, and report their failures. Returns the exit code.

    Raises:
        UsageError: torch refuses the value of one of torchrun's options.
        LaunchError: the rendezvous failed, or ranks would be forked from a process that has initialized CUDA.
    """
    if plan.torchrun.start_method == "fork" and torch.cuda.is_initialized():
        raise LaunchError("--start-method fork does not work in a process that has initialized CUDA: remove it, or use spawn.")
    if "LOGLEVEL" not in os.environ:
        _silence("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run", "torch.multiprocessing")
    plan = await_rendezvous(plan, os.environ)
    os.environ.update(plan.variables)  # for spawned ranks; a fork server passes them on
    rendezvous_handler_registry.register(ONE_NODE, lambda parameters: _OneNode(parameters.run_id))
    directory = tempfile.mkdtemp(prefix="parwrap-")  # TemporaryDirectory would remove it when a forked rank ends
    try:
        failures = Path(directory, "failures")
        failures.mkdir()
        return _report(plan, *_run(plan, Path(directory), failures), read_failures(failures))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(plan: LaunchPlan, directory: Path, failures: Path) -> tuple[int, bool]:
    """Run the ranks.

    Returns the exit code as far as it is known without their ``failures``, and whether the failures have been explained.
    """
    config = _config(plan, directory)
    ranks = elastic_launch(config, run_rank)
    variables = {**plan.variables, SCRATCH: str(directory)}
    processes: list[Any] = []
    nodes = Nodes(failures, variables, (plan.script.scope or {}).get("timeout", math.inf), partial(reporting_wait, plan))
    rendezvous_wrappers = [] if plan.torchrun.rdzv_backend == ONE_NODE else [nodes.rendezvous]
    pipes = None
    with ExitStack() as stack:
        if plan.everyone or plan.log_dir is not None:
            output = RankOutput(directory, plan.ranks, plan.everyone, plan.log_dir)
            stack.enter_context(output.passed_on())
            rendezvous_wrappers, pipes = [*rendezvous_wrappers, output.rendezvous], output.pipes
        poll = _ends_by_exit_code(failures, _may_die(plan), nodes, processes)
        patches = [Patch(SimpleElasticAgent, RENDEZVOUS, each) for each in rendezvous_wrappers]
        stack.enter_context(
            installed([Patch(MultiprocessContext, POLL, poll), Patch(MultiprocessContext, CLOSE, forward_once(failures)), *patches])
        )
        try:
            ranks(plan.script, variables, plan.threads, str(failures), pipes)
        except ChildFailedError:
            return 1, nodes.lost
        except SignalException as signalled:
            nodes.leave(signalled.sigval)
            handled = processes and all(process.exitcode == 0 for process in processes)  # by the script, on every rank
            return 0 if handled else 128 + signalled.sigval, False
        except (RendezvousError, DistError) as error:
            raise LaunchError(_rendezvous_failure(plan, error)) from error
    return 0, False


def _report(plan: LaunchPlan, status: int, explained: bool, failed: list[Failure]) -> int:
    """Report the failures. Returns their exit code."""
    if not failed:
        if status == 128 + signal.SIGINT:  # ranks that ignore the signal, or had not started yet
            print("parwrap.run: interrupted", file=sys.stderr)
        return status
    may_die = _may_die(plan)
    survived = [str(failure) for failure in failed if may_die(failure.rank, failure.size)]
    if text := report(failed, explained) if status else "\n".join(survived):  # failures before a restart were reported then
        print(text, file=sys.stderr)
    return failed[0].status if status == 1 else status


class _OneNode(RendezvousHandler):
    """The rendezvous of a single node: it does not wait, and opens a new store on a free loopback port at each start."""

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


def _config(plan: LaunchPlan, directory: Path) -> LaunchConfig:
    changes = {"log_dir": str(directory) if plan.log_dir else plan.torchrun.log_dir or str(directory)}
    signals = plan.torchrun.signals_to_handle.split(",")
    if unknown := [name for name in signals if name not in signal.Signals.__members__]:
        raise UsageError(f"--signals-to-handle {plan.torchrun.signals_to_handle}: there is no signal {unknown[0]!r}.")
    changes["signals_to_handle"] = ",".join(
        name for name in signals if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    )  # nohup ignores it
    if plan.torchrun.rdzv_backend == ONE_NODE and plan.torchrun.rdzv_id == "none":
        changes["rdzv_id"] = str(uuid.uuid4())
    try:
        return config_from_args(argparse.Namespace(**{**vars(plan.torchrun), **changes}))[0]
    except (ValueError, AssertionError, OSError) as error:
        raise UsageError(str(error)) from error


def _may_die(plan: LaunchPlan) -> Callable[[int, int], bool]:
    """Whether a rank, of this many, may fail while the others continue: a worker of parameter servers with ``--survive``."""
    scope = plan.script.scope or {}
    return lambda rank, size: bool(scope.get("survive")) and 0 < rank < size - scope.get("servers", 1)


def _rendezvous_failure(plan: LaunchPlan, error: Exception) -> str:
    """Why the rendezvous failed, as far as torch's ``error`` tells."""
    host, port = endpoint(plan.torchrun)
    text = str(error.__cause__ or error)
    if "EADDRINUSE" in text:
        return (
            f"port {port} of this machine is in use, by another job or by a node with the same --node-rank: choose another port, the "
            "same on all nodes."
        )
    if isinstance(error, RendezvousClosedError):
        return f"the job at {host} port {port} has ended. To start another one there, set a new --rdzv-id on all nodes."
    if isinstance(error, RendezvousTimeoutError) or "timed out" in text.lower():
        return (
            f"fewer than {plan.nodes[0]} nodes joined at {host} port {port} in time: check that all nodes were started with the same "
            "--nnodes and --rdzv-id, and that the first node has that address."
        )
    return f"the nodes lost their connection at {host} port {port}: {text.partition(chr(10))[0]}"


def _ends_by_exit_code(failures: Path, may_die: Callable[[int, int], bool], nodes: Nodes, started: list[Any]) -> Callable:
    """A wrapper for torch's check of its processes, which would wait forever for a value from a process that ended with 0.

    It also records processes that ended without a report, before torch ends the others too. It hides the processes in ``may_die`` from
    torch. A failure on one of the ``nodes`` fails the job on all, and no node finishes before the others. The processes are put into
    ``started``.
    """
    looked = time.time()

    def record(environ: dict[str, str], code: int, since: float) -> None:
        failure = unexplained(environ, code, since)
        if failure.write(failures) and environ["TORCHELASTIC_RESTART_COUNT"] != environ["TORCHELASTIC_MAX_RESTARTS"]:
            print(failure, file=sys.stderr)  # the final report covers the last attempt

    def recorded_codes(context: MultiprocessContext, lived: float) -> list[int | None]:
        codes = [process.exitcode for process in process_context(context).processes]
        for local_rank, code in enumerate(codes):
            if code:  # later exceptions of others may follow from it, unless torch itself gave up
                record(context.envs[local_rank], code, time.time() if code == -signal.SIGABRT else lived)
        return codes

    def poll(wrapped: Callable, context: MultiprocessContext, args: tuple, kwargs: dict) -> RunProcsResult | None:
        nonlocal looked
        lived, looked = looked, time.time()
        processes = process_context(context)
        started[:] = processes.processes
        passed_over = {each for each, environ in context.envs.items() if may_die(int(environ["RANK"]), int(environ["WORLD_SIZE"]))}
        for local_rank in passed_over:
            processes.sentinels.pop(processes.processes[local_rank].sentinel, None)
        codes = recorded_codes(context, lived)
        if any(codes[each] for each in {*context.envs} - passed_over) and _all_left(failures):
            until = time.monotonic() + FOLLOWING
            for process in processes.processes:
                process.join(max(0.0, until - time.monotonic()))
            codes = recorded_codes(context, looked)
        result = wrapped(*args, **kwargs)
        for local_rank, failed in (result.failures if result else {}).items():  # right after that check
            if failed.exitcode:
                record(context.envs[local_rank], failed.exitcode, lived)
        if result is None and nodes.failed:
            context.close()
            result = RunProcsResult(failures={0: ProcessFailure(0, processes.processes[0].pid, 1, "")})
        if result is not None:
            nodes.exchange()
        elif all(code == 0 or (code and each in passed_over) for each, code in enumerate(codes)) and nodes.finish():
            context.close()
            return RunProcsResult(dict.fromkeys(range(context.nprocs)), stdouts=context.stdouts, stderrs=context.stderrs)
        return result

    return poll


def _all_left(failures: Path) -> bool:
    """Whether the failed ranks ended with ``sys.exit`` or similar, so that others may be about to do the same."""
    return all(failure.ending == "exited" for failure in read_failures(failures))


def _silence(*names: str) -> None:
    for name in names:
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
