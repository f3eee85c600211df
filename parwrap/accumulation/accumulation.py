"""The interceptor that takes an optimizer step every few batches: it handles backward, clipping, steps and passes over loaders.

Inside a window, a backward pass only adds to this rank's gradients, and a step only keeps the gradients that it would have used. The
backward pass that closes the window goes to the strategy, with all gradients of the window. ``window.py`` counts the position in a
window.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from parwrap.accumulation.applied_window import Applied, clips_of, mean_of
from parwrap.accumulation.at_work import AtWork
from parwrap.accumulation.over_ranks import OverRanks
from parwrap.accumulation.sums import Asked, Sums, put_back
from parwrap.accumulation.window import Window
from parwrap.coordination.call_site import call_site, location, warn
from parwrap.data.passes import Pass
from parwrap.data.samplers import last_part
from parwrap.errors import UsageError
from parwrap.group.group import is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import intercepts
from parwrap.intercept.scaler import ScalerCall
from parwrap.loop.autograd_graph import reached
from parwrap.loop.batch_weights import Weighed
from parwrap.loop.loop_state import parameters_of
from parwrap.strategies.common.share import Share
from parwrap.torch_private.dataloader import INDEX_SAMPLER
from parwrap.torch_private.tensors import version_of

__all__ = ["Accumulation"]

LOOKS = 8
"""The number of skipped steps to check before the checks become rare."""


@dataclass
class _Reading:
    """A pass over a loader: whether the running batch was drawn from it, and whether any of its batches is in the open window."""

    batches: weakref.ref[Pass] | None = None
    drew: bool = False
    trains: bool = False

    @property
    def last_part(self) -> float | None:
        """How full the last drawn batch is, if it is the last batch of the pass."""
        batches = self.batches() if self.batches else None
        if batches is None or not batches.last():
            return None
        return last_part(getattr(batches, INDEX_SAMPLER, None))


class Accumulation(AtWork):
    """Accumulates over windows of ``steps`` batches.

    Args:
        steps: batches in a full window.
        over_ranks: a function that returns the object that averages windows over the ranks, or ``None`` for a single rank.
    """

    def __init__(self, steps: int, over_ranks: Callable[[], OverRanks | None]) -> None:
        self.window = Window(steps)
        self._over_ranks = over_ranks
        self._asked: dict[tuple[int, int], Asked] = {}
        self._asks: Counter[torch.optim.Optimizer] = Counter()
        self._clips: list[Clip] = []
        self._unsettled: list[tuple[tuple[int, int], Asked]] = []
        self._drops: dict[tuple[int, int], bool] = {}
        self._readings: list[_Reading] = []
        self._ended = self._has_stepped = self._due = self._warned = False
        self._scaler: torch.amp.GradScaler | None = None
        self._changes = _ChangesByHand()
        self._failure: BaseException | None = None
        self._thread = threading.get_ident()

    def count(self, total: float) -> None:
        """Weight the next batch in its window by ``total``, its number of tokens or samples on all ranks together."""
        self.window.count(total)

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Iterate over ``loader``. A pass without backward passes does not count."""
        batches = original(loader)
        if is_alone() or get_worker_info() is not None or not torch.is_grad_enabled():
            return batches
        reading = _Reading()

        def closed(exhausted: bool) -> None:
            self._readings = [each for each in self._readings if each is not reading]
            if reading.trains:
                self._close()

        ahead = batches if isinstance(batches, Pass) else Pass(batches, lambda exhausted: None)

        def drew(batch: Any) -> None:
            self._drew()
            reading.drew = True

        watched = Pass(ahead, closed, drew)
        reading.batches = weakref.ref(watched)
        self._readings.append(reading)
        return watched

    iterate_pipelines = iterate

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run the backward pass ``call`` with its weight in the window.

        If it closes the window, the strategy averages all gradients of the window.
        """
        if self._busy or is_alone():
            call.run()
            return
        self._catch_up()
        self._settle()
        site, window = call_site(), self.window
        if window.over(site) or self._begins_another_loop(site, call):
            self._next_batch()
        elif window.left(site):
            self._leave(call)
        with self._at_work():
            if not window.backwards:
                self._begin_batch(call)
            if window.factor != 1.0:
                call = call.scaled(window.factor)
            try:
                if window.closing:
                    due = [asked for asked in self._asked.values() if asked.at == window.backwards]
                    existing_grads = put_back(due, window.correction)
                    call._replace(weight=window.rank_weight, existing_grads=existing_grads).run()
                else:
                    call._replace(averaged=False).run()
            except BaseException:
                self._drop_batch()  # a script may catch this error, and continue with the next batch
                raise
        window.ran_backward(site)
        self._changes.remember()

    def _begin_batch(self, call: Backward) -> None:
        over_ranks, feeding = self._over_ranks(), [reading for reading in self._readings if reading.drew]
        parts = [part for reading in feeding if (part := reading.last_part) is not None]
        weight, loss_factor, *_ = over_ranks.batch(call) if over_ranks else Weighed()
        self.window.begin(self.window.full or bool(parts), weight, min(parts, default=1.0), loss_factor)
        for reading in feeding:
            reading.trains = True

    def _begins_another_loop(self, site: tuple, call: Backward) -> bool:
        """Whether the call site of ``call`` is new, no loader is read, and the running batch has stepped with everything that it
        reaches."""
        if self._readings or not self.window.asked or not self.window.is_new(site):
            return False
        stepped = {id(p) for optimizer in self._asks for p in parameters_of(optimizer)}
        return all(id(leaf) in stepped for leaf in reached(call.roots) if isinstance(leaf, torch.nn.Parameter))

    def _leave(self, call: Backward) -> None:
        """Handle a previous batch without a step.

        If its gradients were kept, the loop accumulates by hand: count the batch. Otherwise drop it.
        """
        if any(leaf.grad is not None and leaf.grad.any() for leaf in reached(call.roots)):
            self._next_batch()
            return
        self._warn_of_sums_not_used()
        self._drop_batch()

    def _drop_batch(self) -> None:
        """Drop the running batch, and the window that it would have closed."""
        self._clips = []
        if self.window.closing:
            self._asked, self._asks = {}, Counter()
            self.window.begin_window()
        else:
            self.window.take_back()

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Clip only gradients that a step uses."""
        if self._busy or is_alone():
            return clip.run()
        self._catch_up()
        if not self.window.closing:
            self._clips.append(clip)
            return clip.norm()
        clipped = {id(p) for p in clip.parameters}
        late = [asked for asked in self._asked.values() if asked.at < self.window.backwards]
        self._complete([asked for asked in late if any(id(p) in clipped for p in asked.parameters)])
        return clip.run()

    @intercepts
    def skips(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is inside a window."""
        if self._busy or is_alone():
            return False
        self._catch_up()
        self._settle()  # before another optimizer keeps the same gradients
        window = self.window
        if not (window.is_open or self._has_stepped):
            self._refuse_own_gradients(optimizer)
        window.step()
        self._has_stepped = True
        key = id(optimizer), self._asks[optimizer]
        self._asks[optimizer] += 1
        if window.closing:
            if key in self._asked:
                self._complete([self._asked.pop(key)])
            return False
        asked = self._asked.setdefault(key, Asked(optimizer))
        self._changes.look(optimizer)
        asked.sums.add(asked.parameters, lent=self._drops.get(key, False))
        self._unsettled.append((key, asked))
        asked.at, asked.clips = window.backwards - 1, list(self._clips)
        return True

    @intercepts
    def use_scaler(self, call: ScalerCall) -> Any:
        """A script's own scaler acts only on real steps; until then gradients keep its scale."""
        if self._busy or is_alone():
            return call.run()
        if call.name == "step" and call.optimizer is not None:
            self.skips(call.optimizer)  # the scaler may skip it
        self._scaler = call.scaler
        return None if self.window.is_open and not self.window.closing else call.run()

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Refuse a step with a closure: it runs backward passes inside the step, which may be skipped."""
        if self._busy or is_alone():
            return closure
        raise UsageError(
            f"optimizer.step(closure) at {location()} cannot be accumulated: the closure computes the gradients inside the step. Call "
            "backward() and then step() without a closure, or train this part without parwrap.accumulate."
        )

    def finish(self) -> None:
        """Apply the open window, after the function has returned."""
        self._catch_up()
        if self.window.is_open:
            if not self._has_stepped:
                self._refuse_no_step(self.window.batches + 1)
            self._end_window()

    def end(self) -> None:
        """Make passes that outlive the function have no effect."""
        self._ended = True

    def _drew(self) -> None:
        self._catch_up()
        if self.window.asked:  # earlier draws are for the same batch, or the batch was skipped
            self._next_batch()
        self.window.drew()

    def _close(self) -> None:
        """End the window at the end of a training pass.

        If the iterator is being deleted, keep the work or its error for :meth:`_catch_up`, because a finalizer cannot raise.
        """
        if self._ended:
            return
        if self._busy or threading.get_ident() != self._thread:
            self._due = True
            return
        try:
            self._end_window()
        except BaseException as error:
            self._failure = error

    def _catch_up(self) -> None:
        """Do the work that :meth:`_close` postponed, or raise its error."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._due:
            self._due = False
            self._end_window()

    def _settle(self) -> None:
        """Called before gradients change: detect whether the loop drops them after a step, so that they need not be copied."""
        unsettled, self._unsettled = self._unsettled, []
        for key, asked in unsettled:
            self._drops[key] = asked.sums.settle()

    def _next_batch(self) -> None:
        if self.window.closing:
            self._end_window()
            return
        self.window.end()
        self._asks, self._clips = Counter(), []
        for reading in self._readings:
            reading.drew = False

    def _end_window(self) -> None:
        """Apply the sums that no step has used, and begin another window."""
        self._settle()
        window, asked = self.window, list(self._asked.values())
        if window.closing and not self._has_stepped:
            self._refuse_no_step(window.batches + 1)
        self._warn_of_sums_not_used()
        self._asked, self._asks, self._clips = {}, Counter(), []
        left = [each for each in asked if not each.given and each.sums]
        weight = window.open_weight
        window.begin_window()
        for reading in self._readings:
            reading.drew = reading.trains = False
        if left:
            with self._at_work():
                self._together(left, weight, gives=True).run(self._scaler)

    def _warn_of_sums_not_used(self) -> None:
        if any(asked.given for asked in self._asked.values()) and not self._warned:
            self._warned = True
            warn(
                "parwrap: in the last batch of a window of parwrap.accumulate, the loop skipped the optimizer step, so the gradients of "
                "the earlier batches in this window are not used either. This is shown once."
            )

    def _complete(self, several: list[Asked]) -> None:
        """Add sums that no later backward will include, because the loop steps without one."""
        self._settle()
        left = [asked for asked in several if asked.sums]
        if left:
            with self._at_work():
                self._together(left, self.window.open_weight, gives=False).add()
            for asked in left:
                asked.sums, asked.given = Sums(), True

    def _together(self, several: list[Asked], weight: float, gives: bool) -> Applied:
        over_ranks = self._over_ranks()
        if over_ranks is not None:
            return over_ranks.applied(several, weight, over_ranks.in_step(several, weight, self._scaler) if gives else Share)
        return Applied(mean_of(several, weight), clips_of(several), [asked.optimizer for asked in several if asked.optimizer])

    def _refuse_own_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if any(p.grad is not None for p in parameters_of(optimizer)):
            raise UsageError(
                f"{type(optimizer).__name__}.step() at {location()} uses gradients that backward() did not compute, but "
                "parwrap.accumulate only adds up gradients from backward(). Call loss.backward(), or train this part without "
                "parwrap.accumulate."
            )

    def _refuse_no_step(self, batches: int) -> None:
        self._ended = True
        raise UsageError(
            f"parwrap.accumulate({self.window.steps}) is for a loop that calls optimizer.step() after each backward, but none was "
            f"called in {batches} {'batch' if batches == 1 else 'batches'}: the loop updates its weights by hand, or accumulates by hand "
            "over more batches. Remove parwrap.accumulate, or call optimizer.step() in every batch."
        )


class _ChangesByHand:
    """Compares the gradients at a step with those that the last backward pass left, and warns once if the loop has changed them in between.

    Inside a window, such a change applies to the gradients of each batch, and in the last batch also to the sum of all gradients.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        self._looks = LOOKS

    def remember(self) -> None:
        """Remember the gradients after a backward pass."""
        if self._looks:
            parameters = [p for optimizer in self._optimizers for p in parameters_of(optimizer)]
            self._left = {id(p): (p.grad, version_of(p.grad)) for p in parameters if p.grad is not None}

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the gradients of ``optimizer`` before its step is skipped."""
        if not self._looks:
            return
        self._looks -= 1
        self._optimizers.add(optimizer)
        left, self._left = self._left, {}
        for p in parameters_of(optimizer):
            grad, version = left.get(id(p), (None, 0))
            if grad is not None and p.grad is not None and (p.grad is not grad or version_of(p.grad) != version):
                self._looks = 0
                warn(
                    f"parwrap: gradients were changed between backward() and the step at {location()}. Inside a window of "
                    "parwrap.accumulate, the change is applied to the gradients of each batch, and to their sum in the last batch: a "
                    "mask has the right effect, but weight decay is applied several times. torch.nn.utils.clip_grad_norm_ and similar "
                    "functions act only on gradients that a step uses. This is shown once."
                )
                return
