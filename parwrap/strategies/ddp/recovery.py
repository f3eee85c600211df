"""What ranks do together after a backward that was not regular for all of them, and how a rank takes part in a backward of others.

``ddp.py`` calls it after a backward in which a rank has reported something: unexpected gradients, a stale parameter set, an exception, or
changed buffers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from parwrap.coordination.call_site import location, warn
from parwrap.errors import RankMismatchError
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.loop.autograd_graph import reached
from parwrap.strategies.common.share import Share
from parwrap.strategies.common.training_buffers import TrainingBuffers
from parwrap.strategies.ddp.averagers import AveragerRegistry
from parwrap.strategies.ddp.call_sites import CallSite, CallSites
from parwrap.strategies.ddp.gradient_averager import GradientAverager, has_timed_out
from parwrap.strategies.ddp.unaveraged import Unaveraged
from parwrap.strategies.ddp.unexpected_gradients import UnexpectedGradients
from parwrap.system.remote_exception import RemoteException, in_one_line

__all__ = ["Recovery"]

FAILED = "an exception in a backward pass"
AVERAGE = "the average of the gradients"


class Recovery:
    """Brings the ranks back together after a backward.

    Args:
        group: the ranks.
        sites: the call sites of backward.
        averagers: the averagers in use.
        unaveraged: records which gradients are averages.
        unexpected: the gradients outside of the averager's set.

    Attributes:
        immediate: whether all ranks read reports at the end of a backward; otherwise after the next one.
        late_buffers: the buffers to set once the graph is no longer needed.
    """

    def __init__(
        self, group: Group, sites: CallSites, averagers: AveragerRegistry, unaveraged: Unaveraged, unexpected: UnexpectedGradients
    ) -> None:
        self._group, self._coordinator = group, group.coordinator
        self._sites, self._averagers, self._unaveraged, self._unexpected = sites, averagers, unaveraged, unexpected
        self.immediate = self._coordinator.immediate and group.device.type == "cpu"
        self.late_buffers: list[TrainingBuffers] = []
        self._warned = False

    def handle(self, averager: GradientAverager, weight: float, call: Backward | None) -> None:
        """Handle a backward pass in which a rank has reported something, on all ranks together.

        Args:
            averager: the averager of the backward.
            weight: the weight of this rank.
            call: this rank's own backward, if it has contributed.
        """
        reported = averager.reported()
        if reported.failed:
            self._fail_alike(averager, call)
            return
        stale_set = reported.stale_set
        if self.immediate and self._coordinator.any_diverged():
            leaves = reversed(reached(call.roots)) if call else ()
            stale_set |= self._unexpected.compare(averager, weight, averager.others(leaves))
        if reported.buffers:
            late = call is not None and _keeps_graph(call)
            if averager.buffers.take(reported.asked, contributes=call is not None, late=late):
                averager.buffers_move = averager.at_once = True
            if late:
                self.late_buffers.append(averager.buffers)
        if reported.unexpected:
            self._unexpected.average(averager, weight)
        if stale_set:
            self._sites.drop(averager)
        elif reported.unexpected:
            self._averagers.drop(averager.number)  # no site of any rank uses it any more
        if averager.error is not None:  # with a GPU the others learn of it a step later, and have taken this one
            self._coordinator.miss()
            raise averager.error

    def finish(self, call: Backward, site: CallSite, averager: GradientAverager, nested: bool) -> None:
        """Finish ``call`` on this rank.

        Args:
            call: a backward that has run.
            site: its call site.
            averager: its averager.
            nested: whether it contained backward passes: once all ranks know, they average after the whole.
        """
        if not _keeps_graph(call):
            self.settle_buffers()
        if nested and not site.nested_on_any_rank:
            site.nested_here = True
            averager.note_stale_set()

    def settle_buffers(self) -> None:
        """Write the values of buffers in place, because earlier graphs are no longer needed."""
        for buffers in self.late_buffers:
            buffers.settle()
        self.late_buffers.clear()

    def restart(self, site: CallSite, error: BaseException) -> None:
        """Reset ``site`` after a backward pass there failed halfway.

        Raises:
            RankMismatchError: ``error`` says that a rank has waited for another until the timeout; the new error names the missing rank.
        """
        site.restart()
        self._unexpected.forget()
        if has_timed_out(error):
            raise self._coordinator.in_vain(AVERAGE, None) from error

    @torch.inference_mode(False)
    def answer(self, number: int, take_part: Callable[[GradientAverager, Share], None], share: Share) -> Callable[[], bool]:
        """Take part in a backward of others.

        Args:
            number: the number of their averager.
            take_part: a method of :class:`GradientAverager`.
            share: the share that this rank contributes.

        Returns:
            A function that finds out afterwards whether this rank is still in step with the others.
        """
        averager = self._averagers.get(number)
        if averager is None:
            raise RankMismatchError(
                f"rank {self._group.world.rank} has left the training loop, but other ranks train parameters that it does not have. "
                "Build all optimizers before the loop, or let all ranks take the same number of steps."
            )
        take_part(averager, share)
        self.handle(averager, share.weight, call=None)
        self._unaveraged.note(averager.parameters)
        return share.averaged

    def _fail_alike(self, averager: GradientAverager, call: Backward | None) -> None:
        """Raise a rank's error in a backward pass on all ranks, so that a script that continues skips the same step everywhere.

        Args:
            averager: the averager of the backward.
            call: this rank's own backward, if it has contributed.
        """
        error, averager.error = averager.error, None
        mine = None if error is None else RemoteException.of(error, error.__traceback__, _can_pickle)
        gathered = self._group.share(FAILED, mine, range(self._group.world.size))
        self._sites.drop(averager)
        failed = {rank: each for rank, each in gathered.items() if each is not None}
        first, raised = next(iter(failed.items()))
        again = raised.error(f"rank {first}")
        if len(failed) < len(gathered) and not self._warned:
            self._warned = True
            warn(
                f"parwrap: the backward at {location()} raised {in_one_line(again)} on rank {first}. All ranks raise the same error, so "
                "that all skip the step if the script continues. This is shown once."
            )
        if error is not None or call is not None:
            raise error or again


def _keeps_graph(call: Backward) -> bool:
    """Whether another backward may follow that needs the same graph."""
    return bool(call.options.get("retain_graph") or call.options.get("create_graph"))


def _can_pickle(thing: Any) -> bool:
    try:
        pickle.dumps(thing)
    except Exception:
        return False
    return True
