"""``--launcher ray``: a job of Ray Train with a rank in each worker, on this machine or on a cluster, and what becomes of it told here.

What a worker does is ``ray_worker.py``'s. Ray's own logs stay with Ray.
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
from parwrap.launching.jobs.job import Job, say
from parwrap.launching.jobs.ray_worker import be_a_rank
from parwrap.patching.patch import Patch, installed

__all__ = ["SHARES_FILES", "add_options", "describe", "launch"]

SHARES_FILES = True
OF_THE_AGENT = ("start_method", "log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs", "all_ranks")
"""Options for torchrun's agent, which takes no part here: what to do with ranks and what they say."""

LOOK = 0.5
"""Seconds between two looks whether Ctrl-C was pressed, where ranks say nothing."""


def add_options(group: argparse._ActionsContainer) -> None:
    """Tell argparse of this launcher's options. A worker is to the others what a node is: where one rank, with one GPU or none, runs."""
    group.add_argument("--num-workers", dest="nodes", type=count, default=1, metavar="N", help="How many ranks; by default 1.")
    group.add_argument("--use-gpu", dest="gpus_per_node", action="store_const", const=1, help="A GPU for each.")
    group.add_argument(
        "--cpus-per-worker", type=count, metavar="C", help="CPU cores of each; by default 1, and on this machine its share of them."
    )
    group.add_argument(
        "--address",
        help="The Ray cluster, as for ray.init: HOST:PORT, or auto. By default RAY_ADDRESS, else Ray is started on this machine.",
    )
    group.add_argument("--upload", action="store_true", help="Copy this directory to the workers, which are to see it otherwise.")


def launch(job: Job) -> int:
    """Run ``job`` to its end, with what ranks write printed here, and return its exit code; Ctrl-C ends it.

    Raises:
        UsageError: an option has nothing to act on.
        LaunchError: Ray is not installed or not found, or has not what is asked for.
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
            f"--launcher ray needs Ray Train from 2.60, which is not installed ({error}): pip install 'ray[train]>=2.60', which is what "
            "parwrap[ray] adds."
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
            say(f"{each * job.nodes} {kind}s are asked for and the cluster has {there:g}: this waits until it has more")
    environ = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if cluster and name in os.environ}
    try:
        with tempfile.TemporaryDirectory(prefix="parwrap-") as results:  # Ray would make ~/ray_results
            output = Queue(actor_options={"num_cpus": 0})
            trainer = DataParallelTrainer(
                functools.partial(be_a_rank, job.plan.script, None if job.options.upload else os.getcwd(), output),
                backend_config=BackendConfig(),  # which opens no process group
                scaling_config=ScalingConfig(num_workers=job.nodes, use_gpu=bool(job.gpus_per_node), resources_per_worker=worker),
                run_config=RunConfig(
                    storage_path=results,
                    failure_config=FailureConfig(max_failures=job.max_restarts),
                    worker_runtime_env={"env_vars": environ} if environ else None,
                ),
            )
            return _follow(trainer, output)
    except KeyboardInterrupt:
        say("the job is stopped")
        return 130
    except ray.exceptions.RayError as error:
        raise LaunchError(f"Ray has failed: {error}") from None
    finally:
        ray.shutdown()


def describe(job: Job, directory: str) -> str:
    """The job for people to read: what ``--dry-run`` prints."""
    each = f"{_cores(job)} CPU cores" if _cores(job) > 1 else "a CPU core"
    return columns(
        {
            "ranks": f"{job.nodes} worker{'s'[: job.nodes != 1]} of Ray, each with {each}{' and a GPU' if job.gpus_per_node else ''}",
            **describe_script(job.plan.script),
            "cluster": _cluster(job) or "started on this machine",
            "directory": directory + (", of which workers have a copy" if job.options.upload else ""),
        }
    )


def _check(job: Job) -> None:
    import torch

    if job.ranks_per_node not in (None, "1"):
        raise UsageError(
            "--launcher ray runs one rank in each worker: leave --nproc-per-node out; --num-workers N says how many there are."
        )
    defaults = command_parser()
    for name in OF_THE_AGENT:
        if getattr(job.plan.torchrun, name) != ("forkserver" if name == "start_method" else defaults.get_default(name)):
            raise UsageError(f"--{name.replace('_', '-')} has nothing to act on in workers of Ray: leave it out.")
    if (job.plan.script.scope or {}).get("survive"):
        raise UsageError("--survive has nothing to act on in workers of Ray, which ends all of them when one fails: leave it out.")
    if job.gpus_per_node and not _cluster(job) and (gpus := torch.cuda.device_count()) < job.nodes:
        raise LaunchError(
            f"--use-gpu asks for {job.nodes} GPUs, and torch can use {gpus} on this machine: start fewer workers, or give --address."
        )


def _cluster(job: Job) -> str | None:
    """Where Ray runs already; ``None`` to start it here."""
    address = job.options.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def _knock(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")  # of IPv6
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
        say(f"Ray has ended the job: {ended}")
        return 1
    if text := report(failures):
        print(text, file=sys.stderr)
    return failures[0].status


def _all_but_sigint(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """A wrapper for ``signal.signal``: Ray would take Ctrl-C upon itself, and end this process with 0 or 1."""
    return signal.getsignal(signal.SIGINT) if args[0] == signal.SIGINT else wrapped(*args, **kwargs)


def _print_all(output: Any, failures: list[Failure], stopped: threading.Event) -> None:
    """Print what ranks put into ``output`` until ``None`` comes; leaves in ``failures`` those since they last started, by time."""
    while not stopped.is_set():
        try:
            told = output.get(timeout=LOOK)
        except queue.Empty:
            continue
        if told is None:
            return
        if isinstance(told, tuple):
            name, text = told
            getattr(sys, name).buffer.write(text)
            getattr(sys, name).flush()
        elif told:
            failures.append(Failure(**told))
            failures.sort(key=lambda failure: failure.time)
        elif failures:
            print(report(failures), file=sys.stderr)
            failures.clear()
