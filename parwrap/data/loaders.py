"""The actor on loaders: decides, when a pass over a loader begins, whether this rank sees all of it or its share.

What is read to be looked at (evaluation) is seen whole by every rank, so that printed metrics are those of a single
process; what is trained on is shared out, which is ``shares.py``'s.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from parwrap.batch_weights import Reading, Weighed
from parwrap.data.iterables import world_size_asked
from parwrap.data.passes import Pass
from parwrap.data.position import MARK, Position
from parwrap.data.sharding import samples_in, shuffles, users_own
from parwrap.data.shares import Shares
from parwrap.data.sharing import Sharing, TrainingData
from parwrap.errors import UsageError
from parwrap.group import Group, is_alone
from parwrap.loop import Loop
from parwrap.streams import Streams

__all__ = ["Loaders"]


@dataclass
class _History:
    """What is known of one loader.

    Attributes:
        trains: what the last pass was for; ``None`` until there was one.
        has_trained: whether there ever was a backward in a pass.
        corrected: whether a pass has shown that the guess about this loader was wrong; then ``trains`` holds from then on.
        told: the length that was given before the first pass, and that of a pass of the other kind, if they differ.
    """

    trains: bool | None = None
    has_trained: bool = False
    corrected: bool = False
    told: tuple[int, int] | None = None


class Loaders:
    """Shares out the loaders of a loop.

    Args:
        group: the ranks to share with; ``None`` for a single rank.
        loop: what the training loop has done so far.
        streams: the random streams.
        sharing: gives how to share out now.
        began: called at the first training pass.

    Attributes:
        streams: the random streams.
    """

    def __init__(
        self,
        group: Group | None,
        loop: Loop,
        streams: Streams,
        sharing: Callable[[], Sharing],
        began: Callable[[TrainingData], None],
    ) -> None:
        self._loop, self.streams, self._sharing = loop, streams, sharing
        self._size, self._alone = (group.world.size, False) if group else (1, True)
        self._shares = Shares(group, streams, sharing, began)
        self._positions: weakref.WeakKeyDictionary[DataLoader, Position] = weakref.WeakKeyDictionary()
        self._trained = 0
        self._histories: weakref.WeakKeyDictionary[DataLoader, _History] = weakref.WeakKeyDictionary()
        self._shuffled_seen = False

    def agree(self, loader: DataLoader) -> None:
        """Have all ranks hold the same samples behind ``loader``, of which each is about to look at a part."""
        self._check_told(loader, self._history(loader), trains=False)
        self._shares.agree(loader)

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over ``loader``."""
        if _is_private():
            return original(loader)
        if self._loop.parts:
            return self._evaluation(loader, original, lambda: None)
        history = self._history(loader)
        if not torch.is_grad_enabled():
            self._check_told(loader, history, trains=False)
            return self._evaluation(loader, original, lambda: None)
        if not history.corrected:
            history.trains = not (self._loop.in_eval_mode() if self._shares.keeps() else self._loop.evaluating())
        self._check_told(loader, history, bool(history.trains))
        if not history.trains:
            return self._evaluation(loader, original, self._watch_evaluation(history))
        position = self._begin(loader)
        batches, weights = self._shares.batches(loader, original, position)
        self._loop.opened_pass()
        sharing, reading = self._sharing(), Reading()

        def drawn(batch: Any) -> None:
            self._loop.drew_batch()
            position.drew()
            if weights is not None:
                weight = weights.popleft()
                factor, split = sharing.loss_factor(weight, self._size), sharing.batch == "global"
                self._loop.weights.draw(reading, Weighed(weight, factor, samples_in(batch), split))

        return Pass(batches, self._watch_training(history, position, reading), drawn, self._loop.reads_in_for)

    def position(self, loader: DataLoader) -> Position:
        """Where training passes over ``loader`` are, also before the first."""
        loader = users_own(loader)
        if loader not in self._positions:
            self._positions[loader] = Position(loader, self.streams, self._shares.plan)
        return self._positions[loader]

    def positions(self) -> list[Position]:
        """Those of the loaders that were trained on, in the order of the first passes."""
        return sorted((each for each in self._positions.values() if each.number is not None), key=lambda each: each.number or 0)

    def _begin(self, loader: DataLoader) -> Position:
        if getattr(loader, "next_iter_state", None) is not None:
            raise UsageError(
                f"a {type(loader).__name__} was given a state that was taken without parwrap, which does not say where several ranks are. "
                "Take it from the loader, or from parwrap.loaders(), where parwrap runs the training."
            )
        position = self.position(loader)
        if position.number is None:
            position.number = self._trained
            self._trained += 1
        return position

    def loader_state(self, loader: DataLoader, original: Callable[[], dict]) -> dict:
        """``state_dict()`` of a loader that has one: its own iterator is not the one that is read where it is shared out."""
        return original() if _is_private() or not self._will_train(loader) else self.position(loader).state_dict()

    def load_loader_state(self, loader: DataLoader, original: Callable[[dict], None], state: dict) -> None:
        """``load_state_dict(state)`` of such a loader."""
        if isinstance(state, dict) and MARK in state:
            self.position(loader).load_state_dict(state)
        else:
            original(state)

    def _evaluation(self, loader: DataLoader, original: Callable, watch: Callable[[], None]) -> Iterator:
        with self.streams.shared():  # a loader with workers draws ahead at once
            batches, whole = original(loader), not (self._loop.parts or self._shares.shares_out_itself(loader))
        self._loop.opened_evaluation()
        position = self.position(loader)
        position.looked_at += 1

        def drawn(batch: Any) -> None:
            self._loop.drew_batch(whole)
            watch()

        def closed(exhausted: bool) -> None:
            position.looked_at -= 1
            self._loop.closed_evaluation()
            watch()

        return Pass(batches, closed, drawn)

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)``: of what this rank gets to see of it."""
        whole = original(loader)
        if _is_private() or self._loop.parts:
            return whole
        history, trains = self._history(loader), self._will_train(loader)
        share = self._shares.length(loader, whole)
        if history.trains is None and torch.is_grad_enabled():
            history.told = ((share, whole) if trains else (whole, share)) if share != whole else None
        return share if trains else whole

    def world_size_asked(self) -> None:
        """A dataset that asks for the number of ranks shards itself."""
        world_size_asked()

    def _history(self, loader: DataLoader) -> _History:
        self._shuffled_seen |= not isinstance(loader.dataset, IterableDataset) and shuffles(loader)
        return self._histories.setdefault(loader, _History())

    def _will_train(self, loader: DataLoader) -> bool:
        """The best guess for a loader that was not iterated yet: scripts ask for its length before the first pass."""
        history = self._history(loader)
        if history.has_trained:
            return torch.is_grad_enabled()
        if history.trains is not None:
            return history.trains
        if self._loop.in_eval_mode() or any(other.trains for other in self._histories.values()):
            return False
        return not self._shuffled_seen or shuffles(loader)

    def _check_told(self, loader: DataLoader, history: _History, trains: bool) -> None:
        """Say so if the length that was given before the first pass has turned out wrong; one that trains may be looked at before."""
        if history.told is None or not (trains or self._loop.backwards or not shuffles(loader)):
            return
        (told, other), history.told = history.told, None
        if trains == (told > other):
            seen, why = ("this rank's share", "trained on") if trains else ("all of it", "only looked at")
            warnings.warn(
                f"parwrap: len() of a DataLoader was {told} when it was asked for before its first pass, and now it is {other}: "
                f"the loader is {why}, so that a pass sees {seen}. What was computed from {told}, such as the steps of a schedule or an "
                f"average, is off: ask for it in the pass, or after model.{'train' if trains else 'eval'}().",
                stacklevel=2,
            )

    def _watch_training(self, history: _History, position: Position, reading: Reading) -> Callable[[bool], None]:
        before = self._loop.backwards

        def closed(exhausted: bool) -> None:
            position.end()
            self._loop.closed_pass()
            self._loop.weights.close(reading)
            history.has_trained |= self._loop.backwards > before
            if exhausted and not history.has_trained and not self._shares.keeps():
                history.trains, history.corrected = False, True
                self._warn(
                    "a DataLoader was read to its end without training, and each rank saw only its share of it. "
                    "From its next pass on every rank sees all of it; with torch.no_grad() around the loop, the first would too."
                )

        return closed

    def _watch_evaluation(self, history: _History) -> Callable[[], None]:
        before = self._loop.backwards

        def watch() -> None:
            if self._loop.backwards > before and not self._loop.passes and not history.corrected:
                history.trains = history.has_trained = history.corrected = True
                self._warn(
                    "a DataLoader was read in eval() mode or before any optimizer was built, and yet trained on: every rank "
                    "trained on all of it. From its next pass on each rank gets its share."
                )

        return watch

    def _warn(self, text: str) -> None:
        """A single rank has nothing that others could lack."""
        if not self._alone:
            warnings.warn(f"parwrap: {text}", stacklevel=3)


def _is_private() -> bool:
    """Whether a loader is read by a worker or by a lone rank, which has nobody to share with."""
    return get_worker_info() is not None or is_alone()
