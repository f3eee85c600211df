"""Rank 0's thread that answers clones: whether rank 0 has passed the point of the script at which a clone waits.

Rank 0 may have written a path less often than a clone did, by its own numbers, and then wait for that clone in a collective;
its main thread could not say so any more. Nobody asks in a regular run.
"""

from __future__ import annotations

import threading

from parwrap.group import Group

__all__ = ["Answers"]

INTERVAL = 0.2
"""Seconds between two looks for questions."""


class Answers:
    """The thread; it has a connection to the store of its own, since rank 0 may be waiting in the other.

    Args:
        group: the process group.
        topic: what all keys in the store begin with.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._group, self._topic, self._store = group, topic, group.store.clone()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parwrap-files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        waiting: dict[int, int] = {}
        asked = 1
        while not self._ended.wait(INTERVAL):
            try:
                while self._store.check([f"{self._topic}/question/{asked}"]):
                    waiting[asked] = int(self._store.get(f"{self._topic}/question/{asked}"))
                    asked += 1
                for number in [number for number, clock in waiting.items() if self._group.clock > clock]:
                    self._store.set(f"{self._topic}/answer/{number}", b"")
                    del waiting[number]
            except (RuntimeError, AttributeError):
                return  # the store, or the process group, has gone: the ranks are ending
