"""Which parameters a backward averages: one set for each *site*, a line that calls ``backward``.

The set of a site is found at its first visit, by one walk over the graph. The set has every trainable parameter of each optimizer at work
that owns a parameter in the graph. It also has the other ``nn.Parameter`` objects in the graph, and tensors there that an optimizer has
had. Those made inside a training pass belong to a batch and are left out. Later steps only look the site up.

That is a prediction: a function that trains several models calls ``backward`` at one line. The optimizer that was used last is a part of
the site, and hooks stand on the parameters that some set lacks: none while there is one set. What a backward reaches outside of its set is
averaged before it returns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import or_
from types import CodeType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.checks.same_weights import Differ, checksums, take_rank_zeros
from parwrap.errors import LockstepError, RankMismatchError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.loop.losses import reached, reenters, sparsely_used
from parwrap.loop.modules import has_values
from parwrap.places import Place, call_site, codes_of, script_place, warn
from parwrap.ranks.agreement import agree, first_difference, first_other
from parwrap.ranks.group import Group
from parwrap.rows.tensors import Rows
from parwrap.strategies.compression import compressing
from parwrap.strategies.ddp_averager import GradientAverager, average_now
from parwrap.strategies.strategy import Loop

__all__ = ["Site", "Sites", "made_equal"]

MOST = 256
"""The number of sites that are kept; a further site replaces the one that was not used for longest."""


INNER = 3
"""How many frames are parwrap's between :meth:`Sites.find` and the script, at least: to look at a frame takes time."""


@dataclass
class Site:
    """A line that calls ``backward``, with the calls that lead to it and the optimizer that was used last.

    Attributes:
        parameters: the set of parameters whose gradients this line averages.
        averager: averages these gradients; ``None`` if the set is empty.
        kept: this averager, and those of sets that the site had before: the line may come back to them.
        generation: ``Optimizers.generation`` when the set was found.
        frozen: the frozen parameters of the optimizers at work when the set was found; none if the call names its ``inputs``.
        then_average: whether gradients are averaged after the backward, because other backwards run inside of it.
        place: the line.
        shown: the line as errors show it.
        codes: the code objects of the calls, kept alive because their ids identify the site.
    """

    averager: GradientAverager | None
    kept: list[GradientAverager]
    parameters: list[torch.Tensor]
    generation: int
    frozen: tuple[torch.Tensor, ...]
    then_average: bool
    place: Place
    shown: str
    codes: tuple[CodeType, ...]


class Sites:
    """The sites of a loop and the averagers of their sets.

    Args:
        loop: the state of the running loop.
        new_set: called when a set is averaged for the first time.

    Attributes:
        leaves_out: a function that returns whether torch shards a parameter, which then belongs to no set.
        arrived: parameters outside of the set of their backward that have got a gradient since :meth:`grow` was last called.
    """

    def __init__(self, loop: Loop, new_set: Callable[[], None]) -> None:
        self._loop, self._new_set = loop, new_set
        self.leaves_out: Callable[[torch.Tensor], bool] = lambda parameter: False
        self._sites: dict[tuple[int, ...], Site] = {}  # the one used last is the last
        self._averagers: dict[tuple[Any, ...], GradientAverager] = {}
        self._hooks: list[Any] = []
        self._bare: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._running: GradientAverager | None = None
        self._known: frozenset[int] = frozenset()  # the ids of the parameters in any set
        self._armed = self._known  # the ids of those whose gradients the running backward averages
        self._met = 0
        self.arrived: list[torch.Tensor] = []

    def find(self, call: Backward) -> Site:
        """Return the site of ``call``. Find its set at the first visit, and again whenever the set may have changed."""
        optimizers, (call_key, frame) = self._loop.optimizers, call_site(sys._getframe(INNER))
        key = (*call_key, optimizers.active)
        site = self._sites.pop(key, None)
        if (
            site is None
            or site.generation != optimizers.generation
            or not optimizers.were_built
            or "inputs" in call.options
            or (site.frozen and any(p.requires_grad for p in site.frozen))
        ):
            site = self._found(call, codes_of(frame))
        if site.averager is not None:  # else the next backward at this line is looked at again: nothing would say that it reaches more
            self._sites[key] = site
        if len(self._sites) > MOST:
            del self._sites[next(iter(self._sites))]
        self._running, self._armed = site.averager, site.averager.ids if site.averager is not None else frozenset()
        if self.arrived:
            self.arrived[:] = [p for p in self.arrived if id(p) not in self._armed]
        return site

    def runs_locally(self) -> None:
        """Called before a backward that averages nothing, inside ``no_sync``: later backwards average what any set has."""
        self._armed = self._known

    def _found(self, call: Backward, codes: tuple[CodeType, ...]) -> Site:
        generation = self._loop.optimizers.generation
        parameters, frozen, then_average = self._parameters(call)
        place = script_place()
        site = Site(None, [], parameters, generation, frozen, then_average, place, str(place), codes)
        if parameters:
            self._arm(site, parameters, call)
        return site

    def _arm(self, site: Site, parameters: list[torch.Tensor], call: Backward) -> None:
        """Let ``site`` average the gradients of ``parameters``."""
        averager, re_enters = self._averagers.get(_key(parameters)), False
        is_new = averager is None
        if averager is None:
            averager, re_enters = self._agreed(parameters, call)
        site.averager, site.parameters = averager, parameters
        site.kept = [*(each for each in site.kept if each is not averager), averager]
        site.then_average |= re_enters
        if is_new or "inputs" not in call.options:
            self._drop_unused(site)
            self._watch()

    def leaves(self, call: Backward) -> list[torch.Tensor]:
        """The parameters and other leaves that ``call`` reaches."""
        return reached(call.roots)

    def elsewhere(self, parameter: torch.Tensor) -> Callable[[], bool] | None:
        """A function that says whether a backward has reached ``parameter``, if torch averages its gradient, as in FSDP; else ``None``."""

    def _parameters(self, call: Backward) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...], bool]:
        """Find the set of parameters of ``call``.

        Returns:
            The set, the frozen parameters of all optimizers, which may be reached once they train, and whether ``call`` runs other
            backwards inside.
        """
        optimizers = self._loop.optimizers
        leaves = [leaf for leaf in self.leaves(call) if leaf.requires_grad and has_values(leaf) and not isinstance(leaf, Rows)]
        re_enters, whole = reenters(call.tensors), self._loop.options().batch == "whole"
        if "inputs" in call.options:
            owned = [leaf for leaf in leaves if whole or isinstance(leaf, nn.Parameter) or optimizers.has_had(leaf)]
            return [leaf for leaf in owned if not optimizers.of_batch(leaf)], (), re_enters
        sets, owners = optimizers.sets(), optimizers.owners()
        found = [leaf for leaf in leaves if id(leaf) in owners]
        if not found and re_enters:  # all of it is inside a checkpoint, which hides its leaves
            found = [p for parameters in sets.values() for p in parameters]
        others = [leaf for leaf in leaves if id(leaf) not in owners and not optimizers.of_batch(leaf)]
        if optimizers.were_built:
            shared = [whole or isinstance(leaf, nn.Parameter) or optimizers.has_had(leaf) for leaf in others]
            self._note_bare(leaf for leaf, is_shared in zip(others, shared, strict=True) if not is_shared)
            others = [leaf for leaf, is_shared in zip(others, shared, strict=True) if is_shared]
        ids = {id(leaf) for leaf in chain(found, others)}
        self._loop.modules.reached(leaf for leaf in leaves if id(leaf) in ids)
        if optimizers.were_built and (found or others):
            found, (re_enters,) = self._on_any_rank("agreement on what a backward reaches", [*found, *others], re_enters)
        else:
            found = others
        frozen = tuple(p for parameters in optimizers.sets().values() for p in parameters if not p.requires_grad)
        return [p for p in found if p.is_floating_point() or p.is_complex()], frozen, re_enters

    def _on_any_rank(self, kind: str, reached: list[torch.Tensor], *flags: bool) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        """Find the parameters to average if this rank's backward has ``reached`` some, and those of other ranks have reached others.

        If a rank has reached a parameter of an optimizer, these are all parameters that it trains. Optimizers, and parameters that none
        owns, are found by their numbers, which are the same on all ranks. All ranks call this in the same backward.

        Returns:
            The parameters, and whether each of ``flags`` is true on any rank.

        Raises:
            LockstepError: the ranks are in different backwards.
        """
        optimizers, modules, backward = self._loop.optimizers, self._loop.modules, self._loop.passes.backwards
        numbered, owners = modules.trainable(self.leaves_out), optimizers.owners()
        idle = {id(p): number for number, parameters in optimizers.idle_sets().items() for p in parameters}
        number_of = {id(p): number for number, p in numbered.items()}
        used = {owners[id(p)] for p in reached if id(p) in owners}
        singles = {number_of[id(p)] for p in reached if id(p) not in owners and id(p) in number_of}
        rest = [p for p in reached if id(p) not in owners and id(p) not in number_of]
        used |= {idle[id(p)] for p in rest if id(p) in idle}

        def error(all_ranks: list[Any]) -> Exception | None:
            backwards = [each[0] for each in all_ranks]
            if len(set(backwards)) == 1:
                return None
            rank, other = first_other(backwards)
            return LockstepError(
                f"{next((name for *_, name in all_ranks if name), 'a parameter')} has got a gradient outside of the set of the backward at "
                f"{script_place()} on some ranks only: rank 0 is in backward {backwards[0] + 1}, rank {rank} in backward {other + 1}. Its "
                "gradient cannot be averaged. Let all ranks compute the same losses: decide with parwrap.any_rank(condition)."
            )

        mine = backward, sorted(used), sorted(singles), flags
        name = modules.name_of(reached[0]) if reached else ""
        all_ranks = agree(self._loop.group, kind, crc32(repr(mine).encode()), lambda: (*mine, name), error)
        for _, *theirs, _ in all_ranks or ():
            used, singles, flags = used.union(theirs[0]), singles.union(theirs[1]), tuple(map(or_, flags, theirs[2]))
        optimizers.use(used)
        sets, owners = optimizers.sets(), optimizers.owners()
        owned = [p for number in sorted(used) for p in sets.get(number, ()) if owners[id(p)] == number]
        owned = [p for p in owned if p.requires_grad and p.is_leaf and has_values(p)]
        beside = [p for p in rest if id(p) not in owners]
        found = [*owned, *(numbered[number] for number in sorted(singles) if number in numbered), *beside]
        return list({id(p): p for p in found}.values()), flags

    def _agreed(self, parameters: list[torch.Tensor], call: Backward) -> tuple[GradientAverager, bool]:
        """Make the averager of a new set, once all ranks agree on the set and have equal weights.

        Returns:
            The averager, and whether to average after the backward, because it runs other backwards inside it on some rank.
        """
        loop, group = self._loop, self._loop.group
        parameters = loop.modules.in_order(parameters)
        shapes = [(tuple(p.shape), str(p.dtype)) for p in parameters]
        numbers = loop.modules.numbers_of(parameters)
        self._met += 1  # sets of the same shapes, such as two critics, have different numbers
        kind, digest = "agreement on the parameters of a backward", crc32(repr((self._met, shapes, numbers)).encode())
        all_ranks = agree(group, kind, digest, lambda: (shapes, numbers), _different_sets)
        if all_ranks is not None and _in_other_order(all_ranks):
            loop.modules.order_differs = True
            parameters = loop.modules.in_order(parameters)
        number = crc32(repr((self._met, [tuple(p.shape) for p in parameters])).encode())
        own = [p for p in parameters if self.elsewhere(p) is None]
        sparse = sparsely_used(call.tensors)
        facts = [reenters(call.tensors), *(id(p) in sparse for p in own)]
        re_enters, *is_sparse = made_equal(group, own, facts, because=loop.modules.renormed)
        options = loop.options()
        averager = GradientAverager(
            group,
            number,
            own,
            frozenset(id(p) for p, flag in zip(own, is_sparse, strict=True) if flag),
            loop.same_step.averages,
            self.arrived,
            {id(p): is_reached for p in parameters if (is_reached := self.elsewhere(p)) is not None},
            compressing(options),
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
        )
        self._averagers[_key(parameters)] = averager
        self._new_set()
        return averager, bool(re_enters)

    # parameters in no set

    def _note_bare(self, leaves: Iterable[torch.Tensor]) -> None:
        """Watch leaves that no optimizer owns, and warn of those that the script trains by hand.

        A leaf is trained by hand if it gets another gradient in a later step and batch, and its values have changed.
        """
        loop, place = self._loop, script_place()
        batch, steps = loop.passes.batches, loop.optimizers.steps

        def arrived(leaf: torch.Tensor) -> None:
            if steps == loop.optimizers.steps or (batch == loop.passes.batches and loop.passes.training):
                return
            before, handle = self._bare[leaf]
            handle.remove()
            if not torch.equal(before, checksums([leaf])) and not loop.optimizers.trains_in_batch(leaf):
                warn(
                    f"parwrap: the backward at {place} does not average the gradient of a tensor of shape {tuple(leaf.shape)} that the "
                    "script changes by hand. The tensor is no nn.Parameter and no optimizer has it, so each rank trains its own. To "
                    "average the gradient, write nn.Parameter(tensor)."
                )

        for leaf in leaves:
            if leaf not in self._bare:
                self._bare[leaf] = checksums([leaf]), leaf.register_post_accumulate_grad_hook(arrived)

    def _watch(self) -> None:
        """Add hooks that note a gradient outside of the set of its backward, on all parameters that some set lacks."""
        self.unwatch()
        sets = [averager.ids for averager in self._averagers.values()]
        self._known, in_all = frozenset().union(*sets), frozenset.intersection(*sets)
        optimizers = self._loop.optimizers
        others = self._loop.modules.trainable(self.leaves_out).values() if optimizers.were_built else ()
        for p in {id(p): p for p in chain(*optimizers.sets().values(), *optimizers.idle_sets().values(), others)}.values():
            if p.requires_grad and p.is_leaf and has_values(p) and id(p) not in in_all and self.elsewhere(p) is None:
                self._hooks.append(p.register_post_accumulate_grad_hook(self._arrived))

    def _arrived(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._armed:
            self.arrived.append(parameter)

    def unwatch(self) -> None:
        """Remove the hooks of :meth:`_watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove all hooks, and drop all sets."""
        self.unwatch()
        for _, hook in self._bare.values():
            hook.remove()
        self.moved()

    def grow(self, site: Site, call: Backward) -> None:
        """After a backward that has reached parameters outside of the set of ``site``, average their gradients.

        It is enough that one rank has reached them. The site keeps its set, with these parameters, if a rank has reached the set too. If
        none has, the line trains another model now, and the site gets its set.
        """
        assert site.averager is not None
        arrived = list(self.arrived)
        self.arrived.clear()
        try:
            re_enters = reenters(call.tensors)  # then its graph hides leaves
            is_reached = re_enters or any(id(leaf) in site.averager.ids for leaf in self.leaves(call))
            found, (re_enters, is_reached) = self._on_any_rank("a set of parameters that grows", arrived, re_enters, is_reached)
        except LockstepError as error:
            if not arrived or (name := self._loop.modules.name_of(arrived[0])) in str(error):
                raise
            raise LockstepError(f"{name} has got a gradient outside of the set of the backward at {site.shown}, and {error}") from error
        new = [p for p in found if id(p) not in site.averager.ids and self.elsewhere(p) is None]
        if not new:  # on a GPU the other ranks say so a backward later
            return
        site.then_average |= re_enters
        if is_reached:
            site.kept.remove(site.averager)
            found = [*site.parameters, *new]
        self._arm(site, found, call)
        with self._loop.group.control_message("gradients outside of a set"):
            average_now(new, torch.tensor([float(p.grad is not None) for p in new], device=new[0].device), site.averager.sparse)

    def moved(self) -> None:
        """Drop all sets, so that they are found again: DDP's hooks are on the tensors that parameters had before a cast or move."""
        self._sites.clear()
        self._averagers.clear()
        self._running, self._armed = None, frozenset()

    def _drop_unused(self, site: Site) -> None:
        """Drop the averagers that neither ``site`` nor another site keeps."""
        used = {id(each) for kept in (site.kept, *(other.kept for other in self._sites.values())) for each in kept}
        self._averagers = {ids: averager for ids, averager in self._averagers.items() if id(averager) in used}

    def averagers(self) -> Iterable[GradientAverager]:
        """All averagers in use."""
        return self._averagers.values()


def _key(parameters: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """What an averager of ``parameters`` depends on: DDP's buckets have their shapes, and a cast or move drops DDP's hooks."""
    return tuple((id(p), p.shape, p.dtype, p.device) for p in parameters)


def made_equal(
    group: Group,
    parameters: Sequence[torch.Tensor],
    facts: Sequence[bool] = (),
    at: str = "backward",
    because: Callable[[torch.Tensor], str] = lambda p: "",
) -> list[int]:
    """Overwrite ``parameters`` with rank 0's values if they differ between ranks, and warn if they differ by more than rounding.

    All ranks call it with parameters of the same shapes.

    Args:
        group: the process group.
        parameters: the parameters.
        facts: truth values of this rank, which are sent with the check.
        at: the call that needs equal weights, for the warning: ``"backward"``, ``"forward"`` or ``"step"``.
        because: why a parameter differs again after each forward, if it does: then weights that differ are an error.

    Returns:
        For each of ``facts``, whether it is true on any rank.
    """
    sums = checksums(parameters).cpu()
    whole = int((sums * torch.arange(1, 2 * len(sums) + 1, 2)).sum()) % 2**62
    largest = torch.tensor([whole, -whole, *facts], dtype=torch.int64)
    with group.control_message(f"the weights at the first {at}"):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.control)
        most, least, *anywhere = largest.tolist()
        group.connect()
        differ = most != -least and take_rank_zeros(group, parameters) is Differ.MORE
    if differ and (why := next(filter(None, map(because, parameters)), "")):
        raise RankMismatchError(f"the weights of the ranks differ at their first {at}, because {why} ({script_place()}).")
    if differ:
        warn(
            f"parwrap: the weights of the ranks differ at their first {at}, so rank 0's are used on all. Build the model where all "
            "ranks draw the same: outside of training passes, or inside `with parwrap.same_draws():`. Weights that are computed from "
            "the first batch are those of rank 0's samples: gather the batch first, `torch.cat(parwrap.gather(x))`, to use all."
        )
    return anywhere


def _in_other_order(all_ranks: Sequence[tuple[list[Any], list[float]]]) -> bool:
    """Whether the ranks have the same parameters in another order, as of a ``set``, which Python orders by addresses."""
    ordered = [sorted(zip(numbers, shapes, strict=True)) for shapes, numbers in all_ranks]
    return max(all_ranks[0][1], default=0) < math.inf and all(each == ordered[0] for each in ordered)


def _different_sets(all_ranks: Sequence[tuple[list[Any], list[float]]]) -> RankMismatchError | None:
    shapes = [each for each, _ in all_ranks]
    if _in_other_order(all_ranks) or all(each == shapes[0] for each in shapes):
        return None
    _, mine, rank, theirs = first_difference(shapes, lambda each: f"one of shape {each[0]} and {each[1]}")
    return RankMismatchError(
        f"the ranks train different parameters in the backward at {script_place()}: {mine} on rank 0 and {theirs} on rank {rank}. Only "
        "gradients of parameters that all ranks train can be averaged. Build the same model on every rank, outside of training passes or "
        "inside `with parwrap.same_draws():`."
    )
