"""Marks when an interceptor itself calls backwards, clips and steps, which it intercepts too, but which are not the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parwrap.intercept.interceptor import Interceptor

__all__ = ["AtWork"]


class AtWork(Interceptor):
    """The base of such interceptors: while they are busy, they let calls pass."""

    _busy = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Calls inside are not the user's."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
