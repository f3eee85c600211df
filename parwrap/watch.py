"""The report of a hang: when a rank has waited for long, say once where every rank is.

A thread of each rank looks into the mailbox now and then. Nothing is ended here: a slow rank is no error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from parwrap.meetings import Meetings
from parwrap.sites import innermost

__all__ = ["watched"]

LOOKS = 10
"""How often the thread looks during the time that is thought too long."""


@contextmanager
def watched(meetings: Meetings, rank: int, hang_after: float) -> Iterator[None]:
    """While this is held, report on rank 0 if any rank waits for longer than ``hang_after`` seconds.

    Args:
        meetings: this rank's.
        rank: this one.
        hang_after: in seconds.
    """
    stopped, main, said = threading.Event(), threading.get_ident(), sys.stderr

    def look() -> None:
        while not stopped.wait(hang_after / LOOKS):
            if not meetings.waited(hang_after):
                continue
            frame = sys._current_frames().get(main)
            if frame is not None:
                meetings.tell_where(innermost(frame))
            # all ranks look in this time, and tell where they are
            if rank == 0 and not stopped.wait(2 * hang_after / LOOKS) and meetings.waited(hang_after):
                print(f"parwrap: a rank has waited for more than {hang_after:g} s. {meetings.whereabouts()}", file=said, flush=True)
                return

    thread = threading.Thread(target=look, name="parwrap watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
