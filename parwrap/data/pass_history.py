"""What is known of each loader and of its passes, and what its next pass is for, as far as that can be known when it begins.

What a pass turns out to be for is found by ``first_batch.py``, ``end_of_share.py`` and ``unexpected_training.py``.
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
from parwrap.data.sharing_rules import Sharing
from parwrap.data.training_share import TrainingShares
from parwrap.loop.batch_weights import Reading
from parwrap.loop.loop_state import Loop

__all__ = ["Doubt", "LoaderHistory", "OpenPass", "PassHistories"]


class Doubt(NamedTuple):
    """A pass has ended that may train yet, by a backward that comes after it.

    Attributes:
        backwards: how many had run then.
        waits: whether what was computed from all of it waits for one.
        text: what to say if none comes.
    """

    backwards: int
    waits: bool
    text: str


@dataclass
class LoaderHistory:
    """What is known of one loader.

    Attributes:
        trains: what the last pass was for; ``None`` until there was one.
        has_trained: whether there ever was a backward in a pass.
        trained_on_share: whether there was one in a pass over this rank's share.
        by_batch: whether the first pass that trained did so before its second batch was drawn.
        draws_ahead: whether a pass has trained only when all of its share was drawn.
        reads_whole: whether a pass has only looked whose rest cannot be read; then every rank reads all from then on.
        phase: how many optimizers there were when the last pass began.
        looked_phase: that number if the last pass looked at all of it.
        doubt: what the last pass has left open.
        noted: whether it was said that a pass only looked.
        given_lengths: the length that was given before the first pass, and that of a pass of the other kind, if they differ.
        asked_in_eval: whether it was asked for in eval mode.
        asked: how many backwards had run, and how many passes had trained, when one batch was asked for by ``next(iter(loader))``.
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
        original: reads a loader.
        history: of the loader.
        position: of the loader, where the pass has begun.
        sharing: how the data is shared out.
        weights: how much each batch counts, if each is a part of a larger one.
        loop: what the training loop has done so far.

    Attributes:
        epoch: of the pass.
        unread: what this rank does not see of the whole; ``None`` where that cannot be read.
        backwards, steps, versions: those of the loop when the pass began.
        weighed: the pass as the weights of its batches know it.
        batches: this rank's share and the rest; ``None`` where the share is all, and once the pass has ended.
        gradient: the tensor that the first backward has left.
        looks: whether the pass has turned out to look only.
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
        self.looks = False


class PassHistories:
    """The histories of all loaders.

    Args:
        loop: what the training loop has done so far.
        shares: makes this rank's share of a loader.

    Attributes:
        trained_passes: how many passes are over in which there was a backward.
    """

    def __init__(self, loop: Loop, shares: TrainingShares) -> None:
        self._loop, self._shares = loop, shares
        self._histories: weakref.WeakKeyDictionary[DataLoader, LoaderHistory] = weakref.WeakKeyDictionary()
        self._shuffled_seen = False
        self.trained_passes = 0

    def of(self, loader: DataLoader) -> LoaderHistory:
        """What is known of ``loader``, from now on if nothing was."""
        self._shuffled_seen |= _shuffled(loader)
        return self._histories.setdefault(loader, LoaderHistory())

    def all(self) -> list[LoaderHistory]:
        """Those of all loaders that are alive."""
        return list(self._histories.values())

    def may_train(self, loader: DataLoader, history: LoaderHistory) -> bool:
        """Whether a pass that begins is one that may train, so that this rank's share comes first.

        Where there is something to train, a loader may: where it turns out to be looked at, the rest comes after the share. One that does
        not shuffle is read whole, in order, in eval mode, and where one that shuffles has been trained on.
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
        """The best guess for a loader that was not iterated yet: scripts ask for its length before the first pass."""
        history = self.of(loader)
        if history.has_trained:  # an average is divided by the length after the pass, also where that only looked
            return torch.is_grad_enabled() and history.trains is not False and history.looked_phase != self._loop.phase
        if history.trains is not None and history.phase == self._loop.phase:
            return history.trains
        if self._loop.in_eval_mode():
            return torch.is_grad_enabled() and self.may_train(loader, history) and not self._another_trains(loader)
        if any(other.trains and other.phase == self._loop.phase for other in self._histories.values()):
            return False
        return not self._shuffled_seen or shuffles(loader)

    def only_looks(self, history: LoaderHistory) -> bool:
        """Whether a pass whose losses are kept to its end is likely to be one that looks all the same."""
        others = any(other.by_batch and other.phase == self._loop.phase for other in self._histories.values())
        return self._loop.in_eval_mode() or history.by_batch or (others and not history.has_trained)

    def _another_trains(self, loader: DataLoader, shuffled: bool = False) -> bool:
        """Whether another loader, of those that are ``shuffled``, has been trained on since the last optimizer was built."""
        others = (other for each, other in self._histories.items() if each is not loader and (not shuffled or _shuffled(each)))
        return any(other.has_trained and other.phase == self._loop.phase for other in others)


def _shuffled(loader: DataLoader) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and shuffles(loader)
