"""The report of a hang: when a rank has waited for long, report once where every rank is.

A thread of each rank checks the status board from time to time. It does not end the run, because a slow rank is not an error.
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
"""The number of checks within the allowed time."""


@contextmanager
def watched(rank_positions: RankPositions, rank: int, hang_after: float, timeout: float) -> Iterator[None]:
    """Inside the block, report once on rank 0 if any rank waits for longer than ``hang_after`` seconds.

    Every rank publishes its place before that report, and before ranks that time out raise errors.

    Args:
        rank_positions: where each rank is.
        rank: this rank.
        hang_after: the allowed time in seconds.
        timeout: seconds after which a waiting rank gives up.
    """
    main, said = threading.get_ident(), sys.stderr
    place_after = min(hang_after, timeout / 2)

    def look(stopped: threading.Event) -> None:
        while not stopped.wait(place_after / LOOKS):
            if not rank_positions.waited(place_after):
                continue
            frame = sys._current_frames().get(main)
            if frame is not None:
                rank_positions.publish_place(innermost(frame))
            if not rank_positions.waited(hang_after):
                continue
            # within this time, all ranks check, and publish where they are
            if rank == 0 and not stopped.wait(2 * hang_after / LOOKS) and rank_positions.waited(hang_after):
                print(f"parwrap: a rank has waited for more than {hang_after:g} s. {rank_positions.described()}", file=said, flush=True)
                return

    with in_background(look, "parwrap watch"):
        yield
