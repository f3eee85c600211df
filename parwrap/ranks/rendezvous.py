"""Where ranks meet and listen: the store they share, and the folder that the ranks of a node share.

Ranks of one node meet through a file in that folder, unless a launcher or the user has chosen another rendezvous. The file needs no port.
Ranks that are all on one node listen on the loopback interface only, if that has a fixed name and the user has set no other. Ranks of
several nodes meet as torch does, and gloo listens on the interface that leads to the others. A folder is locked while a process uses it,
so the next start can find those that killed processes left.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse

import torch.distributed as dist

from parwrap.errors import LaunchError
from parwrap.ranks.environment import environment
from parwrap.ranks.launchers import LOOPBACK
from parwrap.ranks.network import Way, is_loopback, variables_for, way_to
from parwrap.ranks.platform import OPEN_OWN, is_private, lock, unlock, user
from parwrap.ranks.store import SignedStore
from parwrap.ranks.world import ONE_NODE, World

__all__ = ["Meeting", "job_folder", "met", "private_folder"]

LOCK = "lock"
"""The file in a folder that is locked while the folder is used."""

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.,-]*")
"""The name of a folder: one part of a path, and not a hidden one."""

_openings = itertools.count()
"""Numbers the process groups that this process opens. The numbers are the same on all ranks."""


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
    """Inside the block, share a store with the other ranks of ``world``. A rank waits for others for at most ``timeout``.

    Where they listen is set inside the block, unless the user has set it.

    Raises:
        LaunchError: the folder that the ranks of this node share is not private, or a name or a value in the store is not valid.
    """
    opening = next(_openings)
    parsed = urlparse(world.rendezvous)
    if parsed.scheme == ONE_NODE:
        name = parsed.path.strip("/")
        job, _, start = (name if parsed.netloc == "job" else _launcher_process(name.split(","))).partition("/")
        with _used(job) as shared:
            folder = _made(shared, f"{start}-{opening}" if start else str(opening))
            store = dist.FileStore(str(folder / "store"), world.size)
            store.set_timeout(timeout)
            first = world.rank - world.local_rank
            with _on_loopback():
                yield Meeting(replace(world, node_ranks=tuple(range(first, first + world.local_size))), store, folder)
        return
    rendezvous = dist.rendezvous(world.rendezvous, world.rank, world.size, timeout=timeout)
    torchs, _, _ = next(rendezvous)
    try:
        # a launcher's store outlives a process group, and the next one must not read the last one's keys
        signed = SignedStore(torchs, f"meeting {opening}")
        world = _placed(world, signed)
        number = signed.set_first(f"folder of node {world.node_rank}", secrets.randbits(128))
        listening = _on_loopback() if world.on_one_node else _on_route(world, signed)
        with listening, _used(f"{number:032x}") as shared:  # a number, never a path
            yield Meeting(world, dist.PrefixStore(f"parwrap/{opening}", torchs), _made(shared, str(opening)))
    finally:
        rendezvous.close()


def _on_loopback() -> AbstractContextManager[None]:
    """Inside the block, this rank listens only on the loopback interface of its node, which has all ranks."""
    return environment({name: value for name, value in LOOPBACK.items() if name not in os.environ})


def _on_route(world: World, store: SignedStore) -> AbstractContextManager[None]:
    """Inside the block, gloo listens on the interface that leads to other nodes: by the route to rank 0, and there to another node.

    A machine's own name often resolves to its loopback, so ranks exchange their addresses on that route.
    """
    where = urlparse(world.rendezvous)
    host = os.environ.get("MASTER_ADDR", "").strip("[]") if where.scheme == "env" else where.hostname
    way = _way_to(host)
    store.set(f"address of {world.rank}", "" if way is None or is_loopback(way.here) else way.here)
    if way is not None and is_loopback(way.here):
        found = (store.get(f"address of {rank}", str) for rank in range(world.size))
        way = next((other for address in found if address and (other := _way_to(address)) and not other.own), None)
    return environment(variables_for(way.interface if way else None, os.environ))


def _way_to(host: str | None) -> Way | None:
    with suppress(OSError, UnicodeError):  # a name that is unknown here, or no route
        return way_to(host, 0) if host else None
    return None


def _placed(world: World, store: SignedStore) -> World:
    """``world``, completed with facts that a launcher may not provide: which node this is, and which ranks it has.

    A launcher may count all ranks of a machine although each container on it is a node, or may number ranks in turn over the nodes.
    """
    if world.on_one_node:
        return replace(world, node_rank=0, node_ranks=tuple(range(world.size)))
    if world.local_size and world.node_rank is not None:
        return world  # group.py finds the rest once the process group is open
    store.set(f"node of {world.rank}", _node())
    nodes = [store.get(f"node of {rank}", str) for rank in range(world.size)]
    mine = nodes[world.rank]
    ranks = tuple(rank for rank, node in enumerate(nodes) if node == mine)
    return replace(world, local_size=len(ranks), node_rank=list(dict.fromkeys(nodes)).index(mine), node_ranks=ranks)


def _node() -> str:
    """An identity that processes share if they see each other and the same loopback interface, which containers on one machine may not."""
    with suppress(OSError):
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {spaces}"
    return socket.gethostname()


def private_folder() -> Path:
    """A folder of this user, in which no other user can replace our files.

    Raises:
        LaunchError: something else has that name.
    """
    return _made(Path(tempfile.gettempdir()), f"parwrap-{user()}")


@contextmanager
def job_folder() -> Iterator[Path]:
    """A new folder for the job of a launcher inside the block. Its ranks meet there if :data:`INIT_METHOD` is ``parwrap://job/NAME``.

    Folders of processes that were killed are removed first.

    >>> with job_folder() as folder:
    ...     oct(folder.stat().st_mode & 0o777)
    '0o700'
    >>> folder.exists()
    False
    """
    private = private_folder()
    with _locked(private):
        for left in private.iterdir():
            if left.is_dir():
                _remove_unused(left)
    with _used(secrets.token_hex(8)) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # a process that a rank has left behind may still hold the lock


@contextmanager
def _used(name: str) -> Iterator[Path]:
    """The private folder ``name`` inside the block; the last process that uses it removes it."""
    private = private_folder()
    with _locked(private):  # so that no process removes the folder before it is locked
        folder = _made(private, name)
        descriptor = _lock(folder, shared=True)
    try:
        yield folder
    finally:
        unlock(descriptor)  # also for processes that were forked since
        os.close(descriptor)
        with _locked(private):
            _remove_unused(folder)


def _made(parent: Path, name: str) -> Path:
    """The folder ``name`` in ``parent``, made if it does not exist. Only this user may access it."""
    if not NAME.fullmatch(name):
        raise LaunchError(f"{name!r} is not the name of a job: use letters, digits, '_' and '-' in PARWRAP_INIT_METHOD=parwrap://job/NAME.")
    folder = parent / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not is_private(found):
        raise LaunchError(
            f"the ranks of this node share {folder}, which is not a directory that only this user can access: remove it, or set TMPDIR to "
            "another directory, the same for all ranks."
        )
    return folder


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    descriptor = _lock(folder, wait=wait)
    try:
        yield
    finally:
        unlock(descriptor)  # also for processes that another thread has forked since
        os.close(descriptor)


def _lock(folder: Path, shared: bool = False, wait: bool = True) -> int:
    """A descriptor that locks ``folder`` until it is closed or its process ends."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | OPEN_OWN, 0o600)
    try:
        lock(descriptor, shared, wait)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_unused(folder: Path) -> None:
    """Remove ``folder`` unless a process uses it. The caller holds the lock of the folder above."""
    with suppress(OSError):  # used, or another process has removed it
        with _locked(folder, wait=False):
            pass
        shutil.rmtree(folder, ignore_errors=True)  # not while the lock is open: Windows removes no open file


def _launcher_process(names: list[str]) -> str:
    """An identifier of the launcher's process: the nearest ancestor without this rank's values of the variables ``names``.

    It is the same for all ranks on this node, and identifies the job if the launcher's variables do not.

    Args:
        names: the variables with a rank's number and the world size. A shell between launcher and rank has them too.
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
