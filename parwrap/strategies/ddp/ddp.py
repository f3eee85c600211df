"""Data parallelism: every rank holds the model, and each backward leaves the average gradient in ``.grad``.

This file is the regular step: look up the parameters of the backward's call site, enter the sync point, run the backward, check that it was
regular on all ranks. ``gradient_averager.py`` does the averaging. Rare cases are left to ``call_sites.py`` (ranks agree on a new site) and
``recovery.py`` (a rank has reported something, or takes part without a backward).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import current_thread

import torch
from torch import nn

from parwrap.coordination.call_site import call_site, worth_a_look
from parwrap.coordination.status_board import SyncPoint
from parwrap.coordination.sync_points import BACKWARD, FIRST_BACKWARD, THEN_AVERAGED
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.autograd_graph import reached
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.common.equal_state import EqualState
from parwrap.strategies.common.reducer import reducer_options
from parwrap.strategies.common.share import Share
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.ddp.averagers import AveragerRegistry
from parwrap.strategies.ddp.bypasses import Bypasses
from parwrap.strategies.ddp.call_sites import SETTLING, CallSite, CallSites
from parwrap.strategies.ddp.gradient_averager import GradientAverager, note_gradients
from parwrap.strategies.ddp.one_thread import OneThread
from parwrap.strategies.ddp.recovery import Recovery
from parwrap.strategies.ddp.unaveraged import Unaveraged
from parwrap.strategies.ddp.unexpected_gradients import UnexpectedGradients

__all__ = ["DDP"]

MOVING = "a cast or move of the model"


class DDP(Strategy):
    """Averages gradients over the ranks of ``group``."""

    OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view", "compress", "powersgd_rank")

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._coordinator = group.coordinator
        self._threads = OneThread()
        self._running = self._nested = False
        self.unaveraged = Unaveraged(group, loop)
        self._averagers = AveragerRegistry(group, loop, lambda: reducer_options(options()), self.unaveraged, self._catching_up)
        self._sites = CallSites(group, loop, self._averagers)
        self._unexpected = UnexpectedGradients(group, loop, self._sites, self._averagers, self.unaveraged)
        self._recovery = Recovery(group, self._sites, self._averagers, self.unaveraged, self._unexpected)
        with torch.inference_mode(False), torch.enable_grad():
            # autograd runs nodes of the same age in any order, and signal nodes have age 0: the script's nodes must be newer
            torch.zeros((), requires_grad=True).sum()
        self._coordinator.answer(MOVING, lambda detail, present: None)
        self._coordinator.answer(FIRST_BACKWARD, self._sites.answer_agreement)
        self._coordinator.answer(BACKWARD, partial(self._answer, GradientAverager.answer))
        self._coordinator.answer(THEN_AVERAGED, partial(self._answer, GradientAverager.answer_then_average))

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call`` and average the gradients that it leaves."""
        alone = bool(self._group.alone_in)
        if not alone and self._threads.thread is not current_thread():
            self._threads.enter(self._running)
        if alone or self._running:
            self._nested = True
            call.run()
            return
        self._running, self._nested = True, False
        try:
            if call.averaged:
                self._average(call)
            else:
                call.run()
        finally:
            self._running, self._unexpected.armed = False, None
        self._loop.ran_backward()

    def _average(self, call: Backward) -> None:
        # look up the averager of this call site
        site = self._sites.get(key := call_site()) or self._sites.add(key)
        self._loop.look_for_parameters()
        if self._coordinator.number >= self._averagers.following.due:
            self._averagers.following.look()
        unfrozen = site.frozen and any(p.requires_grad for p in site.frozen)
        if site.visits < SETTLING or site.generation != self._loop.generation or unfrozen:
            self._sites.agree(site, call)
            self.unaveraged.look_for_parameters()
            self._unexpected.watch()
        site.visits += 1
        averager, sync_point, weight = site.averager, site.sync_point, 1.0 if call.weight is None else call.weight
        weighted = call.weight is None and self._loop.weights.drawn
        if weighted:
            call, weight = self._weighted(call)
        if averager is None or sync_point is None:  # this site trains nothing
            call.run()
            return
        run: Callable[[Backward, float], None] = averager.run
        if site.nested_on_any_rank or site.remakes or call.options.get("create_graph"):
            run, sync_point = self._then_average(call, site, averager), SyncPoint(THEN_AVERAGED, sync_point.place, sync_point.detail)
        if weighted and (batch := self._loop.weights.number):
            sync_point = sync_point.of_batch(batch)

        # enter the sync point, where a rank that has left the loop answers
        self._coordinator.go_ahead(sync_point)
        try:
            self._unexpected.armed = averager
            averager.note_buffers()
            if call.existing_grads or worth_a_look(site.visits):
                self._unexpected.look(call, averager, closely=worth_a_look(site.visits))

            # run the backward, while torch's hooks average the buckets
            run(call, weight)

            # check that it was regular on all ranks
            if not (self._coordinator.compare(sync_point) and self._recovery.immediate):
                self._recovery.handle(averager, weight, call)
            if self._recovery.late_buffers or self._nested:
                self._recovery.finish(call, site, averager, self._nested)
            if not site.remakes:
                note_gradients(averager.parameters, self.unaveraged.noted)
        except BaseException as error:
            self._recovery.restart(site, error)
            raise
        finally:
            self._coordinator.through()

    def _weighted(self, call: Backward) -> tuple[Backward, float]:
        """``call`` multiplied by the weight of this rank's part of its batch, and that weight."""
        weight, loss_factor, *_ = self._loop.weights.find(call.tensors)
        scale = weight * loss_factor
        return (call.scaled(scale) if scale != 1.0 else call), weight

    def _then_average(self, call: Backward, site: CallSite, averager: GradientAverager) -> Callable[[Backward, float], None]:
        """A function that runs ``call`` if gradients cannot be averaged while it runs."""
        if site.remakes:
            averager.stand_for(reversed(reached(call.roots)))
        return averager.run_then_average

    def _answer(self, take_part: Callable[[GradientAverager, Share], None], number: int, present: list[int]) -> Callable[[], bool]:
        """Others run a backward, and this rank waits for something else; returns a function that tells afterwards whether it missed
        nothing."""
        share = self.share()
        self._running = True  # the backward in it is not the user's
        try:
            goes_on = self._recovery.answer(number, take_part, share)
        finally:
            self._running = False
        self._loop.ran_backward()
        return goes_on

    def interceptors(self) -> list[Interceptor]:
        equal_state = EqualState(self._group, self._loop)
        self._loop.looking = equal_state.evaluation_begins
        # in a step gradients are averaged first, because Zero1 hides some afterwards
        return [self.unaveraged, self, equal_state, Bypasses(self._group, self._loop)]

    def described(self) -> str:
        options = self._options()
        return f"{options.strategy}, compress {options.compress}" if options.compress else options.strategy

    def averaged(self) -> AbstractContextManager[None]:
        return self.unaveraged.paused()

    @intercepts
    def move(self, module: nn.Module, apply: Callable[[], nn.Module]) -> nn.Module:
        """Change the device or dtype of the parameters of ``module``, once no rank trains the old ones any more."""
        if not is_alone() and any(id(p) in self._averagers.ids() for p in module.parameters()):
            self._group.synchronize(MOVING)
        moved = apply()
        self._loop.moved()
        return moved

    @intercepts
    def took_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish after a step of ``optimizer``: earlier graphs are no longer needed."""
        if self._recovery.late_buffers:
            self._recovery.settle_buffers()

    def leave(self, returns: bool) -> None:
        """Finish when all ranks have reached the end together."""
        self._threads.check()
        self._recovery.settle_buffers()
        self._averagers.compare_at_end()

    def close(self) -> None:
        """Release the user's parameters: remove every hook on them."""
        self._unexpected.unwatch()
        self._sites.clear()
        self._loop.drew = lambda: None
        self._averagers.keep(())
        self._recovery.late_buffers.clear()
        self.unaveraged.forget()

    def phase(self) -> int:
        return self._loop.generation

    def take_state(self, source: int, takes: bool = True) -> None:
        """Copy the state of rank ``source``, if this rank ``takes`` it; called on all ranks."""
        self._averagers.take_state(source, takes)

    def _catching_up(self) -> AbstractContextManager[None]:
        """A context manager to enter while another rank's state is copied."""
        return nullcontext()
