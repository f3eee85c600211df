"""The history of each loader, from which parwrap guesses what the next pass is for.

``first_batch.py``, ``end_of_share.py`` and ``unexpected_training.py`` find out what the pass is really for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from parwrap.data.loader_position import Position
from parwrap.data.looking import ShareThenRest
from parwrap.data.samplers import shuffles
from parwrap.data.sharing_options import Sharing
from parwrap.data.training_share import TrainingShares
from parwrap.loop.batch_weights import Reading
from parwrap.loop.loop_state import Loop

__all__ = ["Doubt", "LoaderHistory", "OpenPass", "PassHistories"]


class Doubt(NamedTuple):
    """A doubt about a pass that has ended, but that a later backward pass may still train on.

    Attributes:
        backwards: the number of backward passes before its end.
        waits: whether a result of the whole pass waits for a backward pass.
        text: the warning if no backward pass follows.
    """

    backwards: int
    waits: bool
    text: str


@dataclass
class LoaderHistory:
    """The history of one loader.

    Attributes:
        trains: whether the last pass trained; ``None`` before the first pass.
        has_trained: whether any pass had a backward.
        trained_on_share: whether a pass over this rank's share had a backward pass.
        by_batch: whether the first pass that trained did so before its second batch was drawn.
        draws_ahead: whether a pass trained only after all of its share was drawn.
        reads_whole: whether a pass did not train, and its rest cannot be read; every rank then reads everything from now on.
        phase: the number of optimizers when the last pass began.
        looked_phase: that number if the last pass read the whole loader without training.
        doubt: the doubt that the last pass has left.
        noted: whether the warning about a pass without training was shown.
        given_lengths: the length given before the first pass, and that of a pass of the other kind, if they differ.
        asked_in_eval: whether the length was asked for in eval mode.
        asked: the numbers of backward passes and of training passes when ``next(iter(loader))`` asked for one batch.
    """

    trains: bool | None = None
    has_trained: bool = False
    trained_on_share: bool = False
    by_batch: bool = False
    draws_ahead: bool = False
    reads_whole: bool = False
    phase: int = -1
    looked_phase: int | None = None
    doubt: Doubt | None = None
    noted: bool = False
    given_lengths: tuple[int, int] | None = None
    asked_in_eval: bool = False
    asked: tuple[int, int] | None = None


class OpenPass:
    """A pass that may train, from its beginning to its end.

    Args:
        loader: the user's.
        original: the function that iterates over a loader.
        history: the loader's history.
        position: the loader's position, where the pass has begun.
        sharing: how the data is split.
        weights: the weight of each batch, if each is a part of a larger one.
        loop: what the training loop has done so far.

    Attributes:
        epoch: the epoch of the pass.
        unread: the part of the data that this rank does not read; ``None`` if it cannot be read.
        backwards, steps, versions: the loop's counts of backward passes, steps and parameter versions when the pass began.
        weighed: the pass's entry in the batch weights.
        batches: this rank's share and the rest; ``None`` if the share is the whole, and once the pass has ended.
        gradient: the gradient that the first backward has left.
        looks: whether the pass turned out to read data without training.
    """

    def __init__(
        self, loader: DataLoader, original: Callable, history: LoaderHistory, position: Position, sharing: Sharing, weights: Any, loop: Loop
    ) -> None:
        self.loader, self.original, self.history = loader, original, history
        self.position, self.epoch, self.unread = position, position.epoch, position.unread
        self.sharing, self.weights, self.weighed = sharing, weights, Reading()
        self.backwards, self.steps, self.versions = loop.backwards, loop.steps, loop.versions()
        self.batches: ShareThenRest | None = None
        self.gradient: weakref.ref[torch.Tensor] | None = None
        self.looks = self.in_for = False


class PassHistories:
    """The histories of all loaders.

    Args:
        loop: what the training loop has done so far.
        shares: the object that makes this rank's share of a loader.

    Attributes:
        trained_passes: the number of finished passes that had a backward.
    """

    def __init__(self, loop: Loop, shares: TrainingShares) -> None:
        self._loop, self._shares = loop, shares
        self._histories: weakref.WeakKeyDictionary[DataLoader, LoaderHistory] = weakref.WeakKeyDictionary()
        self._shuffled_seen = False
        self.trained_passes = 0

    def of(self, loader: DataLoader) -> LoaderHistory:
        """The history of ``loader``, created on first use."""
        self._shuffled_seen |= _shuffled(loader)
        return self._histories.setdefault(loader, LoaderHistory())

    def all(self) -> list[LoaderHistory]:
        """The histories of all live loaders."""
        return list(self._histories.values())

    def may_train(self, loader: DataLoader, history: LoaderHistory) -> bool:
        """Whether a pass that begins may train, so that it begins with this rank's share.

        Once there is something to train, any pass may train. If it does not, the rest of the data follows the share. Some passes read the
        whole loader instead: those in eval mode, and those over a loader that does not shuffle once a shuffling one has been trained on.
        """
        if self._shares.keeps():
            return not self._loop.in_eval_mode()
        if history.has_trained:
            return True
        if history.reads_whole or not self._loop.can_train():
            return False
        shuffled = _shuffled(loader)
        if shuffled or self._loop.in_eval_mode():
            return shuffled
        return self._loop.passes > 0 or not self._another_trains(loader, shuffled=True)

    def will_train(self, loader: DataLoader) -> bool:
        """The best guess for a loader that was not iterated yet, when a script asks for its length."""
        history = self.of(loader)
        if history.has_trained:  # an average is divided by the length after the pass, even if the pass did not train
            return torch.is_grad_enabled() and history.trains is not False and history.looked_phase != self._loop.phase
        if history.trains is not None and history.phase == self._loop.phase:
            return history.trains
        if self._loop.in_eval_mode():
            return torch.is_grad_enabled() and self.may_train(loader, history) and not self._another_trains(loader)
        if any(other.trains and other.phase == self._loop.phase for other in self._histories.values()):
            return False
        return not self._shuffled_seen or shuffles(loader)

    def only_looks(self, history: LoaderHistory) -> bool:
        """Whether a pass that keeps its losses to its end is probably an evaluation."""
        others = any(other.by_batch and other.phase == self._loop.phase for other in self._histories.values())
        return self._loop.in_eval_mode() or history.by_batch or (others and not history.has_trained)

    def _another_trains(self, loader: DataLoader, shuffled: bool = False) -> bool:
        """Whether another loader, among those that are ``shuffled``, has been trained on since the last optimizer was built."""
        others = (other for each, other in self._histories.items() if each is not loader and (not shuffled or _shuffled(each)))
        return any(other.has_trained and other.phase == self._loop.phase for other in others)


def _shuffled(loader: DataLoader) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and shuffles(loader)
