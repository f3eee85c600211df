"""Data parallelism: every rank holds the model, and each backward leaves the average gradient in ``.grad``.

The interceptor of backward. It finds out which parameters a backward call site reaches, lets the ranks agree on them once
and hands the backward to the ``GradientAverager`` of that set; exactly one is armed at a time. A parameter that a site never
reaches is in no set of that site, so its ``grad`` stays ``None`` as in a single process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parwrap.coordination.call_site import call_site, location, trail, warn, worth_a_look
from parwrap.coordination.status_board import SyncPoint
from parwrap.coordination.sync_points import BACKWARD, FIRST_BACKWARD, THEN_AVERAGED
from parwrap.errors import RankMismatchError
from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.common.agreement import View, described, refuse_different_parameters
from parwrap.strategies.common.autograd_graph import leading_sizes, reached, reenters, sparsely_used
from parwrap.strategies.common.in_step import InStep
from parwrap.strategies.common.reducer import reducer_options
from parwrap.strategies.common.share import Share
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.common.training_buffers import TrainingBuffers
from parwrap.strategies.ddp.averagers import AveragerRegistry
from parwrap.strategies.ddp.bypasses import Bypasses
from parwrap.strategies.ddp.gradient_averager import GradientAverager, has_timed_out
from parwrap.strategies.ddp.one_thread import OneThread
from parwrap.strategies.ddp.unaveraged import Unaveraged
from parwrap.system.remote_exception import RemoteException, in_one_line

__all__ = ["DDP"]

SETTLING = 2
"""Visits at which a site is looked at closely. The second tells a hand-made parameter, which is reached again, from an input."""

MOST_SITES = 64
"""A script that makes a new call site for every step must not fill the memory with buckets."""

MOVING = "a cast or move of the model"
ASTRAY = "what was missed or not expected"
STRAYS = "gradients outside of the known set"
FAILED = "an exception in a backward"
AVERAGE = "the average of the gradients"


@dataclass
class _Site:
    """What is known of one place in the script that calls backward.

    Attributes:
        visits: how often it was visited since it was looked at from the start.
        generation: the loop's, when the ranks agreed on it.
        averager: of the parameters that it reaches; ``None`` where there is nothing to train.
        trail: the lines that lead there, by which other ranks know it.
        sync_point: of its next backward.
        bare: the leaf tensors among those parameters that are no ``nn.Parameter``, by id.
        frozen: parameters of optimizers that were frozen then.
        reenters: whether backwards are called inside of it.
        remakes: whether its parameters are leaf tensors that the script makes anew for each step.
    """

    visits: int = 0
    generation: int = -1
    averager: GradientAverager | None = None
    trail: tuple[str, ...] = ()
    sync_point: SyncPoint | None = None
    bare: dict[int, torch.Tensor] = field(default_factory=dict)
    frozen: tuple[torch.Tensor, ...] = ()
    reenters: bool = False
    remakes: bool = False


class DDP(Strategy):
    """Averages gradients over the ranks of ``group``."""

    OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view", "compress", "powersgd_rank")

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._coordinator = group.coordinator
        self._sites: dict[tuple, _Site] = {}
        self._averagers = AveragerRegistry(group, loop, lambda: reducer_options(options()))
        self.unaveraged = Unaveraged(group, loop)
        self._averagers.took = self.unaveraged.begin
        self._threads = OneThread()
        self._strays: dict[int, torch.Tensor] = {}
        self._armed: GradientAverager | None = None
        self._late_buffers: list[TrainingBuffers] = []
        self._watched: list[torch.utils.hooks.RemovableHandle] = []
        self._running = self._nested = self._said_failed = False
        self._immediate = self._coordinator.immediate and group.device.type == "cpu"
        with torch.inference_mode(False), torch.enable_grad():
            # autograd runs nodes of the same age in any order, and those of signals have the age 0: the script's are to be newer
            torch.zeros((), requires_grad=True).sum()
        self._coordinator.phase = lambda: loop.generation
        self._coordinator.answer(MOVING, lambda detail, present: None)
        self._coordinator.answer(FIRST_BACKWARD, self._answer_first)
        self._coordinator.answer(BACKWARD, lambda number, present: self._answer(number, GradientAverager.answer))
        self._coordinator.answer(THEN_AVERAGED, lambda number, present: self._answer(number, GradientAverager.answer_then_average))

    def described(self) -> str:
        options = self._options()
        return f"{options.strategy}, compress {options.compress}" if options.compress else options.strategy

    def interceptors(self) -> list[Interceptor]:
        in_step = InStep(self._group, self._loop)
        self._loop.looking = in_step.evaluation_begins
        # in a step gradients are averaged first: after that Zero1 hides some
        return [self.unaveraged, self, in_step, Bypasses(self._group, self._loop)]

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call`` and average what it leaves in the gradients."""
        if not is_alone():
            self._threads.enter(self._running)
        if self._running or is_alone():
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
            self._running, self._armed = False, None
        self._loop.ran_backward()

    def averaged(self) -> AbstractContextManager[None]:
        return self.unaveraged.paused()

    @intercepts
    def move(self, module: nn.Module, apply: Callable[[], nn.Module]) -> nn.Module:
        """Give the parameters of ``module`` another device or dtype, once no rank trains them as they are any more."""
        if not is_alone() and any(id(p) in self._averagers.ids() for p in module.parameters()):
            self._group.synchronize(MOVING)
        moved = apply()
        self._loop.moved()
        return moved

    @intercepts
    def took_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has stepped, so no graph of before is needed any more."""
        if self._late_buffers:
            self._settle_buffers()

    def _settle_buffers(self) -> None:
        for buffers in self._late_buffers:
            buffers.settle()
        self._late_buffers.clear()

    def leave(self, returns: bool) -> None:
        """All ranks have come to the end together."""
        self._threads.check()
        self._settle_buffers()
        self._averagers.compare_at_end()

    def close(self) -> None:
        """Let go of the user's parameters: every hook on them is removed."""
        for handle in self._watched:
            handle.remove()
        self._sites.clear()
        self._loop.drew = lambda: None
        self._averagers.keep(())
        self._watched.clear()
        self._late_buffers.clear()
        self.unaveraged.forget()

    def _average(self, call: Backward) -> None:
        key = call_site()
        site = self._sites.get(key) or self._new_site(key)
        self._loop.look_for_parameters()
        self._averagers.following.look()
        if site.visits < SETTLING or site.generation != self._loop.generation or any(p.requires_grad for p in site.frozen):
            self._settle(site, call)
        site.visits += 1
        averager, sync_point, weight = site.averager, site.sync_point, call.weight
        if weight is None:
            weight, loss_factor, *_ = self._loop.weights.find(lambda: leading_sizes(call.tensors))
            scale = weight * loss_factor
            call = call.scaled(scale) if scale != 1.0 else call
        if averager is None or sync_point is None:
            call.run()
            return
        if site.remakes:
            averager.stand_for(reversed(reached(call.roots)))
        then = site.reenters or site.remakes or call.options.get("create_graph")
        if then:
            sync_point = SyncPoint(THEN_AVERAGED, sync_point.place, sync_point.detail)
        if call.weight is None and (batch := self._loop.weights.number):
            sync_point = sync_point.of_batch(batch)
        self._coordinator.go_ahead(sync_point)
        try:
            self._armed = averager
            averager.note_buffers()
            for p in call.existing_grads:
                self._stray(p)
            if worth_a_look(site.visits) and averager.others(reached(call.roots)):
                self._coordinator.go_astray()  # it has all of the set, and more that no hook is on
            (averager.run_then_average if then else averager.run)(call, weight)
            if not (self._coordinator.compare(sync_point) and self._immediate):
                self._follow(averager, weight, call)
            if averager.error is not None:  # with a GPU the others know a step later, and have taken this one
                self._coordinator.miss()
                raise averager.error
            if self._late_buffers and not _keeps_graph(call):
                self._settle_buffers()
            if self._nested and not site.reenters:
                averager.note_misfit()
            if not site.remakes:
                self.unaveraged.note(averager.parameters)
        except BaseException as error:
            site.averager, site.visits = None, 0  # it failed half way: start afresh
            self._strays.clear()
            if has_timed_out(error):
                raise self._coordinator.in_vain(AVERAGE, None) from error
            raise
        finally:
            self._coordinator.through()

    def _answer(self, number: int, take_part: Callable[[GradientAverager, Share], None]) -> Callable[[], bool]:
        """Take part in the backward of others, with this rank's share of it, if it has any.

        Returns:
            What it does next, to tell whether it goes on in step with the others.
        """
        averager = self._averagers.get(number)
        if averager is None:
            raise RankMismatchError(
                f"rank {self._group.world.rank} has left the training loop, and others train parameters that it does not know. "
                "Build all optimizers before the loop, or let all ranks take the same number of steps."
            )
        share = self.share()
        self._running = True  # the backward in it is none of the user's
        try:
            with torch.inference_mode(False):
                take_part(averager, share)
                self._follow(averager, share.weight, call=None)
                self.unaveraged.note(averager.parameters)
        finally:
            self._running = False
        self._loop.ran_backward()
        return share.averaged

    def _follow(self, averager: GradientAverager, weight: float, call: Backward | None) -> None:
        """What all ranks do together after a backward in which one has told something.

        Args:
            averager: of the backward.
            weight: of this rank.
            call: this rank's own backward, if it has contributed.
        """
        noticed = averager.noticed()
        if noticed.failed:
            self._fail_alike(averager, call)
            return
        misfit = noticed.misfit
        if self._immediate and self._coordinator.any_astray():
            leaves = reversed(reached(call.roots)) if call else ()
            misfit |= self._look_closer(averager, weight, averager.others(leaves))
        if noticed.buffers:
            late = call is not None and _keeps_graph(call)
            if averager.buffers.take(noticed.asked, contributes=call is not None, late=late):
                averager.buffers_move = averager.at_once = True
            if late:
                self._late_buffers.append(averager.buffers)
        if noticed.strays:
            self._average_strays(averager, weight)
        if misfit:
            for site in self._sites.values():
                if site.averager is averager:
                    site.averager, site.visits = None, 0
        if misfit or noticed.strays:
            self._averagers.drop(averager.number)  # no site of any rank has it any more

    def _fail_alike(self, averager: GradientAverager, call: Backward | None) -> None:
        """A backward has raised on a rank: raise the same on all, so that a script that goes on skips the same step everywhere.

        Args:
            averager: of the backward.
            call: this rank's own backward, if it has contributed.
        """
        error, averager.error = averager.error, None
        mine = None if error is None else RemoteException.of(error, error.__traceback__, _can_pickle)
        told = self._group.share(FAILED, mine, range(self._group.world.size))
        for site in self._sites.values():
            if site.averager is averager:
                site.averager, site.visits = None, 0
        self._averagers.drop(averager.number)
        failed = {rank: each for rank, each in told.items() if each is not None}
        first, raised = next(iter(failed.items()))
        again = raised.error(f"rank {first}")
        if len(failed) < len(told) and not self._said_failed:
            self._said_failed = True
            warn(
                f"parwrap: the backward at {location()} has raised {in_one_line(again)} on rank {first}. All ranks raise the same, so that "
                "all skip the step if the script goes on. This is said once."
            )
        if error is not None or call is not None:
            raise error or again

    def _new_site(self, key: tuple) -> _Site:
        if len(self._sites) >= MOST_SITES:
            del self._sites[next(iter(self._sites))]
        return self._sites.setdefault(key, _Site())

    def _settle(self, site: _Site, call: Backward) -> None:
        """Agree with the other ranks on the parameters that ``site`` reaches."""
        afresh = site.visits == 0 or site.generation != self._loop.generation
        known = () if afresh or site.averager is None else site.averager.parameters
        # not by who is alive: whether an optimizer in a cycle of garbage still is differs between ranks
        owned = {number: p for number, p in sorted(self._loop.once_owned().items()) if p.requires_grad}
        number_of = {id(p): number for number, p in owned.items()}
        leaves = {id(leaf): leaf for leaf in (*reached(call.roots), *call.existing_grads)}
        sparse = sparsely_used(call.roots) | {id(p) for p in call.existing_grads if p.grad is not None and p.grad.is_sparse}

        def is_parameter(leaf: torch.Tensor) -> bool:
            return isinstance(leaf, nn.Parameter) or id(leaf) in number_of

        mine = {id(p): p for p in (*known, *reversed(leaves.values())) if is_parameter(p) and p.requires_grad}
        numbered = [p for key, p in mine.items() if key in number_of]
        others = [p for key, p in mine.items() if key not in number_of]
        bare = [leaf for leaf in reversed(leaves.values()) if not is_parameter(leaf) and (afresh or id(leaf) in site.bare)]
        remade = not (afresh or mine or bare) and bool(site.bare)
        if remade:
            bare = list(reversed(leaves.values()))
        place, site.trail = location(), trail()
        view = View(
            place,
            site.trail,
            owned=dict(zip((number_of[id(p)] for p in numbered), described(numbered), strict=True)),
            others=described(others),
            bare=described(bare),
            sparse=frozenset(number_of[key] for key in sparse if key in number_of),
            reenters=site.reenters or self._nested or reenters(call.roots),
            generation=self._loop.generation,
            owns=bool(owned),
            visits=0 if afresh else site.visits,
            buffers=afresh or (site.averager is not None and site.averager.buffers.moves()),
        )
        self._group.synchronize(FIRST_BACKWARD)
        views, used = self._share_views(view, site)
        refuse_different_parameters(views)
        site.averager, site.bare = self._averagers.agree(views, used, owned, others, bare)
        site.generation = self._loop.generation
        site.visits = 0 if afresh else site.visits
        site.reenters = any(each.reenters for each in views.values())
        site.remakes = remade and bool(site.bare)
        site.sync_point = SyncPoint(BACKWARD, place, site.averager.number) if site.averager else None
        site.frozen = tuple(p for p in self._loop.owned().values() if not p.requires_grad)
        self._watch(owned.values())

    @torch.inference_mode(False)
    def _answer_first(self, detail: int, present: list[int]) -> None:
        """Others agree on a site, and this rank has left: it only gets to know their averager."""
        views, used = self._share_views(None)
        told = next(iter(views.values()))
        averager, _ = self._averagers.agree(views, used, *self._averagers.stand_ins(told))
        for site in self._sites.values():
            # this rank has been there too, and need not ask again when it comes back
            if averager and site.sync_point and site.trail == told.trail and site.generation == told.generation:
                site.averager, site.visits = averager, told.visits + 1
                site.sync_point = SyncPoint(BACKWARD, told.location, averager.number)

    def _share_views(self, mine: View | None, here: _Site | None = None) -> tuple[dict[int, View], set[int]]:
        """The views of those who are in a backward, and the numbers of the averagers that any rank uses elsewhere than ``here``."""
        used = {site.averager.number for site in self._sites.values() if site.averager and site is not here}
        told = self._group.share(FIRST_BACKWARD, (mine, used), range(self._group.world.size))
        return {rank: view for rank, (view, _) in told.items() if view is not None}, set().union(*(used for _, used in told.values()))

    def _watch(self, owned: Iterable[torch.Tensor]) -> None:
        """Notice gradients of parameters that a site was not known to reach: it takes another way now, or a checkpoint hides them."""
        for handle in self._watched:
            handle.remove()
        sets = [site.averager.ids for site in self._sites.values() if site.averager]
        in_all = frozenset.intersection(*sets) if sets else frozenset()
        self._watched = [p.register_post_accumulate_grad_hook(self._stray) for p in owned if id(p) not in in_all]
        for site in self._sites.values():
            if site.averager:
                site.averager.at_once = bool(self._watched) or site.averager.buffers_move

    def _stray(self, parameter: torch.Tensor) -> None:
        if self._armed is not None and id(parameter) not in self._armed.ids:
            self._strays[id(parameter)] = parameter
            self._armed.note_stray()

    def _look_closer(self, averager: GradientAverager, weight: float, others: list[torch.Tensor]) -> bool:
        """One rank has missed parameters, or reached others that no optimizer is known to own: find out, and average those.

        Returns:
            Whether the set does not fit any more.
        """
        others = [p for p in others if id(p) not in self._strays]
        mine = (averager.missed, averager.misfits, [(tuple(p.shape), p.dtype) for p in others])
        told = self._group.share(ASTRAY, mine, range(self._group.world.size)).values()
        averager.drop(frozenset.intersection(*(missed for missed, _, _ in told)))
        kinds: list[Any] = next((each for _, _, each in told if each), [])
        if any(each and each != kinds for _, _, each in told):
            raise RankMismatchError(
                f"the ranks have reached different new parameters in one backward, of shapes {[each for _, _, each in told]}. "
                "Give them to an optimizer, so that the ranks can tell which is which."
            )
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in others]
        grads = grads or [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
        *sums, weights = all_reduced([*grads, torch.tensor(weight, dtype=torch.float64)], self._group)
        for p, total in zip(others, sums, strict=False):
            p.grad = (total / weights.item()).to(p)
        self.unaveraged.note(others)
        return bool(kinds) or any(misfits for _, misfits, _ in told)

    def _average_strays(self, averager: GradientAverager, weight: float) -> None:
        """Average what this backward left in parameters outside of its set, and take them into the set."""
        owned = self._loop.once_owned()
        own = {number: p for number, p in owned.items() if id(p) in self._strays}
        have_sparse = [p.grad is not None and p.grad.is_sparse for p in own.values()]
        mine = dict(zip(own, zip(described(own.values()), have_sparse, strict=True), strict=True))
        told = self._group.share(STRAYS, mine, range(self._group.world.size))
        numbered = sorted({number: each for view in told.values() for number, each in view.items()}.items())
        trained = {number: p for number, p in owned.items() if p.requires_grad}  # DDP passes over those that are frozen on this rank
        strays = [self._averagers.own(number, each, trained) for number, (each, _) in numbered]
        sparse = averager.sparse.union(id(p) for p, (_, (_, is_sparse)) in zip(strays, numbered, strict=True) if is_sparse)
        grads = [torch.zeros_like(p) if p.grad is None or not weight else p.grad.to_dense() for p in strays]
        *sums, weights = all_reduced([*grads, torch.tensor(weight, dtype=torch.float64)], self._group)
        for p, total in zip(strays, sums, strict=True):
            average = (total / weights.item()).to(p)
            p.grad = average.to_sparse(1) if id(p) in sparse else average
        self._strays.clear()
        self.unaveraged.note(strays)
        extended = self._averagers.build([*averager.parameters, *strays], sparse, varies=True)
        for site in self._sites.values():
            if site.averager is averager and site.sync_point:
                site.averager, site.sync_point = extended, SyncPoint(BACKWARD, site.sync_point.place, extended.number)
        self._watch(trained.values())


def _keeps_graph(call: Backward) -> bool:
    """Whether another backward may follow that needs the same graph."""
    return bool(call.options.get("retain_graph") or call.options.get("create_graph"))


def _can_pickle(thing: Any) -> bool:
    try:
        pickle.dumps(thing)
    except Exception:
        return False
    return True
