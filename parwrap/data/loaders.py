"""The actor on loaders: decides, when a pass over a loader begins, whether this rank sees all of it or its share.

What is read to be looked at (evaluation) is seen whole by every rank, so that printed metrics are those of a single
process; what is trained on is shared out, which is ``shares.py``'s.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from parwrap.data.iterables import world_size_asked
from parwrap.data.passes import Pass
from parwrap.data.sharding import shuffles
from parwrap.data.shares import Shares, Sharing, TrainingData
from parwrap.group import Group, is_alone
from parwrap.loop import Loop
from parwrap.streams import Streams

__all__ = ["Loaders", "Sharing", "TrainingData"]


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
        self._loop, self._sharing, self.streams = loop, sharing, streams
        self._size = group.world.size if group else 1
        self._shares = Shares(group, streams, sharing, began)
        self._histories: weakref.WeakKeyDictionary[DataLoader, _History] = weakref.WeakKeyDictionary()
        self._shuffled_seen = False

    def agree(self, loader: DataLoader) -> None:
        """Have all ranks hold the same samples behind ``loader``, of which each is about to look at a part."""
        self._check_told(self._history(loader), trains=False)
        self._shares.agree(loader)

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over ``loader``."""
        if _is_private():
            return original(loader)
        if self._loop.parts:
            return self._evaluation(loader, original, lambda exhausted: None)
        history = self._history(loader)
        if not torch.is_grad_enabled():
            self._check_told(history, trains=False)
            return self._evaluation(loader, original, lambda exhausted: None)
        if not history.corrected:
            history.trains = not self._loop.evaluating()
        self._check_told(history, bool(history.trains))
        if not history.trains:
            return self._evaluation(loader, original, self._watch_evaluation(history))
        batches, weights = self._shares.batches(loader, original)
        self._loop.opened_pass()
        sharing = self._sharing()

        def drawn() -> None:
            self._loop.drew_batch()
            if weights is not None:
                weight = weights.popleft()
                self._loop.weigh(weight, sharing.loss_factor(weight, self._size))

        return Pass(batches, self._watch_training(history), drawn)

    def _evaluation(self, loader: DataLoader, original: Callable, closed: Callable[[bool], None]) -> Iterator:
        batches, whole = original(loader), not (self._loop.parts or self._shares.shares_out_itself(loader))
        self._loop.opened_evaluation()

        def all_closed(exhausted: bool) -> None:
            self._loop.closed_evaluation()
            closed(exhausted)

        return Pass(batches, all_closed, lambda: self._loop.drew_batch(whole))

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

    def _check_told(self, history: _History, trains: bool) -> None:
        """Say so if the length that was given before the first pass has turned out wrong; one that trains may be looked at before."""
        if history.told is None or not (trains or self._loop.backwards):
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

    def _watch_training(self, history: _History) -> Callable[[bool], None]:
        before = self._loop.backwards

        def closed(exhausted: bool) -> None:
            self._loop.weigh(1.0)
            self._loop.closed_pass()
            history.has_trained |= self._loop.backwards > before
            if exhausted and not history.has_trained:
                history.trains, history.corrected = False, True
                warnings.warn(
                    "parwrap: a DataLoader was read to its end without training, and each rank saw only its share of it. "
                    "From its next pass on every rank sees all of it; with torch.no_grad() around the loop, the first would too.",
                    stacklevel=2,
                )

        return closed

    def _watch_evaluation(self, history: _History) -> Callable[[bool], None]:
        before = self._loop.backwards

        def closed(exhausted: bool) -> None:
            if self._loop.backwards > before and not self._loop.passes:
                history.trains = history.has_trained = history.corrected = True
                warnings.warn(
                    "parwrap: a DataLoader was read in eval() mode or before any optimizer was built, and yet trained on: every rank "
                    "trained on all of it. From its next pass on each rank gets its share.",
                    stacklevel=2,
                )

        return closed


def _is_private() -> bool:
    """Whether a loader is read by a worker or by a lone rank, which has nobody to share with."""
    return get_worker_info() is not None or is_alone()
