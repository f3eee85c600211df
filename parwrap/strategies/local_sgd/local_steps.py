"""The steps of each rank since the ranks last held the same weights, and how they average the weights again.

Steps are counted for each optimizer, by its number, which is the same on all ranks. ``local_sgd.py`` decides when to average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from parwrap.coordination.call_site import warn
from parwrap.group.collectives import all_reduced, sums_of
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.options import Options
from parwrap.strategies.common.agreement import Described, are_equal, described, halves
from parwrap.strategies.local_sgd.diloco import DiLoCo

__all__ = ["LocalSteps"]

COMPARED = "weights to compare before a first step"

Number = tuple[int, int]

AVERAGED = "weights to average"

LEAST = 1e-9
"""The least weight of a rank, so that the sum of all weights is never zero."""

Kinds = dict[Number, tuple[tuple[int, ...], torch.dtype]]
"""The shape and the dtype of each parameter."""


@dataclass
class _Own:
    """The local steps of one optimizer since the last average.

    Attributes:
        steps: the number of its steps.
        weight: the weight of their batches in the average.
        trained: the parameters that required gradients when the steps began.
    """

    steps: int = 0
    weight: float = 0.0
    trained: set[Number] = field(default_factory=set)


class LocalSteps:
    """The local steps of this rank.

    Args:
        group: the ranks.
        loop: the loop state, which numbers optimizers and parameters.
        options: the options of the innermost running function.
    """

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        self._group, self._loop, self._options = group, loop, options
        self._averaging, self._outer = _Averaging(group, loop, self._answered), DiLoCo()
        self._own: dict[int, _Own] = {}
        self._sizes: dict[int, int] = {}
        group.coordinator.answer(COMPARED, lambda detail, present: self._compare({}, present))

    def begin(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step of ``optimizer``: its first one since the last average begins new local steps."""
        if number in self._own and self._own[number].steps:
            return
        pending = {other for other, own in self._own.items() if own.steps}
        if pending and (pending := pending & self._loop.sharing(optimizer)):
            self._average(sorted(pending))  # the steps of an earlier optimizer of the same parameters
        parameters = {(number, place): p for place, p in enumerate(parameters_of(optimizer))}
        if self._sizes.get(number) != len(parameters):
            self._sizes[number] = len(parameters)
            trained = {which: p for which, p in parameters.items() if p.requires_grad}
            descriptions = dict(zip(trained, described(trained.values()), strict=True))
            self._compare(descriptions, self._group.synchronize(COMPARED))
            others = self._loop.sharing(optimizer) - {number}  # whose momenta do not belong to the new one
            self._outer.keep([which for which in self._loop.once_owned() if which[0] not in others])
        trained = {which: p for which, p in parameters.items() if p.requires_grad}
        self._own[number] = _Own(trained=set(trained))
        if self._options().outer:
            self._outer.begin(trained)

    def count(self, number: int, weight: float) -> None:
        """Count a step on a batch of this ``weight``, and average after enough steps."""
        own, every = self._own[number], self._options().every
        own.steps += 1
        own.weight += weight / every
        if own.steps >= every:
            self._average([number])

    def average(self) -> None:
        """Average the weights that this rank has changed since the last average."""
        if stepped := [number for number, own in self._own.items() if own.steps]:
            self._average(stepped)

    def average_at_end(self) -> None:
        """Average the weights when all ranks are together already, whether or not they have stepped."""
        self._take(self._averaging.means(self._trained(self._own), range(self._group.world.size)))

    @property
    def own(self) -> int:
        """The largest number of steps that an optimizer has taken on this rank since the last average."""
        return max((own.steps for own in self._own.values()), default=0)

    def state(self) -> Any:
        """The state that another rank continues from."""
        return self._own, self._sizes, self._outer.state(), self._averaging.backwards

    def load(self, state: Any) -> None:
        """Continue from the :meth:`state` of another rank, without its local steps."""
        own, self._sizes, outer, backwards = state
        self._averaging.others_backwards = backwards - self._loop.backwards
        self._own = {number: _Own(each.steps, 0.0, each.trained) for number, each in own.items()}
        self._outer.load(outer, self._group.device)

    def _answered(self, means: Mapping[Number, torch.Tensor], kept_up: bool) -> None:
        """Take ``means`` of ranks that averaged while this one skipped a step, for example in an overflow; else it has missed steps."""
        if kept_up and not any(number in self._own and self._own[number].steps for number, _ in means):
            self._take(means)
        else:
            self._group.coordinator.miss()

    def _average(self, numbers: Iterable[int]) -> None:
        present = self._group.synchronize(AVERAGED)
        self._take(self._averaging.means(self._trained(numbers), present))

    def _trained(self, numbers: Iterable[int]) -> dict[Number, float]:
        """The parameters that may have changed on this rank alone, with its weight for each."""
        trained = {which: own.weight for number in numbers if (own := self._own[number]).steps for which in own.trained}
        for (number, place), p in self._loop.once_owned().items():
            if p.requires_grad and number in numbers and (own := self._own[number]).steps:
                trained[number, place] = own.weight  # it was frozen when the steps began, or was added later
        return trained

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, means: Mapping[Number, torch.Tensor]) -> None:
        """Continue from ``means``, which are the same on all ranks; they may include parameters that only other ranks have stepped."""
        if not means:
            return
        parameters, options = self._loop.once_owned(), self._options()
        if options.outer:
            # parameters that this rank has not stepped are unchanged
            idle = {which for which in means if which[0] not in self._own or not self._own[which[0]].steps}
            self._outer.begin({which: parameters[which] for which in idle if which in parameters})
            means = self._outer.step(means, options.outer_lr, options.outer_momentum)
        for which, mean in means.items():
            p = parameters.get(which)
            if p is not None and p.shape == mean.shape:
                p.copy_(mean)
        for number in {number for number, _ in means}:
            self._own[number] = _Own()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compare(self, mine: Mapping[Number, Described], present: Sequence[int]) -> None:
        """Make the ranks begin with the same weights: those of the lowest rank, if they were built differently."""
        views = self._group.share(COMPARED, dict(mine), present)
        descriptions = {which: each for view in views.values() for which, each in view.items()}
        different = [which for which in sorted(descriptions) if len({view[which] for view in views.values() if which in view}) > 1]
        if not different:
            return
        warn(
            f"parwrap: {len(different)} of {len(descriptions)} parameters have different values on different ranks; rank "
            f"{min(present)}'s are used. Set the seed before you build the model, or build it inside the decorated function."
        )
        parameters = self._loop.once_owned()
        for which in different:
            source = min(rank for rank, view in views.items() if which in view)
            p = parameters.get(which)
            shape, dtype = views[source][which].kind
            same = p is not None and (tuple(p.shape), p.dtype) == (shape, dtype)
            values = p.detach().contiguous() if same else torch.zeros(shape, dtype=dtype, device=self._group.device)  # type: ignore[union-attr]
            dist.broadcast(values, source)
            if same:
                p.copy_(values)  # type: ignore[union-attr]


class _Averaging:
    """Averages the weights that ranks have trained separately, in few collectives.

    If all ranks take part, they check whether they trained the same parameters, and if so send all of them at once. Otherwise they first
    exchange which parameters each has trained. The caller decides when to average.

    Args:
        group: the ranks.
        loop: the loop state, which numbers the parameters.
        answered: a function, called when other ranks average while this rank waits for something else. It gets the means, and whether this
            rank has run at least as many backward passes as they have.

    Attributes:
        others_backwards: the number of backward passes of others whose result this rank has copied.
    """

    def __init__(self, group: Group, loop: Loop, answered: Callable[[dict[Number, torch.Tensor], bool], None]) -> None:
        self._group, self._loop, self._answered = group, loop, answered
        self.others_backwards = 0
        group.coordinator.answer(AVERAGED, lambda detail, present: self._answer(present))

    @property
    def backwards(self) -> int:
        """The number of backward passes that led to this rank's state."""
        return self._loop.backwards + self.others_backwards

    def means(self, trained: Mapping[Number, float], present: Sequence[int]) -> dict[Number, torch.Tensor]:
        """The means of all parameters that any rank has trained, in single precision or better.

        Args:
            trained: this rank's trained parameters, with its weight for each.
            present: the ranks that average; all of them call this.
        """
        parameters = self._loop.once_owned()
        mine: Kinds = {number: (tuple(p.shape), p.dtype) for number in sorted(trained) if (p := parameters.get(number)) is not None}
        everybodys = len(present) == self._group.world.size and self._same(mine)
        kinds = mine if everybodys else self._union(mine, present)[0]
        return self._means(kinds, {number: max(weight, LEAST) for number, weight in trained.items()})

    def _answer(self, present: Sequence[int]) -> None:
        kinds, backwards = self._union(None, present)
        if kinds:
            self._answered(self._means(kinds, {}), self.backwards >= backwards)

    def _same(self, mine: Kinds) -> bool:
        """Whether all ranks have trained the same parameters."""
        return are_equal(sums_of(halves(mine), self._group), self._group.world.size)

    def _union(self, mine: Kinds | None, present: Sequence[int]) -> tuple[Kinds, int]:
        """The parameters that any present rank has trained, in the same order on all ranks, and a rank's most backward passes."""
        gathered = self._group.share(AVERAGED, (mine or {}, self.backwards), present).values()
        kinds = {number: kind for each, _ in gathered for number, kind in each.items()}
        return dict(sorted(kinds.items())), max(backwards for _, backwards in gathered)

    def _means(self, kinds: Kinds, weights: Mapping[Number, float]) -> dict[Number, torch.Tensor]:
        if not kinds:
            return {}
        parameters, counts, leaves = self._loop.once_owned(), [], []
        for number, (shape, dtype) in kinds.items():
            p, wide = parameters.get(number), torch.promote_types(dtype, torch.float32)
            counts.append(weights.get(number, 0.0) if p is not None and tuple(p.shape) == shape else 0.0)
            if p is None or not counts[-1]:
                leaves.append(torch.zeros(shape, dtype=wide, device=self._group.device))
            else:
                leaves.append(p.detach().to(wide) * counts[-1] if counts[-1] != 1.0 else p.detach().to(wide))
        *sums, totals = all_reduced([*leaves, torch.tensor(counts, dtype=torch.float32)], self._group)
        return {number: total / count for number, total, count in zip(kinds, sums, totals.tolist(), strict=True)}
