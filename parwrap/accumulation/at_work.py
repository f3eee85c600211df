"""Marks the backward passes, clips and steps that an interceptor calls itself: it must not intercept these as the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parwrap.intercept.interceptor import Interceptor

__all__ = ["AtWork"]


class AtWork(Interceptor):
    """The base class of interceptors that make such calls: while they are busy, they do not intercept calls."""

    _busy = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Treat the calls inside the block as the interceptor's own."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
