"""A thread that runs during a ``with`` block. The caller defines its work and handles its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["in_background"]


@contextmanager
def in_background(run: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run ``run`` in a thread during the block. ``run`` must return soon after its argument, an event, is set.

    >>> with in_background(lambda stopped: print("stopped" if stopped.wait() else ""), "parwrap example"):
    ...     print("held")
    held
    stopped
    """
    stopped = threading.Event()
    thread = threading.Thread(target=run, args=(stopped,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
