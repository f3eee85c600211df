"""The first failure in a process group, told by ranks that fail because of it: most launchers show what each raises, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

from parwrap.system.remote_exception import in_one_line
from parwrap.world.world import World

__all__ = ["first_failure_told"]


@contextmanager
def first_failure_told(world: World, store: Store) -> Iterator[None]:
    """What leaves the block after another rank has failed gets a note that says which and how, on Python 3.11 and later.

    Args:
        world: this rank's place.
        store: that of the process group.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        cause = in_one_line(error)
        first = f"{world.rank} {cause}"
        with suppress(RuntimeError):  # the store is gone, with the rank that kept it
            first = store.compare_set("first failure", "", first).decode()
        rank, _, firsts_cause = first.partition(" ")
        if firsts_cause != cause and isinstance(error, Exception) and hasattr(error, "add_note"):
            error.add_note(f"parwrap: rank {rank} of {world.size} had failed before: {firsts_cause}")
        raise
