"""Hides the process group from a plain script: it sees none, as in a single process, so its own distributed code stays off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from parwrap.coordination.call_site import from_script
from parwrap.intercept.interceptor import Interceptor, intercepts

__all__ = ["HiddenGroup"]


class HiddenGroup(Interceptor):
    """Hides the group from the script's own code; torch, parwrap and installed libraries see it."""

    def __init__(self) -> None:
        self._shown = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the group to the script inside the block, because one of its functions asked parwrap for ranks."""
        self._shown += 1
        try:
            yield
        finally:
            self._shown -= 1

    @intercepts
    def hides_group(self, frame: FrameType) -> bool:
        """Whether the code of ``frame`` must not see the group."""
        return not self._shown and from_script(frame)
