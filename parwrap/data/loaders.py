"""The interceptor of loaders: a training pass gives this rank its share, any other pass gives every rank the whole loader.

So printed metrics are those of a single process. This file has the regular pass: it begins, returns batches and ends. ``training_share.py``
chooses the samples of a share, and ``pass_history.py`` guesses what a pass is for. Other files handle rare cases:

- ``first_batch.py``: the pass turns out to be for something else, or is read for one batch;
- ``end_of_share.py``: nothing was trained by the end of the share;
- ``open_doubts.py``: the pass may be trained on after its end;
- ``unexpected_training.py``: the script trains on a loader that is read whole;
- ``dropped_gradients.py``: gradients are read rather than trained with;
- ``early_lengths.py``: the script asks for the length before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from parwrap.coordination.call_site import warn
from parwrap.data.dropped_gradients import DroppedGradients
from parwrap.data.early_lengths import EarlyLengths
from parwrap.data.end_of_share import EndOfShare
from parwrap.data.first_batch import FirstBatch
from parwrap.data.iterables import world_size_asked
from parwrap.data.known_positions import KnownPositions
from parwrap.data.loader_position import MARK
from parwrap.data.looking import ShareThenRest
from parwrap.data.open_doubts import OpenDoubts
from parwrap.data.pass_history import LoaderHistory, OpenPass, PassHistories
from parwrap.data.passes import Pass
from parwrap.data.running_numbers import RunningNumbers
from parwrap.data.samplers import samples_in
from parwrap.data.sharing_options import Sharing, TrainingData, is_private
from parwrap.data.training_share import TrainingShares
from parwrap.data.unexpected_training import watch_for_training
from parwrap.group.group import Group
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.batch_weights import Weighed
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams
from parwrap.system.progress_bars import write_line
from parwrap.system.structures import tensors_in

__all__ = ["Loaders"]

Instead = Callable[[bool], Pass | None]
"""A function that returns the pass that replaces a begun one, or the same pass.

Its argument says whether the first batch is the only one.
"""


class Loaders(Interceptor):
    """Splits the loaders of a loop.

    Args:
        group: the ranks; ``None`` for a single rank.
        loop: what the training loop has done so far.
        streams: the random streams.
        sharing: a function that returns the current sharing options.
        began: a function, called at the first training pass.

    Attributes:
        streams: the random streams.
        positions: the positions of training passes.
        numbers: the object that detects numbers of one rank that the script uses as if they covered all ranks.
    """

    def __init__(
        self,
        group: Group | None,
        loop: Loop,
        streams: RandomStreams,
        sharing: Callable[[], Sharing],
        began: Callable[[TrainingData], None],
    ) -> None:
        self._loop, self.streams, self._sharing = loop, streams, sharing
        self._size = group.world.size if group else 1
        self._say = _warn if group else _ignore  # a single rank misses nothing
        self._shares = TrainingShares(group, streams, sharing, began)
        self.positions = KnownPositions(streams, self._shares)
        self.numbers = RunningNumbers(self._size, write_line if group and group.world.rank == 0 else _ignore)
        self._histories = PassHistories(loop, self._shares)
        self._lengths = EarlyLengths(loop, self._shares, self._histories)
        self._doubts = OpenDoubts(loop, self._histories, self._say)
        self._dropped = DroppedGradients(loop, self._say)
        self._first_batch = FirstBatch(loop, streams, self._shares, self._histories, self._lengths, self.positions)
        self._end_of_share = EndOfShare(loop, self._shares, self._histories, self._doubts, self.positions, self.numbers, self._say)

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Begin a pass over ``loader``."""
        if is_private():
            return original(loader)
        if self._loop.parts:  # ``@evaluate`` has split it already
            return self._look(loader, original)

        # does it train?
        history = self._histories.of(loader)
        if not torch.is_grad_enabled():
            return self._look(loader, original, instead=lambda only_one: self._lengths.check(loader, history, trains=False))
        self._doubts.resolve(history)
        trains, before = self._histories.may_train(loader, history), replace(history)

        # decided again at the first batch, which may replace the pass
        begin, look = partial(self._begin, loader, original, history), partial(self._look, loader, original)
        return begin(trains, partial(self._first_batch.instead, loader, history, before, trains, begin, look))

    def _begin(self, loader: DataLoader, original: Callable, history: LoaderHistory, trains: bool, instead: Instead | None = None) -> Pass:
        """Iterate over this rank's share if the pass ``trains``, otherwise over the whole loader."""
        history.trains, history.phase = trains, self._loop.phase
        if trains:
            return self._train(loader, original, history, instead)
        return self._look(loader, original, watch_for_training(self._loop, history, self._say), instead)

    def _train(self, loader: DataLoader, original: Callable, history: LoaderHistory, instead: Instead | None) -> Pass:
        """Iterate over this rank's share, in a pass that may train."""
        position, history.looked_phase = self.positions.begin(loader), None
        share, weights = self._shares.batches(loader, original, position)
        self._loop.opened_pass()
        training = OpenPass(loader, original, history, position, self._sharing(), weights, self._loop)
        batches = share
        if not self._shares.reads_all(loader):
            rest, trained = partial(self._end_of_share.rest, training), partial(self._end_of_share.trained, training)
            batches = training.batches = ShareThenRest(share, training.unread, lambda: self._loop.backwards, rest, trained)
            self.numbers.trains(loader.dataset)
        return Pass(batches, partial(self._ended, training), partial(self._drew, training), self._loop.reads_in_for, instead)

    def _drew(self, training: OpenPass, batch: Any) -> None:
        """Return a batch of a pass that may train."""
        samples = samples_in(batch)
        self._loop.drew_batch(samples=samples)
        if training.looks:
            return
        training.in_for = training.in_for or self._loop.passes_in_for > 0
        training.position.drew()
        if training.gradient is None and self._loop.backwards > training.backwards:
            self._dropped.note(training)
        if training.weights is not None:
            weight, sharing = training.weights.popleft(), training.sharing
            factor, split = sharing.loss_factor(weight, self._size), sharing.batch == "global"
            self._loop.weights.draw(training.weighed, Weighed(weight, factor, samples, split), tensors_in(batch))

    def _ended(self, training: OpenPass, exhausted: bool) -> None:
        """Handle the end of a pass that may train, whether it ended, failed or was dropped."""
        history, loop, position, batches = training.history, self._loop, training.position, training.batches
        if training.looks:
            position.looked_at -= 1
            loop.closed_evaluation()
        else:
            if batches is not None and not (batches.read or exhausted):
                position.take_back(training.epoch)  # it read nothing
            else:
                position.end()
            loop.closed_pass()
        loop.weights.close(training.weighed, broken_off=not (exhausted or training.looks))
        if loop.backwards > training.backwards:
            self._histories.trained_passes += 1
            self._dropped.check(training)
            self._lengths.check(training.loader, history, trains=True)
            history.has_trained, history.given_lengths = True, None
            self.numbers.ended(training.loader.dataset)
        else:
            self._doubts.ended_without_backward(training, exhausted)
        training.batches = None

    def _look(
        self, loader: DataLoader, original: Callable, watch: Callable[[], None] = lambda: None, instead: Instead | None = None
    ) -> Pass:
        """Iterate without training: every rank reads everything, or its part in ``@evaluate``. Call ``watch`` after each batch and at the
        end."""
        if self._loop.drawing():
            self._shares.take_first(loader)
        with self.streams.shared():  # a loader with workers immediately reads ahead
            batches, whole = original(loader), not (self._loop.parts or self._shares.shares_out_itself(loader))
        self._loop.opened_evaluation()
        self.numbers.looks(loader.dataset)
        self._histories.of(loader).looked_phase = self._loop.phase
        position = self.positions.of(loader)
        position.looked_at += 1

        def drawn(batch: Any) -> None:
            self._loop.drew_batch(whole)
            watch()

        def closed(exhausted: bool) -> None:
            position.looked_at -= 1
            self._loop.closed_evaluation()
            watch()

        return Pass(batches, closed, drawn, instead=instead)

    @intercepts
    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """Return ``len(loader)``, of the part that this rank reads."""
        whole = original(loader)
        return whole if is_private() or self._loop.parts else self._lengths.length(loader, whole)

    @intercepts
    def loader_state(self, loader: DataLoader, original: Callable[[], dict]) -> dict:
        """Return ``state_dict()`` of a stateful loader. If the loader is split, its own iterator is not the one that is read."""
        return original() if is_private() or not self._histories.will_train(loader) else self.positions.of(loader).state_dict()

    @intercepts
    def load_loader_state(self, loader: DataLoader, original: Callable[[dict], None], state: dict) -> None:
        """Run ``load_state_dict(state)`` of a stateful loader."""
        if isinstance(state, dict) and MARK in state:
            self.positions.of(loader).load_state_dict(state)
        else:
            original(state)

    @intercepts
    def world_size_asked(self) -> None:
        """Record that code asks for the number of ranks: a dataset that does this shards itself."""
        world_size_asked()

    def agree(self, loader: DataLoader) -> None:
        """Make all ranks hold the same samples behind ``loader``, because each is about to read a part of it."""
        self._lengths.check(loader, self._histories.of(loader), trains=False)
        self._shares.agree(loader)

    def left(self) -> None:
        """Resolve open doubts at the end of the function or script."""
        self._doubts.resolve_all()

    def close(self) -> None:
        """Close the loaders at the end of the session. Passes that outlive it continue unchanged."""
        self._first_batch.close()
        self._shares.close()


def _warn(text: str) -> None:
    warn(f"parwrap: {text}")


def _ignore(text: str) -> None:
    pass
