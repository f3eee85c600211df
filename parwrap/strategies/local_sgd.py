"""Local SGD and DiLoCo: each rank steps on its own gradients, and every few steps the ranks average their weights.

So ``backward`` leaves this rank's gradient and loss, and weights differ between ranks until they are averaged. (Stich, 2018,
https://arxiv.org/abs/1805.09767; with synchronous steps first: Lin et al., 2018, https://arxiv.org/abs/1808.07217; with an outer optimizer:
Douillard et al., 2023, https://arxiv.org/abs/2311.08105.)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.checks.same_weights import is_due
from parwrap.errors import RankMismatchError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.loop.modules import has_values
from parwrap.loop.optimizers import parameters_of
from parwrap.loop.passes import loss_factor
from parwrap.places import script_place, warn
from parwrap.ranks.agreement import agree_on
from parwrap.ranks.collectives import by_kind
from parwrap.ranks.group import is_alone
from parwrap.strategies.ddp import DDP
from parwrap.strategies.ddp_sites import made_equal
from parwrap.strategies.strategy import Loop, differing_parameter
from parwrap.torch_private.optimizer import stepping

__all__ = ["LocalSGD"]

LEAST = 1e-9
"""The least weight of a rank, so that the sum of all weights is never zero."""


@dataclass
class _Round:
    """The steps of one optimizer since the last average of its weights.

    Attributes:
        steps: the number of steps.
        weight: the sum, over these steps, of the mean weight of each step's batches.
        version: ``Optimizers.version`` of the optimizer when the ranks last compared its parameters.
        trained: the parameters that required gradients when the round began.
        before: the values of these parameters when the round began, equal on all ranks; only with an outer optimizer.
        velocity: the outer optimizer's momentum, for each parameter.
    """

    steps: int = 0
    weight: float = 0.0
    version: int = 0
    trained: set[torch.Tensor] = field(default_factory=set)
    before: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    velocity: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def begin(self, optimizer: Optimizer, outer: bool) -> None:
        self.steps, self.weight = 0, 0.0
        self.trained = {p for p in parameters_of(optimizer) if p.requires_grad and has_values(p)}
        self.before = {p: p.detach().to(_wide(p), copy=True) for p in self.trained} if outer else {}

    def outer_step(self, p: torch.Tensor, mean: torch.Tensor, lr: float, momentum: float) -> torch.Tensor:
        """Return the value of ``p`` after a step of the outer optimizer: SGD with Nesterov momentum, as in torch.

        ``mean`` is the mean of ``p`` over the ranks. The gradient is the value when the round began, minus ``mean``.
        """
        if (before := self.before.get(p)) is None:  # it was frozen when the round began
            return mean
        gradient = before - mean
        velocity = self.velocity[p] = momentum * self.velocity[p] + gradient if p in self.velocity else gradient
        return before - lr * (gradient + momentum * velocity)


class LocalSGD(DDP):
    """Averages weights every few steps of each optimizer, before evaluation and at the end. During the warmup it is DDP."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._rounds: weakref.WeakKeyDictionary[Optimizer, _Round] = weakref.WeakKeyDictionary()
        self._open: list[tuple[Optimizer, _Round]] = []  # kept alive: the script may drop an optimizer before the average
        self._batches: list[float] = []
        self._averages = 0
        self._stepped = False
        self._taken: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._warming = loop.options().warmup > 0
        self._weights.owned_only = not self._warming

    def _run(self, call: Backward) -> None:
        if self._warming:
            super()._run(call)
            return
        loop = self.loop
        if self._stepped:
            self._batches.clear()
            self._stepped = False
        weight = self._weight(call)
        self._batches.append(weight)
        loop.divisors.weigh(call)
        factor = loss_factor(weight, loop.group.world.size, loop.options(), loop.passes.reads_whole) if weight else 0.0
        call.times(factor).run()

    def graph_bucket(self) -> int | None:
        return super().graph_bucket() if self._warming else None

    # steps

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether a step of ``optimizer`` counts as a local step.

        A step does not count if one rank runs alone, if its optimizer belongs to a batch, or if it is a part of another step (Lookahead).
        """
        if is_alone() or self.loop.optimizers.is_of_batch(optimizer):
            return False
        ids = {id(p) for p in parameters_of(optimizer)} if len(around := stepping()[1:]) else set()
        return not any(id(p) in ids for each in around for p in parameters_of(each))

    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        if not self._warming and self._counts(optimizer):
            self._begin(optimizer)

    def _begin(self, optimizer: Optimizer) -> None:
        """Begin a round of ``optimizer``, if none is open; first average open rounds of other optimizers that share parameters with it."""
        current = self._rounds.setdefault(optimizer, _Round())
        if current.steps:
            return
        parameters = [p for p in parameters_of(optimizer) if has_values(p)]
        ids = set(map(id, parameters))
        self._average([each for each in self._open if any(id(p) in ids for p in parameters_of(each[0]))])
        if current.version != (version := self.loop.optimizers.version(optimizer)):
            current.version = version
            kinds = [(tuple(p.shape), str(p.dtype)) for p in parameters]
            agree_on(self.loop.group, "the first step of an optimizer", kinds, _different_weights)
            made_equal(self.loop.group, parameters, at="step")
        current.begin(optimizer, outer=self.loop.options().outer is not None)

    def stepped(self, optimizer: Optimizer) -> None:
        if not self._counts(optimizer):
            return
        if self._warming:
            self._weights.after_step(optimizer)
            self._warm(optimizer)
        else:
            self._count(optimizer)

    def left_out(self, optimizer: Optimizer) -> None:
        """After the warmup, count a step that this rank leaves out: other ranks may have taken theirs."""
        if not self._warming and self._counts(optimizer):
            self._begin(optimizer)
            self._count(optimizer)

    def _count(self, optimizer: Optimizer) -> None:
        self._weights.note(optimizer)  # even if this rank has left the step out: other ranks may have stepped
        current = self._rounds[optimizer]
        if not current.steps:
            self._open.append((optimizer, current))
        current.steps += 1
        current.weight += fmean(self._batches) if self._batches else 1.0
        self._stepped = True
        self.loop.same_step.passed(script_place())
        if current.steps >= self.loop.options().every:
            self._average([(optimizer, current)])

    def _warm(self, optimizer: Optimizer) -> None:
        """Count a step of the warmup, which ends for all optimizers when one has taken enough steps.

        Optimizers with the same first parameter, such as one built anew, share their count.
        """
        first = next(parameters_of(optimizer))
        self._taken[first] = self._taken.get(first, 0) + 1
        if self._taken[first] >= self.loop.options().warmup:
            self._warming, self._weights.owned_only = False, True
            self._sites.close()

    # averages

    @torch.inference_mode(False)
    @torch.no_grad()
    def _average(self, rounds: Sequence[tuple[Optimizer, _Round]]) -> None:
        """Average the weights of the optimizers in ``rounds``, each rank weighted by the samples of its steps, and end these rounds."""
        if not rounds:
            return
        group, options = self.loop.group, self.loop.options()
        changed = [
            (p, each)
            for optimizer, each in rounds
            for p in parameters_of(optimizer)
            if (p.requires_grad and has_values(p)) or p in each.trained
        ]
        self._agree("an average of weights", [(tuple(p.shape), str(p.dtype)) for p, _ in changed], _different_weights)
        mine = {id(each): max(each.weight / each.steps, LEAST) for _, each in rounds}
        totals = torch.tensor(list(mine.values()), dtype=torch.float64)
        with group.control_message("an average of weights"):
            dist.all_reduce(totals, group=group.control)
            total_of = dict(zip(mine, totals.tolist(), strict=True))
            for same in by_kind(changed, lambda each: (_wide(each[0]), each[0].device)).values():
                flat = torch.cat([_times(p.detach().to(_wide(p)), mine[id(each)]).reshape(-1) for p, each in same])
                dist.all_reduce(flat)
                for (p, each), total in zip(same, flat.split([p.numel() for p, _ in same]), strict=True):
                    mean = (total / total_of[id(each)]).view(p.shape)
                    p.copy_(each.outer_step(p, mean, options.outer_lr, options.outer_momentum) if options.outer else mean)
        for optimizer, each in rounds:
            each.begin(optimizer, outer=False)
        self._open = [each for each in self._open if each[1].steps]
        self._averages += 1
        if not self._open and is_due(self._averages):
            self._weights.check()

    def begins_pass(self, trains: bool) -> None:
        """Before a pass that does not train, average the weights of open rounds, compare them, and send rank 0's buffers.

        Before a training pass, compare the weights only if no round is open.
        """
        if not trains and not is_alone():
            self._average(self._open)
        if not trains or not self._open:
            super().begins_pass(trains)

    def set_mode(self, module: nn.Module, training: bool) -> None:
        if not training and not is_alone() and self.loop.optimizers.evaluate():
            self._average(self._open)
        super().set_mode(module, training)

    def end(self) -> None:
        self._average(self._open)
        if self.loop.passes.backwards and not self.loop.optimizers.steps:
            warn(
                "parwrap: no optimizer of torch.optim has stepped, but strategy='local_sgd' averages only the parameters of optimizers "
                "that step, so it has averaged no weights. To average gradients in every backward, use strategy='ddp'."
            )
        super().end()


def _wide(p: torch.Tensor) -> torch.dtype:
    """The dtype in which ``p`` is averaged: at least single precision."""
    return torch.promote_types(p.dtype, torch.float32)


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else tensor * factor


def _different_weights(all_ranks: Sequence[Any]) -> RankMismatchError:
    return RankMismatchError(
        f"the ranks step different parameters: {differing_parameter(all_ranks)}. Only weights that all ranks step can be averaged: build "
        "the same model and optimizer on every rank."
    )
