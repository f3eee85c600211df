"""Revises the guess about a pass at its first batch: modes may have changed since it began, or only one batch may be read.

A pass that turns out to be for something else is replaced by the right one. The single batch of ``next(iter(loader))`` is the same on all
ranks if it is only shown rather than trained on.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import DataLoader, IterableDataset

from parwrap.data.early_lengths import EarlyLengths
from parwrap.data.known_positions import KnownPositions
from parwrap.data.pass_history import LoaderHistory, PassHistories
from parwrap.data.passes import Pass
from parwrap.data.samplers import shuffles
from parwrap.data.sharing_options import is_private
from parwrap.data.training_share import TrainingShares
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams, get_state, set_state

__all__ = ["FirstBatch"]


class FirstBatch:
    """Replaces passes that began with a wrong guess.

    Args:
        loop: what the training loop has done so far.
        streams: the random streams.
        shares: the object that makes this rank's share of a loader.
        histories: the histories of all loaders.
        lengths: the lengths given before the first pass.
        positions: the positions of training passes.
    """

    def __init__(
        self,
        loop: Loop,
        streams: RandomStreams,
        shares: TrainingShares,
        histories: PassHistories,
        lengths: EarlyLengths,
        positions: KnownPositions,
    ) -> None:
        self._loop, self._streams, self._shares = loop, streams, shares
        self._histories, self._lengths, self._positions = histories, lengths, positions
        self._closed = False

    def close(self) -> None:
        """The session is over: passes that outlive it stay as they are."""
        self._closed = True

    def instead(
        self,
        loader: DataLoader,
        history: LoaderHistory,
        before: LoaderHistory,
        guess: bool,
        begin: Callable[[bool], Pass],
        look: Callable[[], Pass],
        only_one: bool,
    ) -> Pass | None:
        """The pass that replaces one that has begun, or the same pass.

        Args:
            loader: the user's.
            history: the loader's history.
            before: the history before the pass began.
            guess: whether the pass began as one that trains.
            begin: begins a pass that trains, or one that does not.
            look: begins a pass without detecting training.
            only_one: whether the first batch is the only one.
        """
        if self._closed:
            return None
        if guess and only_one and self._shows_one(loader, history):
            return self._show_one(loader, history, before, look)
        trains = self._histories.may_train(loader, history)
        if history.has_trained or not trains:  # otherwise the end of the pass shows it
            self._lengths.check(loader, history, trains)
        if trains == guess or is_private() or self._loop.parts:
            return None
        return self._where_drawn(lambda: begin(trains))

    def _shows_one(self, loader: DataLoader, history: LoaderHistory) -> bool:
        """Whether one batch of ``loader`` is the same in every pass, to be shown, rather than the next batch for training."""
        before, history.asked = history.asked, (self._loop.backwards, self._histories.trained_passes)
        if self._shares.keeps() or shuffles(loader) or isinstance(loader.dataset, IterableDataset):
            return False
        if before is None or self._loop.passes_in_for > 0:
            return True
        # a loop that trains on one batch at a time has run a backward since the last such draw, outside of all passes
        return before[0] == self._loop.backwards or before[1] < self._histories.trained_passes

    def _show_one(self, loader: DataLoader, history: LoaderHistory, before: LoaderHistory, look: Callable[[], Pass]) -> Pass:
        """A pass for one batch, which all ranks have alike; the history of ``loader`` is restored to ``before``."""
        if not history.has_trained:
            self._positions.take_back(loader, self._positions.of(loader))
        shown = self._where_drawn(look)
        history.trains, history.phase, history.looked_phase = before.trains, before.phase, before.looked_phase
        return shown

    def _where_drawn(self, begin: Callable[[], Pass]) -> Pass:
        """The pass that ``begin`` begins instead of another, which has drawn from the shared streams what a single process draws."""
        with self._streams.shared():
            before = get_state()
        other = begin()
        with self._streams.shared():
            set_state(before)
        return other
