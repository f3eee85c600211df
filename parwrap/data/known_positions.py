"""The positions of all loaders, in the order of their first training passes.

``loader_position.py`` defines a position, and saves and loads it.
"""

from __future__ import annotations

import weakref

from torch.utils.data import DataLoader

from parwrap.data.loader_position import Position
from parwrap.data.samplers import users_own
from parwrap.data.training_share import TrainingShares
from parwrap.errors import UsageError
from parwrap.loop.random_streams import RandomStreams

__all__ = ["KnownPositions"]


class KnownPositions:
    """Finds the position of a loader.

    Args:
        streams: the random streams.
        shares: the object that makes this rank's share of a loader.
    """

    def __init__(self, streams: RandomStreams, shares: TrainingShares) -> None:
        self._streams, self._shares = streams, shares
        self._positions: weakref.WeakKeyDictionary[DataLoader, Position] = weakref.WeakKeyDictionary()
        self._trained = 0

    def of(self, loader: DataLoader) -> Position:
        """The position of ``loader``, even before its first training pass."""
        loader = users_own(loader)
        if loader not in self._positions:
            self._positions[loader] = Position(loader, self._streams, self._shares.plan)
        return self._positions[loader]

    def trained(self) -> list[Position]:
        """The positions of the loaders that were trained on, in the order of the first passes."""
        return sorted((each for each in self._positions.values() if each.number is not None), key=lambda each: each.number or 0)

    def begin(self, loader: DataLoader) -> Position:
        """The position of ``loader``, over which a training pass begins."""
        if getattr(loader, "next_iter_state", None) is not None:
            raise UsageError(
                f"a {type(loader).__name__} got a state that was saved without parwrap, which does not contain the positions of several "
                "ranks. Call state_dict() on the loader, or on parwrap.loaders(), while parwrap runs the training."
            )
        position = self.of(loader)
        if position.number is None:
            position.number = self._trained
            self._trained += 1
        return position

    def take_back(self, loader: DataLoader, position: Position) -> None:
        """Record that ``loader`` has not been trained on yet, although a pass over it began as one that may train."""
        if position.number is not None and position.number == self._trained - 1:
            position.number = None
            self._trained -= 1
        self._shares.take_back(loader)
