"""Finds ranks of different nodes that wait for each other forever. Within a node, ``positions.py`` finds them on pages of shared memory.

A rank that has been blocked in one step for two seconds puts its page into the store, and compares it with that of the next rank. If ranks
are blocked at different positions, some rank differs from the next one, so one comparison for each rank suffices. Nothing is sent while
ranks move. A page that is out of date proves nothing and does no harm, because counts only grow.

On a GPU a rank may also be blocked while it runs the script: where it reads a number, such as a loss. The script may as well compute for
long there, so it looks again only after 4, 8, 16 seconds, and so on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parwrap.checks.positions import Page, Positions, State, apart, sentence
from parwrap.ranks.background import in_background
from parwrap.ranks.group import Group
from parwrap.ranks.store import SignedStore

__all__ = ["watched"]

PATIENCE = 2.0
"""Seconds in one step after which a rank counts as blocked."""

INTERVAL = 0.25


@contextmanager
def watched(group: Group, positions: Positions, report: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, end this process if it and a rank of another node can never meet. On one node the pages suffice.

    Args:
        group: the process group.
        positions: the pages of this node.
        report: shows an error, also on ranks that are silent otherwise.
    """
    if group.store is None or group.world.on_one_node:
        yield
        return
    store = SignedStore(group.store, f"positions {positions.opening}")
    rank, following = group.world.rank, (group.world.rank + 1) % group.world.size
    blocks = {State.BACKWARD, State.AVERAGES, State.CONTROL, State.INNER} | ({State.RUNS} if group.device.type == "cuda" else set())

    def watch(stopped: threading.Event) -> None:
        seen, since, patience = positions.now(), time.monotonic(), PATIENCE
        put: Page | None = None
        while not stopped.wait(INTERVAL):
            mine = positions.now()
            if mine != seen or mine.state not in blocks:
                seen, since, patience = mine, time.monotonic(), PATIENCE
            elif time.monotonic() - since > patience:
                patience *= 2 if mine.state == State.RUNS else 1
                if mine != put:
                    store.set(f"rank {rank}", list(mine))
                    put = mine
                if store.has(f"rank {following}"):
                    theirs = Page(*store.get(f"rank {following}", list))
                    if apart(mine, theirs) or apart(theirs, mine):
                        # the main thread is blocked in native code, so it cannot raise
                        there = sentence(theirs, theirs.place)
                        why = f"rank {following} {there}, and rank {rank} can never meet it there. The ranks of this node"
                        report(f"{positions.error(why)}")
                        os._exit(1)

    with in_background(watch, "parwrap watchdog"):
        yield
