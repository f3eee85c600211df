"""The iterators of one pass over a loader: what it yields, and when it is over.

What a pass is for, and which batches it has, is decided by ``loaders.py`` and ``shares.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from parwrap.data.looking import ShareThenRest
from parwrap.streams import Streams

__all__ = ["Pass", "SharedDraws"]


class SharedDraws:
    """What a sampler yields, each drawn on the shared streams, so that all ranks draw the same.

    Attributes:
        drawn: how many were drawn in this pass.
        last: the last of them.
        check: called with the one that is drawn as that number, or with ``None`` if there is no such.
    """

    def __init__(self, indices: Any, streams: Streams) -> None:
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
    """The iterator of one pass; tells ``closed(exhausted)`` once, when it ends, fails or is dropped.

    Args:
        batches: what the pass yields.
        closed: called with whether the pass has come to its end.
        drawn: called after each batch.
        instead: called before the first batch; gives the pass that is read in the place of this one, if it is another.
    """

    def __init__(
        self,
        batches: Iterator,
        closed: Callable[[bool], None],
        drawn: Callable[[], None] | None = None,
        instead: Callable[[], Pass | None] | None = None,
    ) -> None:
        self._batches, self._closed, self._drawn, self._instead = batches, closed, drawn, instead
        self._begun = False
        self._ahead: list[Callable[[], Any]] = []

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self._instead:
            self._exchange()
        try:
            batch = self._ahead.pop()() if self._ahead else next(self._batches)
        except BaseException as ended:
            self._close(isinstance(ended, StopIteration))
            raise
        self._begun = True
        if self._drawn:
            self._drawn()
        return batch

    def _exchange(self) -> None:
        asked, self._instead = self._instead, None
        other = asked() if asked else None
        if other is not None:
            self._close(False)
            self._batches, self._drawn = other, None

    def last(self) -> bool:
        """Whether no other batch comes after the one that was drawn last, which is trained on; looks one ahead."""
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

    def _close(self, exhausted: bool) -> None:
        closed, self._closed = self._closed, _ignore
        closed(exhausted)


def _drawn_ahead(batches: Iterator) -> Callable[[], Any]:
    """Gives the next of ``batches``, which is drawn now, or raises what drawing it has raised."""
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


def _ignore(told: Any) -> None:
    pass
