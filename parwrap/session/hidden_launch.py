"""Hides from a plain script that it was launched: its own distributed code stays off, as in one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from parwrap.coordination.call_site import from_script
from parwrap.intercept.interceptor import Interceptor, intercepts

__all__ = ["HiddenGroup", "without_variables"]


@contextmanager
def without_variables(names: Iterable[str]) -> Iterator[None]:
    """``os.environ`` without the variables ``names``."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


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
