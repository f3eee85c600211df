"""``--launcher ray``: runs a Ray Train job with one rank per worker, on this machine or a cluster, and prints its output here.

``ray_worker.py`` is what a worker runs. Ray keeps its own logs.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command.job_launchers import count
from parwrap.launching.command.plan import columns, command_parser, describe_script
from parwrap.launching.elastic.failure_report import Failure, report
from parwrap.launching.jobs.job import Job, print_line
from parwrap.launching.jobs.ray_worker import be_a_rank
from parwrap.patching.patch import Patch, installed

__all__ = ["SHARES_FILES", "add_options", "describe", "launch"]

SHARES_FILES = True
OF_THE_AGENT = ("start_method", "log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs", "all_ranks")
"""Options for process management and rank output by torchrun's agent, which does not run here."""

LOOK = 0.5
"""Seconds between two checks for Ctrl-C while ranks are silent."""


def add_options(group: argparse._ActionsContainer) -> None:
    """Add this launcher's options to argparse. A Ray worker stands for a node: it runs one rank, with one GPU or none."""
    group.add_argument("--num-workers", dest="nodes", type=count, default=1, metavar="N", help="Number of ranks; by default 1.")
    group.add_argument("--use-gpu", dest="gpus_per_node", action="store_const", const=1, help="Give each rank a GPU.")
    group.add_argument(
        "--cpus-per-worker",
        type=count,
        metavar="C",
        help=("CPU cores per rank; by default 1, or an equal part of the cores if Ray is started on this machine."),
    )
    group.add_argument(
        "--address",
        help="The Ray cluster, as in ray.init: HOST:PORT, or auto. By default RAY_ADDRESS; if it is not set, Ray is started on this "
        "machine.",
    )
    group.add_argument("--upload", action="store_true", help="Copy this directory to the workers; otherwise they must be able to read it.")


def launch(job: Job) -> int:
    """Run ``job`` until it ends, print what its ranks write, and return its exit code. Ctrl-C ends it.

    Raises:
        UsageError: an option has no effect here.
        LaunchError: Ray is not installed or not found, or lacks the requested resources.
    """
    _check(job)
    if job.dry_run:
        print(describe(job, os.getcwd()))
        return 0
    try:
        import ray
        from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
        from ray.util.queue import Queue
    except ImportError as error:
        raise LaunchError(
            f"--launcher ray needs Ray Train 2.60 or later, which is not installed ({error}): pip install 'ray[train]>=2.60', or install "
            "parwrap[ray]."
        ) from None

    cluster, cores = _cluster(job), _cores(job)
    if cluster:
        _knock(cluster)
        where: dict[str, Any] = {"address": cluster}
    else:
        where = {"address": "local", "num_cpus": job.nodes * cores, "include_dashboard": False}
    if job.options.upload:
        where["runtime_env"] = {"working_dir": "."}
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # a worker stays in its copy
    try:
        ray.init(**where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(f"Ray at {cluster or 'this machine'} cannot be used: {error}") from None
    worker = {"CPU": cores, "GPU": job.gpus_per_node or 0}
    for kind, each in worker.items():
        if (there := ray.cluster_resources().get(kind, 0)) < each * job.nodes:
            print_line(f"the job needs {each * job.nodes} {kind}s, but the cluster has {there:g}: it waits until the cluster has more")
    environ = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if cluster and name in os.environ}
    try:
        with tempfile.TemporaryDirectory(prefix="parwrap-") as results:  # Ray would make ~/ray_results
            output = Queue(actor_options={"num_cpus": 0})
            trainer = DataParallelTrainer(
                functools.partial(be_a_rank, job.plan.script, None if job.options.upload else os.getcwd(), output),
                backend_config=BackendConfig(),  # because it opens no process group
                scaling_config=ScalingConfig(num_workers=job.nodes, use_gpu=bool(job.gpus_per_node), resources_per_worker=worker),
                run_config=RunConfig(
                    storage_path=results,
                    failure_config=FailureConfig(max_failures=job.max_restarts),
                    worker_runtime_env={"env_vars": environ} if environ else None,
                ),
            )
            return _follow(trainer, output)
    except KeyboardInterrupt:
        print_line("stopping the job")
        return 130
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray failed: {error}") from None
    finally:
        ray.shutdown()


def describe(job: Job, directory: str) -> str:
    """The job in readable form, which ``--dry-run`` prints."""
    each = f"{_cores(job)} CPU cores" if _cores(job) > 1 else "a CPU core"
    return columns(
        {
            "ranks": f"{job.nodes} worker{'s'[: job.nodes != 1]} of Ray, each with {each}{' and a GPU' if job.gpus_per_node else ''}",
            **describe_script(job.plan.script),
            "cluster": _cluster(job) or "started on this machine",
            "directory": directory + (", copied to the workers" if job.options.upload else ""),
        }
    )


def _check(job: Job) -> None:
    import torch

    if job.ranks_per_node not in (None, "1"):
        raise UsageError(
            "--launcher ray runs one rank in each worker: remove --nproc-per-node, and set the number of workers with --num-workers N."
        )
    defaults = command_parser()
    for name in OF_THE_AGENT:
        if getattr(job.plan.torchrun, name) != ("forkserver" if name == "start_method" else defaults.get_default(name)):
            raise UsageError(f"--{name.replace('_', '-')} has no effect in Ray workers: remove it.")
    if (job.plan.script.scope or {}).get("survive"):
        raise UsageError("--survive has no effect in Ray workers, because Ray ends all of them when one fails: remove it.")
    if job.gpus_per_node and not _cluster(job) and (gpus := torch.cuda.device_count()) < job.nodes:
        raise LaunchError(
            f"--use-gpu needs {job.nodes} GPUs, but torch can use {gpus} on this machine: start fewer workers, or set --address."
        )


def _cluster(job: Job) -> str | None:
    """The address of a running Ray cluster; ``None`` to start one here."""
    address = job.options.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def _knock(address: str) -> None:
    """Check first that the cluster answers, because Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")  # IPv6
    try:
        if port.isdecimal():
            socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise LaunchError(f"no Ray cluster answers at {address}: {error}") from None


def _cores(job: Job) -> int:
    return job.options.cpus_per_worker or (1 if _cluster(job) else max(1, (os.cpu_count() or 1) // job.nodes))


def _follow(trainer: Any, output: Any) -> int:
    """Run ``trainer``, print what its ranks put into ``output``, and return the exit code."""
    failures: list[Failure] = []
    stopped = threading.Event()
    printing = threading.Thread(target=_print_all, args=(output, failures, stopped))
    printing.start()
    ended = None
    try:
        with installed([Patch(signal, "signal", _all_but_sigint)]):
            trainer.fit()
    except Exception as error:
        ended = error
    except BaseException:
        stopped.set()
        raise
    finally:
        if not stopped.is_set():
            output.put(None)
        printing.join()  # Ray crashes if it is shut down during a call
    if ended is None:
        return 0
    if not failures:
        print_line(f"Ray ended the job: {ended}")
        return 1
    if text := report(failures):
        print(text, file=sys.stderr)
    return failures[0].status


def _all_but_sigint(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """A wrapper for ``signal.signal``: Ray would handle Ctrl-C itself, and end this process with 0 or 1."""
    return signal.getsignal(signal.SIGINT) if args[0] == signal.SIGINT else wrapped(*args, **kwargs)


def _print_all(output: Any, failures: list[Failure], stopped: threading.Event) -> None:
    """Print what ranks put into ``output``, until ``None`` arrives. Collect the failures since the last start in ``failures``, by time."""
    while not stopped.is_set():
        try:
            item = output.get(timeout=LOOK)
        except queue.Empty:
            continue
        if item is None:
            return
        if isinstance(item, tuple):
            name, text = item
            getattr(sys, name).buffer.write(text)
            getattr(sys, name).flush()
        elif item:
            failures.append(Failure(**item))
            failures.sort(key=lambda failure: failure.time)
        elif failures:
            print(report(failures), file=sys.stderr)
            failures.clear()
