"""Where ranks meet and listen: the store they share, and the folder that the ranks of a node share.

Ranks of one node meet through a file in that folder and listen only on the loopback interface; no port is opened that two jobs or
another user could use. Ranks of several nodes meet as torch does.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse

import torch.distributed as dist

from parwrap.errors import LaunchError
from parwrap.ranks.launchers import LOOPBACK
from parwrap.ranks.world import ONE_NODE, World

__all__ = ["Meeting", "met", "on_loopback", "private_folder"]

_openings = itertools.count()
"""How many process groups this process has opened. All ranks count alike."""


class Meeting(NamedTuple):
    """What ranks share once they have met.

    Attributes:
        world: this rank's place, with the facts that the launcher did not set.
        store: the store of all ranks.
        folder: a folder of this job that only this user can access, shared by the ranks of this node.
    """

    world: World
    store: dist.Store
    folder: Path


@contextmanager
def met(world: World, timeout: timedelta) -> Iterator[Meeting]:
    """Meet the other ranks of ``world`` inside the block."""
    opening = next(_openings)
    parsed = urlparse(world.rendezvous)
    if parsed.scheme == ONE_NODE:
        job = parsed.path.strip("/")
        folder = private_folder() / f"{job if parsed.netloc == 'job' else _launcher_process(job.split(','))}-{opening}"
        folder.mkdir(mode=0o700, exist_ok=True)
        store: dist.Store = dist.FileStore(str(folder / "store"), world.size)
        store.set_timeout(timeout)
        rendezvous = None
    else:
        rendezvous = dist.rendezvous(world.rendezvous, world.rank, world.size, timeout=timeout)
        store, _, _ = next(rendezvous)
        # a launcher's store outlives a process group, and the next one must not read the last one's keys
        store = dist.PrefixStore(f"parwrap/{opening}", store)
        world = _placed(world, store)
        name = store.compare_set(f"folder of node {world.node_rank}", "", secrets.token_hex(16)).decode()
        folder = private_folder() / f"{int(name, 16):032x}"  # a number, never a path
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield Meeting(world, store, folder)
    finally:
        if rendezvous is not None:
            rendezvous.close()
        (folder / f"left-{world.local_rank}").touch()
        if sum(1 for _ in folder.glob("left-*")) >= world.local_size:
            shutil.rmtree(folder, ignore_errors=True)


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


def _placed(world: World, store: dist.Store) -> World:
    """``world``, completed with facts that a launcher may not provide: which node this is, and how many ranks it has."""
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


def private_folder() -> Path:
    """A folder in which no other user can replace our files."""
    folder = Path(tempfile.gettempdir(), f"parwrap-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LaunchError(
            f"the ranks of this node share {folder}, but that is not a directory that only this user can access: remove it, or set "
            "TMPDIR to another directory, the same for all ranks."
        )
    return folder


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
