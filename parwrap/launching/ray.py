"""``--launcher ray``: runs a Ray Train job with one rank per worker, on this machine or a cluster, and prints its output here.

The first part of this file runs here, the second in a worker. Ray runs functions in a thread, where a script could not handle signals and
would leave its imports behind. So a worker starts the script in a child process, and forwards its output and failure. In the child, the
scope opens the process group from torch's variables. Ray keeps its own logs.
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from parwrap.errors import LaunchError, UsageError
from parwrap.intercept.patch import Patch, installed
from parwrap.launching.failures import Failure, causes_first, node_name, read_failures, report, unexplained
from parwrap.launching.job_launchers import count
from parwrap.launching.jobs import Job, print_line
from parwrap.launching.plan import Script, columns, command_parser, describe_script
from parwrap.ranks.device import gpu_count
from parwrap.ranks.network import interface_of, variables_for
from parwrap.ranks.platform import START_METHOD
from parwrap.ranks.store import SECRET, secret_of

__all__ = ["SHARES_FILES", "add_options", "be_a_rank", "describe", "launch"]

SHARES_FILES = True
OF_THE_AGENT = ("start_method", "log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs", "all_ranks")
"""Options for process management and rank output by torchrun's agent, which does not run here."""

LOOK = 0.5
"""Seconds between two checks for Ctrl-C while ranks are silent."""


RANK = """
import pickle, sys
from parwrap.launching.script import run_rank
directory = sys.path.pop(0)
import torch  # not something of this name that lies about in the directory
sys.path.insert(0, directory)
run_rank(*pickle.load(sys.stdin.buffer))
"""
"""The program of a worker's child process. Only the worker sends it the arguments of ``run_rank``, so the child may unpickle them."""


def add_options(group: argparse._ActionsContainer) -> None:
    """Add this launcher's options to argparse. A Ray worker stands for a node: it runs one rank, with one GPU or none."""
    group.add_argument("--num-workers", dest="nodes", type=count, default=1, metavar="N", help="ranks [1]")
    group.add_argument("--use-gpu", dest="gpus_per_node", action="store_const", const=1, help="give each rank a GPU")
    group.add_argument(
        "--cpus-per-worker",
        type=count,
        metavar="C",
        help="CPU cores per rank [1, or an equal part of them if Ray starts here]",
    )
    group.add_argument(
        "--address",
        help="the cluster: HOST:PORT, or auto [RAY_ADDRESS; without it Ray starts here]",
    )
    group.add_argument("--upload", action="store_true", help="copy this directory to the workers; otherwise they must be able to read it")


def launch(job: Job) -> int:
    """Run ``job`` until it ends, print what its ranks write, and return its exit code. Ctrl-C ends it.

    Raises:
        UsageError: an option has no effect here, or the address is that of Ray's dashboard.
        LaunchError: Ray is not installed, cannot be reached, or fails; or this machine has too few GPUs.
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
    except (OSError, RuntimeError, ValueError) as error:
        remedy = "start a Ray cluster there, or use this machine with --address local" if cluster else "pass the --address of a Ray cluster"
        raise LaunchError(f"Ray cannot be used {f'at {cluster}' if cluster else 'on this machine'}: {error}. Else {remedy}.") from None
    worker = {"CPU": cores, "GPU": job.gpus_per_node or 0}
    for kind, each in worker.items():
        if (there := ray.cluster_resources().get(kind, 0)) < each * job.nodes:
            print_line(f"the job needs {each * job.nodes} {kind}s, but the cluster has {there:g}: the job waits until the cluster has more")
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
    """The job in readable form, with the ``directory`` where it runs; ``--dry-run`` prints it."""
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
    if job.ranks_per_node not in (None, "1"):
        raise UsageError(
            "--launcher ray runs one rank in each worker: remove --nproc-per-node, and set the number of workers with --num-workers N."
        )
    defaults = command_parser()
    for name in OF_THE_AGENT:
        if getattr(job.plan.torchrun, name) != (START_METHOD if name == "start_method" else defaults.get_default(name)):
            raise UsageError(f"--{name.replace('_', '-')} has no effect in Ray workers: remove it.")
    if (cluster := _cluster(job) or "").startswith(("http://", "https://")):
        raise UsageError(
            f"{cluster} is the address of Ray's dashboard, which runs no script in this way: pass the cluster's own, as in --address "
            "HOST:6379 or ray://HOST:10001, or run this command with `ray job submit`. By default the address is RAY_ADDRESS."
        )
    if job.gpus_per_node and not cluster and (gpus := gpu_count()) < job.nodes:
        raise LaunchError(
            f"--use-gpu needs {job.nodes} GPUs, but torch can use {gpus} on this machine: start fewer workers, or name a Ray cluster that "
            "has them: --address HOST:PORT."
        )


def _cluster(job: Job) -> str | None:
    """The address of a running Ray cluster; ``None`` to start one here."""
    address = job.options.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


def _knock(address: str) -> None:
    """Check that the cluster at ``address`` answers, because Ray itself would try to connect for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")  # IPv6
    try:
        if port.isdecimal():
            socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise LaunchError(
            f"no Ray cluster answers at {address}: {error}. Start one there, or use this machine with --address local."
        ) from None


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
    """Print what ranks put into ``output``, until ``None`` arrives. Collect failures since the last start in ``failures``, causes first."""
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
            failures.sort(key=causes_first)
        elif failures:
            print(report(failures), file=sys.stderr)
            failures.clear()


def be_a_rank(script: Script, directory: str | None, output: Any) -> None:
    """In a worker of Ray, run the script in a child process to its end.

    Args:
        script: what every rank runs.
        directory: the working directory; ``None`` for the worker's.
        output: the ``ray.util.queue.Queue`` for the script's output as (stream name, bytes), for its failure as a dict, and for the start
            of the ranks as an empty dict.

    Raises:
        RuntimeError: the script failed, or its directory is not there; this tells Ray.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    rank = context.get_world_rank()
    if rank == 0:
        output.put({})
    address, port, secret = broadcast_from_rank_zero(_rendezvous() if rank == 0 else None)
    size = context.get_world_size()
    environ = {"PYTHONHASHSEED": "0", **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": port}
    environ[SECRET] = secret
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(context.get_local_rank()), str(context.get_local_world_size())
    environ["NODE_RANK"] = str(context.get_node_rank())
    environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_ERROR_FILE": ""}  # Recorder reads these
    node = ""
    if context.get_local_world_size() < size:
        interface = interface_of(ray.util.get_node_ip_address())  # otherwise gloo uses the address that the host's name resolves to
        environ |= variables_for(interface, environ)
        node = node_name(context.get_node_rank(), socket.gethostname())
    reported = []
    if directory and not os.path.isdir(directory):
        there = f"{socket.gethostname()} has no directory {directory}: put it on a file system that all nodes share, or add --upload."
        reported = [Failure(rank, size, 0, time.time(), "exited", 2, f"parwrap run: {there}")]
    else:
        # in Ray's own temporary directory, because this worker may be killed
        with tempfile.TemporaryDirectory(prefix=".parwrap-", dir=os.getcwd()) as failures:
            code = _run(pickle.dumps((script, {}, None, failures)), directory, environ, output)
            reported = read_failures(Path(failures))
        if code and not reported:
            reported = [unexplained(environ, code)]
    for failure in reported:
        output.put(asdict(replace(failure, node=node)))
        raise RuntimeError(failure.cause)


def _run(task: bytes, directory: str | None, environ: dict[str, str], output: Any) -> int:
    pipe = subprocess.PIPE
    child: Any = subprocess.Popen([sys.executable, "-c", RANK], cwd=directory, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
    with child:
        streams = {"stdout": child.stdout, "stderr": child.stderr}
        threads = [threading.Thread(target=_forward, args=(stream, name, output)) for name, stream in streams.items()]
        for thread in threads:
            thread.start()
        with suppress(BrokenPipeError), child.stdin:
            child.stdin.write(task)
        for thread in threads:
            thread.join()
    return child.returncode


def _forward(pipe: IO[bytes], stream: str, output: Any) -> None:
    while text := os.read(pipe.fileno(), 1 << 16):
        output.put((stream, text))


def _rendezvous() -> tuple[str, str, str]:
    """An address of this node, a free port, and the job's secret."""
    import ray

    with socket.create_server(("", 0)) as listener:
        return ray.util.get_node_ip_address(), str(listener.getsockname()[1]), secret_of(os.environ) or secrets.token_hex(16)
