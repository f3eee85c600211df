"""Whether an actor calls backwards, clips and steps itself: these come back to it, and are none of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["AtWork"]


class AtWork:
    """The base of actors that do so; they let pass what comes while they are busy."""

    _busy = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """What is called inside is none of the user's calls."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
