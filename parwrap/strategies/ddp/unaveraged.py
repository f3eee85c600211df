"""Averages gradients that no averaged backward pass has computed, just before they are used.

``torch.func.grad``, ``torch.autograd.grad`` and ``p.grad = ...`` bypass ``backward``, so each rank would step with its own gradients. An
averaged backward pass records its gradients. When an optimizer steps or gradients are clipped, all gradients that do not match the records
are averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from parwrap.coordination.call_site import location, warn, worth_a_look
from parwrap.errors import RankMismatchError
from parwrap.group.collectives import all_reduced, sums_of
from parwrap.group.group import Group, is_alone
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.scaler import ScalerCall
from parwrap.intercept.skipping import stepping
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.strategies.common.agreement import are_equal, halves
from parwrap.strategies.ddp.gradient_averager import Noted, note_gradients
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id
from parwrap.torch_private.tensors import version_of

__all__ = ["GRADIENTS", "Unaveraged"]

GRADIENTS = "use of gradients that backward() did not compute"

REPLACED = -1
"""Replaces the number of changes: the gradient is a tensor that no averaged backward has made."""

CLOSE = 1e-5
"""Relative difference below which gradients count as equal on all ranks; in half precision that of one rounding."""

Kinds = list[tuple[tuple[int, ...], torch.dtype]]
"""The shape and the dtype of each gradient."""


class Unaveraged(Interceptor):
    """Averages gradients that a script has made without an averaged backward.

    Args:
        group: the ranks.
        loop: what the training loop has done so far.
        leaves_out: whether to ignore the gradient of a parameter.

    Attributes:
        noted: the gradients that are the same on all ranks.
    """

    def __init__(self, group: Group, loop: Loop, leaves_out: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._group, self._loop, self._leaves_out = group, loop, leaves_out
        self.noted: Noted = {}
        self._generation = -1
        self._visits: Counter[int] = Counter()
        self._changed_in_place = self._warned = self._paused = False
        group.coordinator.answer(GRADIENTS, lambda detail, present: self._answer(present))

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that the gradients of ``parameters`` are the same on all ranks now."""
        self.look_for_parameters()
        note_gradients(parameters, self.noted)

    def look_for_parameters(self) -> None:
        """Forget the gradients of parameters that may be gone, once others exist."""
        if self._generation != self._loop.generation:
            self._generation = self._loop.generation
            self.noted.clear()

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note ``parameters`` after this rank has copied another rank's state.

        All ranks restart their count of uses, because this rank has used gradients less often.
        """
        self._visits.clear()
        self._changed_in_place = False
        self.note(parameters)

    def forget(self) -> None:
        """Forget all recorded gradients at the end of training."""
        self.noted.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not average gradients inside the block: they are averages already."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @intercepts
    def takes_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients before ``optimizer`` steps."""
        self._average_of(optimizer)

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that leaves averaged gradients, for the step that is about to begin."""

        def then_average() -> Any:
            loss = closure()
            for optimizer in stepping()[:1]:
                self._average_of(optimizer)
            return loss

        return then_average

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Average before clipping, so that the mean is clipped as in a single process."""
        self._average(clip.parameters)
        norm = clip.run()
        if is_alone():
            self.note(p for p in clip.parameters if id(p) in self.noted)  # a norm for the log, which changes nothing
        return norm

    @intercepts
    def use_scaler(self, call: ScalerCall) -> Any:
        """Average before the script's own scaler checks gradients, because all ranks must see non-finite values."""
        if call.optimizer is not None:
            self._average_of(call.optimizer)
        return call.run()

    def _average_of(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._loop.is_of_one_batch(optimizer):
            self._average(parameters_of(optimizer))

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients of ``parameters`` unless an averaged backward has made them.

        Raises:
            RankMismatchError: other ranks use other gradients, or continue without any.
        """
        if self._leaves_out:
            parameters = [p for p in parameters if not self._leaves_out(p)]
        changes = self._changes(parameters)
        if not changes or is_alone() or self._paused or self._group.coordinator.waits_for:  # it steps with the others when it answers them
            return
        if current_graph_task_id() != NO_GRAPH_TASK:
            return  # a step inside a backward, which Bypasses refuses
        if changes != REPLACED and not self._changed_in_place:
            # clipping and similar calls change them in place, alike on all ranks: that is checked ever more rarely
            self._visits[changes] += 1
            if not worth_a_look(self._visits[changes]):
                return
        present = self._group.coordinator.wait(GRADIENTS, answers_backwards=False)
        if self._take_means(parameters, present):
            self._changed_in_place |= changes != REPLACED
            self._loop.ran_backward()
            self._warn()
            self._loop.weights.check_kept()
        self.note(parameters)

    def _changes(self, parameters: Sequence[torch.Tensor]) -> int:
        """The number of in-place changes of gradients since they were noted, or ``REPLACED``."""
        changes = 0
        for p in parameters:
            grad = p.grad
            if grad is None:
                continue
            noted = self.noted.get(id(p))
            if noted is None or noted[0]() is not grad:
                return REPLACED
            changes += version_of(grad) - noted[1]
        return changes

    @torch.no_grad()
    def _take_means(self, parameters: Sequence[torch.Tensor], present: Sequence[int]) -> bool:
        """Replace the gradients of ``parameters`` by their means over the ranks.

        Whether the ranks' gradients were different.
        """
        kinds: Kinds = [(tuple(p.shape), p.dtype) for p in parameters]
        if len(present) < self._group.world.size:
            self._group.share(GRADIENTS, kinds, present)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() for p in parameters]
        means, some, different = self._means(kinds, grads, [p.grad is not None for p in parameters], 1.0)
        for p, mean, there in zip(parameters, means, some, strict=True):
            if not there:
                continue
            if p.grad is None or p.grad.is_sparse or p.grad.is_inference() or 0 in p.grad.stride():
                p.grad = mean.to(p).to_sparse(1) if p.grad is not None and p.grad.is_sparse else mean.to(p)
            else:
                p.grad.copy_(mean)  # it may be a view of one vector with all gradients
        return different

    def _answer(self, present: Sequence[int]) -> None:
        """Answer ranks that average their own gradients before a step, while this rank waits for something else."""
        kinds = next(iter(self._group.share(GRADIENTS, None, present).values()))
        nothing = [torch.zeros(shape, dtype=dtype, device=self._group.device) for shape, dtype in kinds]
        *_, different = self._means(kinds, nothing, [False] * len(kinds), 0.0)
        if different:
            self._loop.ran_backward()  # others have
        self._group.coordinator.miss()

    def _means(
        self, kinds: Kinds, grads: list[torch.Tensor], there: list[bool], counts: float
    ) -> tuple[list[torch.Tensor], list[bool], bool]:
        """The means of ``grads`` over the ranks, which of them any rank has, and whether they were different on different ranks.

        Args:
            kinds: the shapes and dtypes of the gradients.
            grads: this rank's gradients; zeros where it has none.
            there: which of them it has.
            counts: 1 on a rank that takes part, and 0 on one that only answers.
        """
        size, weight = self._group.world.size, counts * self._loop.weight
        factor = weight * self._loop.loss_factor
        facts = [*halves(kinds), counts, weight, float(counts > 0 and (weight, factor) != (1.0, 1.0))]
        *sums, present, weights, weighed = sums_of(facts, self._group)
        if not are_equal(sums, size):
            raise RankMismatchError(
                f"at {location()} rank {self._group.world.rank} uses gradients of {len(kinds)} parameters that backward() did not "
                "compute, but other ranks use such gradients of other parameters at the same time. Step the same optimizers in the same "
                "order on all ranks."
            )
        wide = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]  # a sum of halves overflows, or is rounded
        *means, some = all_reduced([*wide, torch.tensor(there, dtype=torch.float64)], self._group)
        means = [total / present for total in means]
        close = [max(CLOSE, torch.finfo(grad.dtype).eps) for grad in grads]
        alike = (torch.allclose(mean.to(own), own, rtol, 0.0, equal_nan=True) for mean, own, rtol in zip(means, wide, close, strict=True))
        differ = [counts > 0 and not each for each in alike]
        different = sums_of(differ, self._group)
        if weighed and any(different):
            # equal gradients on all ranks come from averages, and all count alike
            chosen = [place for place, each in enumerate(different) if each]
            totals = all_reduced([wide[place] * factor for place in chosen], self._group)
            for place, total in zip(chosen, totals, strict=True):
                means[place] = total / weights
        return means, [each > 0 for each in some.tolist()], any(different)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"parwrap: the gradients that {location()} uses were not computed by backward() (but by torch.func.grad, "
                "torch.autograd.grad, p.grad = ... or an in-place change) and differ between ranks. parwrap uses their mean over the "
                "ranks, here and everywhere else. This is shown once."
            )
