"""Carries out a launch plan with torch's elastic agent, which starts, watches and restarts the ranks.

This file adds two things. A single node starts without waiting and opens no port: its ranks meet in a private folder. A rank ends with an
exit code, as a script does, instead of returning a value. ``routes.py`` and ``nodes.py`` add what several nodes need, ``output.py`` handles
what ranks write.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
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
from parwrap.intercept.patch import Patch, installed
from parwrap.launching.failures import Failure, read_failures, report, unexplained, unfinished
from parwrap.launching.nodes import Nodes
from parwrap.launching.numa import cores_near, has_several_nodes
from parwrap.launching.output import RankOutput
from parwrap.launching.plan import NO_BINDING, ONE_NODE, LaunchPlan
from parwrap.launching.routes import await_rendezvous, check_interfaces, endpoint
from parwrap.launching.script import run_rank
from parwrap.launching.signals import forward_messages, forward_once, noting_messages
from parwrap.launching.waiting import reporting_wait
from parwrap.ranks.device import cuda_has_started, visible_gpus
from parwrap.ranks.rendezvous import job_folder, private_folder
from parwrap.ranks.world import INIT_METHOD
from parwrap.torch_private.elastic import CLOSE, POLL, RENDEZVOUS, given_signals, process_context
from parwrap.torch_private.versions import OF_LAUNCHER, warn_of_newer_torch

__all__ = ["launch"]

FOLLOWING = 0.3
"""Seconds to wait for other ranks to exit after the first rank has ended with ``sys.exit`` or similar."""

LEFT_ALONE = 10.0
"""Seconds that other ranks may go on after one has ended with code 0 before the end of its script, as all may do by ``os._exit(0)``."""


def launch(plan: LaunchPlan) -> int:
    """Run all ranks of this node until they end, and report their failures. Returns the exit code.

    Raises:
        UsageError: torch refuses the value of one of torchrun's options.
        LaunchError: the rendezvous failed, the log directory cannot be written to, or ranks would be forked from a process that has
            initialized CUDA.
    """
    if plan.torchrun.start_method == "fork" and cuda_has_started():
        raise LaunchError("--start-method fork does not work in a process that has initialized CUDA: remove it, or use spawn.")
    if "LOGLEVEL" not in os.environ:
        _silence("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run", "torch.multiprocessing")
    warn_of_newer_torch(OF_LAUNCHER)
    if plan.script.scope is not None:
        check_interfaces(os.environ)
    plan = await_rendezvous(plan, os.environ)
    os.environ.update(plan.variables)  # for spawned ranks; a fork server passes them on
    with job_folder() as folder:
        failures = folder / "failures"
        failures.mkdir()
        output = None
        if plan.everyone or plan.log_dir is not None:
            output = RankOutput(folder, plan.ranks, plan.everyone, plan.log_dir)
        status, explained = _run(plan, folder, failures, output)
        failed = read_failures(failures)
        if status > 128:  # a signal ended this job: ranks that lost another rank fail because of it
            failed = [failure for failure in failed if not failure.lost_another]
        if output:
            output.close(failed if status else [])
        return _report(status, explained, failed)


def _run(plan: LaunchPlan, folder: Path, failures: Path, output: RankOutput | None) -> tuple[int, bool]:
    """Run the ranks.

    Returns the exit code as far as it is known without their ``failures``, and whether the failures have been explained.
    """
    variables = {**plan.variables}
    torchs = _torch_chooses(plan)
    gpus = [] if torchs else visible_gpus()
    cores = [] if torchs else _cores_of_ranks(plan.torchrun.numa_binding, gpus)
    one_node = partial(_OneNodeWithPort if plan.script.scope is None else _OneNode, variables, folder.name)
    rendezvous_handler_registry.register(ONE_NODE, lambda parameters: one_node(parameters.run_id))
    ranks = elastic_launch(_config(plan, folder), run_rank)
    processes: list[Any] = []
    nodes = Nodes(failures, variables, (plan.script.scope or {}).get("timeout", math.inf), partial(reporting_wait, plan))
    wrappers = [] if plan.torchrun.rdzv_backend == ONE_NODE else [nodes.rendezvous]
    pipes = None
    with ExitStack() as stack:
        if output:
            stack.enter_context(output.passed_on())
            wrappers, pipes = [*wrappers, output.rendezvous], output.pipes
        patches = [Patch(SimpleElasticAgent, RENDEZVOUS, each) for each in wrappers]
        messages = stack.enter_context(noting_messages())
        poll, close = _ends_by_exit_code(failures, nodes, messages), forward_once(failures, processes)
        stack.enter_context(installed([Patch(MultiprocessContext, POLL, poll), Patch(MultiprocessContext, CLOSE, close), *patches]))
        try:
            ranks(plan.script, variables, plan.threads, str(failures), pipes, gpus, cores)
        except ChildFailedError:
            return 1, nodes.lost
        except SignalException as signalled:
            nodes.leave(signalled.sigval)
            handled = processes and all(process.exitcode == 0 for process in processes)  # by the script, on every rank
            return 0 if handled else 128 + signalled.sigval, False
        except ValueError as error:
            if "is not registered" in str(error):  # torch has asked for it by its name, when the ranks were to start
                raise UsageError(f"--rdzv-backend {plan.torchrun.rdzv_backend}: torch has no rendezvous of this name.") from error
            raise
        except (RendezvousError, dist.DistError) as error:
            raise LaunchError(_rendezvous_failure(plan, error)) from error
    return 0, False


def _report(status: int, explained: bool, failed: list[Failure]) -> int:
    """Report the failures, unless a restart has succeeded. Returns the exit code of the launch."""
    if status == 128 + signal.SIGINT and not failed:  # ranks that ignore the signal, or had not started yet
        print("parwrap run: interrupted", file=sys.stderr)
    if status and (text := report(failed, explained) if failed else ""):  # failures before a restart were reported then
        print(text, file=sys.stderr)
    return failed[0].status if failed and status == 1 else status


class _OneNode(RendezvousHandler):
    """The rendezvous of a single node. It does not wait and opens no port: at each start, the ranks meet in a new folder.

    Args:
        variables: the variables for the ranks; :data:`INIT_METHOD` is added, unless the user has set another one.
        job: the name of the job's folder.
        run_id: torch's name of the job.
    """

    use_agent_store = False

    def __init__(self, variables: dict[str, str], job: str, run_id: str) -> None:
        self._variables, self._job, self._run_id, self._starts = variables, job, run_id, 0

    def next_rendezvous(self) -> RendezvousInfo:
        if INIT_METHOD not in os.environ:
            self._variables[INIT_METHOD] = f"{ONE_NODE}://job/{self._job}/{self._starts}"
        self._starts += 1
        on_disk = not hasattr(dist, "HashStore")  # Windows
        store = dist.FileStore(str(private_folder() / self._job / f"agent-{self._starts}"), 1) if on_disk else dist.HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("localhost", 0))

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


class _OneNodeWithPort(_OneNode):
    """The rendezvous for scripts that are only launched: they connect to ``MASTER_PORT``, a free port of the loopback interface."""

    use_agent_store = True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server(("127.0.0.1", 0))
        address, port = listener.getsockname()
        store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(address, port))


def _config(plan: LaunchPlan, directory: Path) -> LaunchConfig:
    changes = {"log_dir": str(directory) if plan.log_dir else plan.torchrun.log_dir or str(directory)}
    signals = given_signals(plan.torchrun).split(",")
    if unknown := [name for name in signals if name not in signal.Signals.__members__]:
        raise UsageError(
            f"--signals-to-handle {plan.torchrun.signals_to_handle}: there is no signal {unknown[0]!r}. Write names such as SIGTERM,SIGINT."
        )
    changes["signals_to_handle"] = ",".join(
        name for name in signals if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
    )  # such as SIGHUP under nohup
    if plan.torchrun.rdzv_backend == ONE_NODE and plan.torchrun.rdzv_id == "none":
        changes["rdzv_id"] = str(uuid.uuid4())
    changes["numa_binding"] = _torchs_binding(plan) or "node"  # without one torch starts CUDA's driver, to look for a default
    try:
        config = config_from_args(argparse.Namespace(**{**vars(plan.torchrun), **changes}))[0]
    except (ValueError, AssertionError, OSError) as error:
        raise UsageError(str(error)) from error
    if _torchs_binding(plan) is None:
        config.numa_options = None
    return config


def _torch_chooses(plan: LaunchPlan) -> bool:
    """Whether parwrap leaves GPUs and cores to the script, or to torch, which then gives each rank a GPU."""
    return plan.script.scope is None or getattr(plan.torchrun, "virtual_local_rank", False)


def _torchs_binding(plan: LaunchPlan) -> str | None:
    """The binding to cores that torch does, if any: parwrap's own needs no CUDA."""
    return plan.torchrun.numa_binding if _torch_chooses(plan) and plan.torchrun.numa_binding != NO_BINDING else None


def _cores_of_ranks(asked: str | None, gpus: Sequence[str]) -> list[set[int]]:
    """The cores near each of ``gpus``, to bind the ranks to: as ``asked``, or where the machine has several NUMA nodes. Empty for none."""
    if asked == NO_BINDING or not (asked or (gpus and has_several_nodes())):
        return []
    try:
        if not gpus:
            raise LookupError("torch can use no GPU here")
        return cores_near(gpus, asked or "node")
    except (OSError, LookupError, ValueError) as error:
        print(
            f"parwrap run: ranks are not bound to the cores near their GPUs: {error}. They run all the same, on any core; "
            f"--numa-binding {NO_BINDING} hides this message.",
            file=sys.stderr,
        )
        return []


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
        return f"the job at {host} port {port} has ended. To start another job there, set a new --rdzv-id on all nodes."
    if isinstance(error, RendezvousTimeoutError) or "timed out" in text.lower():
        return (
            f"fewer than {plan.nodes[0]} nodes joined at {host} port {port} in time: check that all nodes were started with the same "
            "--nnodes and --rdzv-id, and that the first node has that address."
        )
    lost = text.partition("\n")[0].rstrip(".")
    return f"the nodes lost their connection at {host} port {port}: {lost}. See why the first node ended, and start the job again."


def _ends_by_exit_code(failures: Path, nodes: Nodes, messages: list[tuple[int, float]]) -> Callable:
    """A wrapper for the method with which torch checks its processes: a process that ended with 0 has succeeded.

    Torch's own check would wait forever for the return value of such a process. The wrapper also records processes that ended without a
    report, before torch ends the other processes. A failure on one of the ``nodes`` fails the job on all nodes, and no node finishes before
    the others. A process that ended with 0 before the end of its script has failed if other ranks go on: they may wait for it forever.
    Ranks get the signals in ``messages``.
    """
    left_since: float | None = None

    def record(environ: dict[str, str], code: int) -> None:
        failure = unexplained(environ, code)
        if failure.write(failures) and environ["TORCHELASTIC_RESTART_COUNT"] != environ["TORCHELASTIC_MAX_RESTARTS"]:
            print(failure, file=sys.stderr)  # the final report covers the last attempt

    def left(context: MultiprocessContext) -> list[int]:
        processes = process_context(context).processes
        return [rank for rank, each in enumerate(processes) if each.exitcode == 0 and unfinished(failures, each.pid).exists()]

    def recorded_codes(context: MultiprocessContext) -> list[int | None]:
        codes = [process.exitcode for process in process_context(context).processes]
        for local_rank, code in enumerate(codes):
            if code:
                record(context.envs[local_rank], code)
        if any(codes) and all(failure.lost_another for failure in read_failures(failures)):
            for local_rank in left(context):
                record(context.envs[local_rank], 0)
        return codes

    def poll(wrapped: Callable, context: MultiprocessContext, args: tuple, kwargs: dict) -> RunProcsResult | None:
        nonlocal left_since
        processes = process_context(context).processes
        forward_messages(messages, failures, processes)
        codes = recorded_codes(context)
        if any(codes) and _all_left(failures):
            until = time.monotonic() + FOLLOWING
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
            codes = recorded_codes(context)
        result = wrapped(*args, **kwargs)
        for local_rank, failed in (result.failures if result else {}).items():  # it failed after recorded_codes()
            if failed.exitcode:
                record(context.envs[local_rank], failed.exitcode)
        if result is None and nodes.failed:
            context.close()
            result = RunProcsResult(failures={0: ProcessFailure(0, processes[0].pid, 1, "")})
        if result is not None:
            nodes.exchange()
        elif all(code == 0 for code in codes) and nodes.finish():
            context.close()
            return RunProcsResult(dict.fromkeys(range(context.nprocs)), stdouts=context.stdouts, stderrs=context.stderrs)
        elif left(context):
            left_since = left_since or time.monotonic()
            if time.monotonic() - left_since > LEFT_ALONE:
                for local_rank in left(context):
                    record(context.envs[local_rank], 0)
                context.close()
                nodes.exchange()
                result = RunProcsResult(failures={rank: ProcessFailure(rank, processes[rank].pid, 1, "") for rank in left(context)})
        else:
            left_since = None
        return result

    return poll


def _all_left(failures: Path) -> bool:
    """Whether all failed ranks ended with ``sys.exit`` or similar, so that other ranks may be about to do the same."""
    return all(failure.ending == "exited" for failure in read_failures(failures))


def _silence(*names: str) -> None:
    for name in names:
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
