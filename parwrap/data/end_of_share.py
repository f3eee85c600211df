"""Decides what a training pass is for if that is unclear at its start: at its first backward, or at the end of this rank's share.

If the pass has not trained by then, it is taken for an evaluation: it continues with the rest of the data, so that every rank sees all
samples, and warns once. ``unread.py`` finds those samples, and ``looking.py`` decides when to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parwrap.coordination.call_site import location
from parwrap.data.known_positions import KnownPositions
from parwrap.data.open_doubts import OpenDoubts
from parwrap.data.pass_history import OpenPass, PassHistories
from parwrap.data.running_numbers import RunningNumbers
from parwrap.data.training_share import TrainingShares
from parwrap.loop.loop_state import Loop

__all__ = ["EndOfShare"]


class EndOfShare:
    """Decides whether a pass trains, if that was unclear at its start.

    Args:
        loop: what the training loop has done so far.
        shares: gives the batches that this rank has not seen.
        histories: the histories of all loaders.
        doubts: the doubts about passes that have ended.
        positions: the positions of training passes.
        numbers: detects sums over a share.
        say: a function that shows a warning.
    """

    def __init__(
        self,
        loop: Loop,
        shares: TrainingShares,
        histories: PassHistories,
        doubts: OpenDoubts,
        positions: KnownPositions,
        numbers: RunningNumbers,
        say: Callable[[str], None],
    ) -> None:
        self._loop, self._shares, self._histories, self._doubts = loop, shares, histories, doubts
        self._positions, self._numbers, self._say = positions, numbers, say

    def trained(self, training: OpenPass, read: int, looked: bool) -> None:
        """Record that the pass has trained, after ``read`` batches. ``looked`` is whether it was taken for a pass that does not train."""
        history = training.history
        if not history.has_trained:
            history.by_batch = read == 1 and not looked
        history.has_trained = history.trains = history.trained_on_share = True
        if looked:
            history.draws_ahead = True
            self._say(
                "the loop read a DataLoader to the end of this rank's share before its first backward, so parwrap assumed that it does "
                "not train: ranks also trained on batches of other ranks. From the next pass on, each rank gets only its share."
            )

    def rest(self, training: OpenPass, read: int, waits: bool) -> Iterator | None:
        """Decide what follows a share that ended without training: the rest of the data if the pass does not train, otherwise ``None``.

        Args:
            training: the pass.
            read: the number of batches read.
            waits: whether a loss of the first one waits for a backward.
        """
        history, loop = training.history, self._loop
        if history.has_trained and not (history.trained_on_share or any(loop.optimizers())):
            return None  # by torch.autograd.grad and manual updates
        stepped = loop.versions() != training.versions
        trains = history.draws_ahead or stepped or (waits and not self._histories.only_looks(history))
        unread = training.unread if training.unread and training.unread.known() else None
        looks = self._shares.all_look(trains) if unread else not (trains or self._shares.shares_out_itself(training.loader))
        if not looks:
            history.has_trained |= stepped
            if trains and not stepped:
                self._doubts.taken_for_training(training)
            return None
        history.trains, place = False, location()
        if unread is None:
            history.reads_whole = True
            self._say(
                f"a DataLoader was read to its end at {place} without training, and each rank saw only its share. From the next pass on, "
                "every rank reads all of it. To read all of it in the first pass too, wrap the loop in torch.no_grad()."
            )
            return None
        self._begin_to_look(training)
        rest = unread.rest(read)
        self._say_that_it_looks(training, place, read + len(rest))
        return self._shares.rest(training.loader, training.original, rest)

    def _begin_to_look(self, training: OpenPass) -> None:
        training.looks = True
        training.position.take_back(training.epoch)
        training.position.looked_at += 1
        if not training.history.has_trained:
            self._positions.take_back(training.loader, training.position)
        self._loop.closed_pass()
        self._loop.opened_evaluation()
        self._numbers.looks(training.loader.dataset)
        self._loop.weights.close(training.weighed)

    def _say_that_it_looks(self, training: OpenPass, place: str, batches: int) -> None:
        loader, history = training.loader, training.history
        drawn: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        whole = len(drawn) if hasattr(drawn, "__len__") else batches
        given, history.given_lengths = history.given_lengths, None
        if history.noted:
            return
        history.noted = True
        length = f"Its len() was {given[0]} before; the len() of all the data is {given[1]}. " if given else ""
        if training.batches is not None and training.batches.kept():
            length += (
                "If the batches are kept for training, every rank trains on all of them, which is no faster: read the loader in each "
                "epoch, or read it under torch.no_grad() and train on parwrap.shard(batches). "
            )
        length += f"It has {batches} batches instead of {whole}: divide by the number counted. " if batches != whole else ""
        self._say(
            f"a DataLoader was read at {place} without a backward: each rank reads its own share first and then the rest. Sums and "
            f"counts equal those of one process, but the order differs. {length}To keep the order too, wrap the loop in torch.no_grad()."
        )
