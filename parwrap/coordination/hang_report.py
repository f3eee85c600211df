"""The report of a hang: when a rank has waited for long, say once where every rank is.

A thread of each rank looks into the status board now and then. Nothing is ended here: a slow rank is no error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from parwrap.coordination.call_site import innermost
from parwrap.coordination.rank_positions import RankPositions
from parwrap.system.background import in_background

__all__ = ["watched"]

LOOKS = 10
"""How often the thread looks during the time that is thought too long."""


@contextmanager
def watched(rank_positions: RankPositions, rank: int, hang_after: float, timeout: float) -> Iterator[None]:
    """While this is held, report on rank 0 if any rank waits for longer than ``hang_after`` seconds.

    Every rank writes down where it is in time for that report, and for the errors of ranks that give up.

    Args:
        rank_positions: where each rank is.
        rank: this one.
        hang_after: in seconds.
        timeout: seconds after which a rank that waits gives up.
    """
    main, said = threading.get_ident(), sys.stderr
    place_after = min(hang_after, timeout / 2)

    def look(stopped: threading.Event) -> None:
        while not stopped.wait(place_after / LOOKS):
            if not rank_positions.waited(place_after):
                continue
            frame = sys._current_frames().get(main)
            if frame is not None:
                rank_positions.tell(innermost(frame))
            if not rank_positions.waited(hang_after):
                continue
            # all ranks look in this time, and tell where they are
            if rank == 0 and not stopped.wait(2 * hang_after / LOOKS) and rank_positions.waited(hang_after):
                print(f"parwrap: a rank has waited for more than {hang_after:g} s. {rank_positions.told()}", file=said, flush=True)
                return

    with in_background(look, "parwrap watch"):
        yield
