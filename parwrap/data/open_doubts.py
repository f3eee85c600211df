"""Doubts about passes that ended without a backward pass: a later backward pass may still train on what was read.

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
        say: a function, called with the warning.
    """

    def __init__(self, loop: Loop, histories: PassHistories, say: Callable[[str], None]) -> None:
        self._loop, self._histories, self._say = loop, histories, say
        self._read_in_parts = ""  # where a pass without a backward has drawn parts of batches

    def ended_without_backward(self, training: OpenPass, exhausted: bool) -> None:
        """The pass has ended, or was left early."""
        if self._loop.weights.last.split and training.in_for and not self._read_in_parts:
            self._read_in_parts = location()
        if not exhausted:
            self._broken_off(training)

    def taken_for_training(self, training: OpenPass) -> None:
        """Record a doubt: this rank's share was read to its end without a backward pass, but a result of it waits for one."""
        training.history.doubt = Doubt(
            self._loop.backwards,
            True,
            f"a DataLoader was read to its end at {location()} without training, and each rank saw only its share, because parwrap "
            "expected a backward after the loop. To read all of it on every rank, wrap the loop in torch.no_grad().",
        )

    def resolve(self, history: LoaderHistory) -> None:
        """Resolve the doubt about an earlier pass when a new one begins over the loader of ``history``: the earlier one did not train."""
        for each in self._histories.all():
            if each.doubt and (each is history or not each.doubt.waits):
                self._resolve(each)

    def resolve_all(self) -> None:
        """Resolve all doubts at the end of the function or script."""
        for each in self._histories.all():
            self._resolve(each)
        if self._read_in_parts and self._loop.phase and not (self._loop.backwards or self._loop.steps):
            self._say(
                f"nothing was trained, though the loop at {self._read_in_parts} reads batches with gradients on. With batch='global' each "
                "rank has a part of every batch: a comparison of its length with the batch size, such as `len(x) < loader.batch_size`, "
                "leaves out all of them. Give the DataLoader drop_last=True instead of comparing, or use batch='per_rank'."
            )

    def _broken_off(self, training: OpenPass) -> None:
        """Record a doubt if the loop left the pass early, without a backward."""
        batches = training.batches
        if batches is None or not batches.undecided() or sys.is_finalizing():
            return
        if batches.read == 1 or self._loop.versions() != training.versions:
            return  # a single batch is often drawn only for its shape, or to show it
        training.history.doubt = Doubt(
            self._loop.backwards,
            batches.first_waits(),
            f"{batches.read} batches of a DataLoader were read at {location()} without a backward, and each rank read different ones. To "
            "read the same batches on all ranks, wrap the loop in torch.no_grad(). To average a value over the ranks, use "
            "parwrap.reduce_mean(x).",
        )

    def _resolve(self, history: LoaderHistory) -> None:
        doubt, history.doubt = history.doubt, None
        if doubt is None:
            return
        if self._loop.backwards == doubt.backwards:
            self._say(doubt.text)
        elif doubt.waits:
            history.has_trained = True
