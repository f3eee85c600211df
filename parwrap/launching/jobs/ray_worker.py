"""Runs one rank in a worker of Ray Train: it starts the script in a process, and forwards the script's output and failure.

Ray runs functions in a thread, where a script could not handle signals and would leave its imports behind. So the script gets a process.
The scope opens the process group there, from torch's variables.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from parwrap.launching.command.script import Script
from parwrap.launching.elastic.failure_report import Failure, node_name, read_failures, unexplained
from parwrap.launching.elastic.network_interfaces import interface_of
from parwrap.world.launchers import LOOPBACK

__all__ = ["be_a_rank"]

RANK = """
import pickle, sys
from parwrap.launching.elastic.script_run import run_rank
directory = sys.path.pop(0)
import torch  # not something of this name that lies about in the directory
sys.path.insert(0, directory)
run_rank(*pickle.load(sys.stdin.buffer))
"""


def be_a_rank(script: Script, directory: str | None, output: Any) -> None:
    """Run the script to its end.

    Args:
        script: what every rank runs.
        directory: the working directory; ``None`` for the worker's.
        output: the ``ray.util.queue.Queue`` for the script's output as (stream name, bytes), for its failure as a dict, and for the start
            of the ranks as an empty dict.

    Raises:
        RuntimeError: the script failed; this tells Ray.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    rank = context.get_world_rank()
    if rank == 0:
        output.put({})
    address, port = broadcast_from_rank_zero(_rendezvous_endpoint() if rank == 0 else None)
    size = context.get_world_size()
    environ = {"PYTHONHASHSEED": "0", **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": port}
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(context.get_local_rank()), str(context.get_local_world_size())
    environ["NODE_RANK"] = str(context.get_node_rank())
    environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_ERROR_FILE": ""}  # Recorder reads these
    node = ""
    if context.get_local_world_size() < size:
        interface = interface_of(ray.util.get_node_ip_address())  # otherwise gloo uses the address that the host's name resolves to
        environ = {**(dict.fromkeys(LOOPBACK, interface) if interface else {}), **environ}
        node = node_name(context.get_node_rank(), socket.gethostname())
    reported = []
    if directory and not os.path.isdir(directory):
        there = f"{socket.gethostname()} has no directory {directory}: put it on a file system that all nodes share, or add --upload."
        reported = [Failure(rank, size, 0, time.time(), "exited", 2, f"parwrap.run: {there}")]
    else:
        # in Ray's own temporary directory, because this worker may be killed
        with tempfile.TemporaryDirectory(prefix=".parwrap-", dir=os.getcwd()) as failures:
            code = _run(pickle.dumps((script, {}, None, failures)), directory, environ, output)
            reported = read_failures(Path(failures))
        if code and not reported:
            reported = [unexplained(environ, code, time.time())]
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


def _rendezvous_endpoint() -> tuple[str, str]:
    """An address of this node and a free port."""
    import ray

    with socket.create_server(("", 0)) as listener:
        return ray.util.get_node_ip_address(), str(listener.getsockname()[1])
