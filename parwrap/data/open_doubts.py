"""A pass that has ended without a backward: a later backward may still train on what it read.

Each such pass leaves a doubt in the history of its loader. The next pass, or the end of the function, resolves it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from parwrap.coordination.call_site import location
from parwrap.data.pass_history import Doubt, LoaderHistory, OpenPass, PassHistories
from parwrap.loop.loop_state import Loop

__all__ = ["OpenDoubts"]


class OpenDoubts:
    """The doubts about passes that have ended.

    Args:
        loop: what the training loop has done so far.
        histories: the histories of all loaders.
        say: called with the warning.
    """

    def __init__(self, loop: Loop, histories: PassHistories, say: Callable[[str], None]) -> None:
        self._loop, self._histories, self._say = loop, histories, say
        self._read_in_parts = ""  # where a pass without a backward has drawn parts of batches

    def ended_without_backward(self, training: OpenPass, exhausted: bool) -> None:
        """The pass has ended, or was left early."""
        if self._loop.weights.last.split and training.weighed.drawn and not self._read_in_parts:
            self._read_in_parts = location()
        if not exhausted:
            self._broken_off(training)

    def taken_for_training(self, training: OpenPass) -> None:
        """This rank's share was read to its end without a backward, and a result of it waits for one."""
        training.history.doubt = Doubt(
            self._loop.backwards,
            True,
            f"a DataLoader was read to its end at {location()} without training, and each rank saw only its share: parwrap took it for "
            "training with a backward after the pass. With torch.no_grad() around the loop every rank sees all of it.",
        )

    def resolve(self, history: LoaderHistory) -> None:
        """A pass begins, over the loader of ``history``: an earlier one that was left and not trained on has only looked."""
        for each in self._histories.all():
            if each.doubt and (each is history or not each.doubt.waits):
                self._resolve(each)

    def resolve_all(self) -> None:
        """The function or script is over."""
        for each in self._histories.all():
            self._resolve(each)
        if self._read_in_parts and self._loop.phase and not (self._loop.backwards or self._loop.steps):
            self._say(
                f"nothing was trained, though the loop at {self._read_in_parts} reads batches with gradients on. With batch='global' each "
                "rank has a part of every batch: a comparison of its length with the batch size, such as `len(x) < loader.batch_size`, "
                "leaves out all of them. Give the DataLoader drop_last=True instead of comparing, or use batch='per_rank'."
            )

    def _broken_off(self, training: OpenPass) -> None:
        """The pass was left early, without a backward."""
        batches = training.batches
        if batches is None or not batches.undecided() or sys.is_finalizing():
            return
        if batches.read == 1 or self._loop.versions() != training.versions:
            return  # one batch is drawn for its shape, or to be shown
        training.history.doubt = Doubt(
            self._loop.backwards,
            batches.first_waits(),
            f"{batches.read} batches of a DataLoader were read at {location()} without a backward, and each rank saw others. With "
            "torch.no_grad() around the loop all ranks see the same; parwrap.reduce_mean(x) is the mean over the ranks.",
        )

    def _resolve(self, history: LoaderHistory) -> None:
        doubt, history.doubt = history.doubt, None
        if doubt is None:
            return
        if self._loop.backwards == doubt.backwards:
            self._say(doubt.text)
        elif doubt.waits:
            history.has_trained = True
