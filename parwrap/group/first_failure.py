"""The first failure in a process group, named by ranks that fail because of it: most launchers show the ranks' errors in any order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

from parwrap.system.remote_exception import in_one_line
from parwrap.world.world import World

__all__ = ["naming_first_failure"]


@contextmanager
def naming_first_failure(world: World, store: Store) -> Iterator[None]:
    """An exception that leaves the block after another rank has failed gets a note about that failure, on Python 3.11 and later.

    Args:
        world: this rank's place.
        store: the store of the process group.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        cause = in_one_line(error)
        first = f"{world.rank} {cause}"
        with suppress(RuntimeError):  # the store has ended with the rank that kept it
            first = store.compare_set("first failure", "", first).decode()
        rank, _, firsts_cause = first.partition(" ")
        if firsts_cause != cause and isinstance(error, Exception) and hasattr(error, "add_note"):
            error.add_note(f"parwrap: rank {rank} of {world.size} had failed before: {firsts_cause}")
        raise
