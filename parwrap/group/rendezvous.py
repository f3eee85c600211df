"""Where ranks find each other and listen: on one node only on its loopback interface, without a port that two jobs could both use.

Registers the URL scheme of ``world.py``'s ``ONE_NODE`` with torch: ranks of one node find each other through a file that is named after
their job. ``placed`` finds out which ranks share a node if the launcher does not say.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from parwrap.errors import LaunchError
from parwrap.world.launchers import LOOPBACK
from parwrap.world.world import ONE_NODE, World

__all__ = ["on_loopback", "placed"]

_openings = itertools.count()


@contextmanager
def on_loopback(world: World) -> Iterator[None]:
    """Inside the block, ranks that are all on one node listen only on its loopback interface, unless the user has set another."""
    names = [name for name in LOOPBACK if name not in os.environ] if world.on_one_node else []
    os.environ.update({name: LOOPBACK[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def placed(world: World, store: Any) -> World:
    """``world``, completed with facts that a launcher may not provide: which node this is, and how many ranks it has.

    Args:
        world: this rank's place.
        store: the store that all ranks share.
    """
    if world.local_size and world.node_rank is not None:
        return world
    store.set(f"node of {world.rank}", _node())
    nodes = [store.get(f"node of {rank}") for rank in range(world.size)]
    mine = nodes[world.rank]
    return replace(world, local_size=nodes.count(mine), node_rank=list(dict.fromkeys(nodes)).index(mine))


def _node() -> str:
    """An identity that processes share if they see each other and the same loopback interface, which containers on one machine may not."""
    with suppress(OSError):
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {spaces}"
    return socket.gethostname()


def _rendezvous_on_one_node(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Torch's rendezvous for ``parwrap://job/KEY`` and ``parwrap://launcher/NAMES``; the key, or the values of the names, identifies one
    job."""
    parsed = urlparse(url)
    query = parse_qs(parsed.query)
    rank, size = int(query["rank"][0]), int(query["world_size"][0])
    job = parsed.path.strip("/")
    if parsed.netloc == "launcher":
        job = _launcher_process(job.split(","))
    path = _private_directory() / f"{job}-{next(_openings)}"
    store = dist.FileStore(str(path), size)
    if timeout is not None:
        store.set_timeout(timeout)
    try:
        yield store, rank, size
    finally:
        if store.add("left", 1) == size:  # the store itself would only close when nothing refers to it any more
            path.unlink(missing_ok=True)


def _private_directory() -> Path:
    """A directory in which no other user can replace our file."""
    directory = Path(tempfile.gettempdir(), f"parwrap-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LaunchError(
            f"the ranks of this node share {directory}, but that is not a directory that only this user can access: remove it, or set "
            "TMPDIR to another directory, the same for all ranks."
        )
    return directory


def _launcher_process(names: list[str]) -> str:
    """The nearest parent process that is not a rank of this job.

    It is the same for all ranks on this node, and identifies the job if the launcher does not.

    Args:
        names: the variables with a rank's number and the world size, which all processes below the launcher have, such as a shell.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    process, born = os.getppid(), ""
    with suppress(OSError):  # another user's, such as a daemon's, or not Linux
        while True:
            *_, fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")
            parent, born = int(fields.split()[1]), fields.split()[19]
            if not mine or parent == 0 or not mine <= set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
                break
            process = parent
    return f"{process}-{born}"


dist.register_rendezvous_handler(ONE_NODE, _rendezvous_on_one_node)
