"""The iterators of one pass over a loader, which report its items and its end.

``loaders.py`` and ``training_share.py`` decide what a pass is for and which batches it has.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from parwrap.data.looking import ShareThenRest
from parwrap.loop.random_streams import RandomStreams
from parwrap.patching.imported_names import is_installed, is_standard

__all__ = ["Pass", "SharedDraws"]


class SharedDraws:
    """Draws each item of a sampler on the shared streams, so that all ranks draw the same.

    Attributes:
        drawn: the number of draws in this pass.
        last: the last draw.
        check: a draw's number, and a function, called with that draw, or with ``None`` if the sampler ends before it.
    """

    def __init__(self, indices: Any, streams: RandomStreams) -> None:
        self._indices = self.within = indices
        self._streams = streams
        self.drawn = 0
        self.last: Any = None
        self.check: tuple[int, Callable[[Any], None]] = (0, _ignore)

    def __iter__(self) -> Iterator:
        self.drawn = 0
        with self._streams.shared():
            drawing = iter(self._indices)
        nothing = object()
        while True:
            with self._streams.shared():
                drawn = next(drawing, nothing)
            if drawn is nothing:
                if self.drawn < self.check[0]:
                    self.check[1](None)
                return
            self.drawn, self.last = self.drawn + 1, drawn
            if self.drawn == self.check[0]:
                self.check[1](drawn)
            yield drawn

    def __len__(self) -> int:
        return len(self._indices)


class Pass:
    """The iterator of one pass. It calls ``closed(exhausted)`` once, when it ends, fails or is dropped.

    Args:
        batches: the batches of the pass.
        closed: a function, called with whether the pass was read to its end.
        drawn: a function, called with each batch.
        in_for: called, when it changes, with whether a ``for`` statement reads the pass and alone holds it. A pass that something else
            reads may stay open after the loop around it.
        instead: a function, called before the first batch, with whether that is the only one, of ``next(iter(loader))``; returns the pass
            that replaces this one, or the same.
    """

    def __init__(
        self,
        batches: Iterator,
        closed: Callable[[bool], None],
        drawn: Callable[[Any], None] | None = None,
        in_for: Callable[[bool], None] | None = None,
        instead: Callable[[bool], Pass | None] | None = None,
    ) -> None:
        self._in_for: Callable[[bool], None] | None = None
        if isinstance(batches, Pass):
            in_for, batches._in_for = in_for or batches._in_for, None
        self._batches, self._closed, self._drawn, self._in_for, self._instead = batches, closed, drawn, in_for, instead
        self._is_in_for = False
        self._begun = False
        self._ahead: list[Callable[[], Any]] = []

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self._instead:
            held = sys.getrefcount(self)
            self._exchange(held <= _Probe.held and _in_next(sys._getframe(1)))
        if self._in_for:
            held = sys.getrefcount(self)
            self._reads_in_for(held <= _Probe.held and _in_for_statement(sys._getframe(1)))
        try:
            batch = self._ahead.pop()() if self._ahead else next(self._batches)
        except BaseException as ended:
            self._close(isinstance(ended, StopIteration))
            raise
        self._begun = True
        if self._drawn:
            self._drawn(batch)
        return batch

    def _exchange(self, only_one: bool) -> None:
        asked, self._instead = self._instead, None
        other = asked(only_one) if asked else None
        if other is not None:
            self._close(False)
            self._batches, self._drawn = other, None
            self._in_for, other._in_for = other._in_for, None

    def last(self) -> bool:
        """Whether the last drawn batch is the final one of the pass. This draws one batch ahead."""
        if isinstance(self._batches, Pass):
            return self._batches.last()
        if isinstance(self._batches, ShareThenRest):
            self._batches.show_training()
        if self._begun and not self._ahead:
            self._ahead.append(_drawn_ahead(self._batches))
        return self._begun and self._ahead[0] is _nothing

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __del__(self) -> None:
        self._close(False)

    def _reads_in_for(self, now: bool) -> None:
        if self._in_for and now != self._is_in_for:
            self._is_in_for = now
            self._in_for(now)
        if not now:
            self._in_for = None

    def _close(self, exhausted: bool) -> None:
        self._reads_in_for(False)
        closed, self._closed = self._closed, _ignore
        closed(exhausted)


def _in_for_statement(frame: FrameType | None) -> bool:
    """Whether ``frame`` asks for the next item of a ``for`` statement, directly or through C iterators and library generators."""
    while frame is not None and frame.f_code.co_code[frame.f_lasti] == dis.opmap["FOR_ITER"]:
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        if not (is_installed(frame.f_code.co_filename) or is_standard(frame.f_code.co_filename)):
            return False  # the script may hold a generator in a variable
        frame = frame.f_back
    return False


def _in_next(frame: FrameType | None) -> bool:
    """Whether ``frame`` calls ``next``."""
    if frame is None or frame.f_code.co_code[frame.f_lasti] == dis.opmap["FOR_ITER"]:
        return False
    begins: dict[int, tuple] = {}
    named, line = [], None
    for each in dis.get_instructions(frame.f_code):
        line = each.starts_line or line
        positions = getattr(each, "positions", None)  # before Python 3.11, only the line is known
        begins[each.offset] = (positions.lineno, positions.col_offset) if positions else (line,)
        if each.argval == "next" and each.opname.startswith("LOAD_"):
            named.append(each.offset)
    return any(offset < frame.f_lasti and begins[offset] == begins.get(frame.f_lasti) for offset in named)


class _Probe:
    """The reference count of an iterator while its loop reads it, which differs between versions of Python."""

    held = 0

    def __iter__(self) -> _Probe:
        return self

    def __next__(self) -> None:
        _Probe.held = sys.getrefcount(self)
        raise StopIteration


for _ in _Probe():
    pass


def _drawn_ahead(batches: Iterator) -> Callable[[], Any]:
    """Draw the next of ``batches`` now; return a function that returns it or raises the error."""
    try:
        batch = next(batches)
    except StopIteration:
        return _nothing
    except Exception as error:
        return partial(_raise, error)
    return lambda: batch


def _nothing() -> Any:
    raise StopIteration


def _raise(error: Exception) -> Any:
    raise error


def _ignore(given: Any) -> None:
    pass
