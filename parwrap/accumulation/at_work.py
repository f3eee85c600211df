"""Whether an interceptor calls backwards, clips and steps itself: it intercepts these too, and they are not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parwrap.intercept.interceptor import Interceptor

__all__ = ["AtWork"]


class AtWork(Interceptor):
    """The base of interceptors that do so: while they are busy, they let calls pass."""

    _busy = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """What is called inside is not a call of the user."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
