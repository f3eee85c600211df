"""One set of parameters whose gradients are averaged while a backward runs.

The reducer is armed just before the backward; torch's hooks then average and overlap as usual. ``call_sites.py`` decides which parameters
belong to which backward, and ``recovery.py`` what follows from a report.

It averages one more parameter, the *signal*: its gradient holds the ranks' reports to each other, so they travel within the buckets and
cost no collective. It comes last in every backward, so only its own bucket waits for it, and it can report events of the backward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import nn

from parwrap.errors import UsageError
from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.loop.autograd_graph import reached
from parwrap.strategies.common.reducer import Reducer
from parwrap.strategies.common.share import Share
from parwrap.strategies.common.training_buffers import TrainingBuffers
from parwrap.strategies.ddp.empty_gradients import send_nothing, send_nothing_once
from parwrap.torch_private.distributed import check_reducer_finalized, has_rebuilt_buckets
from parwrap.torch_private.tensors import foreach_mul_, version_of

__all__ = ["GradientAverager", "Noted", "Reported", "divide", "has_timed_out", "note_gradients"]

WEIGHT, UNEXPECTED, STALE_SET, FAILED, BUFFERS, ASKS = -6, -5, -4, -3, -2, -1
"""The entries behind the flags that say which parameters this rank's loss reaches: this rank's weight in the average; whether gradients
came outside of the set; whether the set is stale, since this rank's losses now reach others; whether its backward has raised; whether
buffers have changed; whether the ranks must agree on which."""

EXACT = 1e-4
"""Weights whose mean is this close to 1 are complete: less than the share of one rank in thousands, and more than float32 rounding."""

NONE: frozenset[int] = frozenset()

TIMED_OUT = "Timed out waiting"
"""Gloo's message about a rank that has sent nothing within the timeout."""

T = TypeVar("T")

Noted = dict[int, tuple[ref[torch.Tensor], int]]
"""Gradients by the id of the parameter, each with its version."""


class Reported(NamedTuple):
    """What at least one rank has reported in a backward."""

    unexpected: bool = False
    stale_set: bool = False
    failed: bool = False
    buffers: bool = False
    asked: bool = False


class _OnTheWay:
    """Numbers that a GPU sends to the host, which waits for them only when it reads them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers, self._sent = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True), torch.cuda.Event()
        self._numbers.copy_(numbers, non_blocking=True)
        self._sent.record()

    def read(self) -> list[float]:
        self._sent.synchronize()
        return self._numbers.tolist()


class GradientAverager:
    """Averages the gradients of ``parameters`` over the ranks in each backward that it runs.

    Args:
        group: the process group.
        number: identifies the averager on all ranks.
        parameters: the leaf tensors, in the order in which the forward uses them; the same on every rank.
        sparse: the ids of those that get sparse gradients.
        varies: whether some backward passes reach only part of the parameters.
        models: the outermost modules around the parameters.
        of_one_batch: a function that returns the ids of tensors that each rank trains by itself.
        options: for the ``Reducer``, such as ``bucket_cap_mb``.

    Raises:
        UsageError: they are on the CPU and on GPUs.

    Attributes:
        missed: the positions of the parameters that this rank's last backward unexpectedly did not reach.
        is_stale: whether the last backward has shown that the set is stale: it reaches others, or some are frozen.
        at_once: whether reports must be read at the end of each backward, also on a GPU.
        buffers: the buffers of the models around the parameters.
        buffers_move: whether some change in training, as the ranks have agreed.
        error: the exception of this rank's last backward.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        parameters: Sequence[torch.Tensor],
        sparse: frozenset[int],
        varies: bool,
        models: Iterable[nn.Module] = (),
        of_one_batch: Callable[[], Collection[int]] = frozenset,
        **options: Any,
    ) -> None:
        self._of_one_batch = of_one_batch
        self.missed = self._without = NONE
        self.is_stale = self.at_once = self.buffers_move = self._has_report = False
        self.error: Exception | None = None
        self.number, self.parameters = number, tuple(parameters)
        self.ids = frozenset(id(p) for p in self.parameters)
        self._group, self.sparse, self._varies = group, sparse, varies
        # of the first parameter's dtype if possible: its bucket is the last, and so is the signal; in half precision one missing rank among
        # 16 would look like rounding, so there the signal has a bucket to itself
        like = next((p for p in self.parameters if id(p) not in sparse and p.dtype.is_floating_point), None)
        dtype, device = (torch.float32, group.device) if like is None else (torch.promote_types(like.dtype, torch.float32), like.device)
        self._sent_weight, self._sent_buffers = 1.0, False
        self._on_the_way: _OnTheWay | None = None
        if len(kinds := {p.device.type for p in self.parameters}) > 1:
            raise UsageError(
                f"a backward leaves gradients of parameters on {' and '.join(sorted(kinds))}, and torch's DistributedDataParallel averages "
                "those of one kind of device. Move the whole model to one: model.to('cuda')."
            )
        self._facts = facts = torch.ones(len(self.parameters) - WEIGHT, dtype=dtype, device=device)
        facts[UNEXPECTED:] = 0
        self._signal = nn.Parameter(torch.zeros_like(facts))
        self._signal.register_hook(lambda grad: facts.clone())
        # autograd takes the nodes of one device in the order of age, the newest first, and counts separately in each thread
        self._root = _in_new_thread(self._signal.sum)
        dense = [p for p in self.parameters if id(p) not in sparse]
        ordered = [*(p for p in self.parameters if id(p) in sparse), self._signal, *dense]
        self.buffers = TrainingBuffers(group, self.parameters, models)
        self._reducer = Reducer(ordered, sparse, self._signal, **options)

    def note_buffers(self) -> None:
        """In the next backward, report whether buffers have changed on this rank."""
        changed = self.buffers.known and self.buffers.changed()
        if changed or self._sent_buffers:
            self._sent_buffers = changed
            self._facts.data[BUFFERS] = changed
            self._facts.data[ASKS] = changed and self.buffers.asks()
        if changed:
            self._group.coordinator.notify()

    def run(self, call: Backward, weight: float) -> None:
        """Run the backward ``call`` and leave the averages in ``.grad``; :meth:`reported` finishes if a rank has reported something.

        Args:
            call: a backward of a loss already multiplied by ``weight``.
            weight: the weight of this rank; 1 if all are equal.
        """
        self._set_facts(call, weight)
        self._arm()
        try:
            call.with_root(self._root, self._signal).run()
        except Exception as error:
            if has_timed_out(error) or _has_lost_rank(error):
                raise
            self._report_error(error)
            self._complete(error)
            return
        if not self._has_finished():
            self._send_nothing_for_the_rest(call)

    def reported(self) -> Reported:
        """Divide by the sum of weights rather than by the number of ranks, and read the reports."""
        if self._is_read_later():
            return self._reported_later()
        weight, unexpected, stale_set, failed, buffers, asked = self._received()[WEIGHT:].tolist()
        if weight and abs(weight - 1) > EXACT and not failed:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.data.mul_(1 / weight)
        if unexpected or stale_set or failed:
            self._forget()
        return Reported(unexpected > 0, stale_set > 0, failed > 0, buffers > 0, asked > 0)

    def _set_facts(self, call: Backward, weight: float) -> None:
        """Set this rank's report before the backward; ``.data``, because autograd may hold that of the last one."""
        facts = self._facts.data
        if self._varies:
            leaves = {id(leaf) for leaf in (*reached(call.roots), *call.existing_grads)}
            facts[:WEIGHT] = facts.new_tensor([id(p) in leaves for p in self.parameters])
        if self._sent_weight != weight:
            facts[WEIGHT] = self._sent_weight = weight
        if weight != 1.0 or self._has_report:
            self._group.coordinator.notify()
        self._signal.grad = None
        self.missed = self._without = NONE
        self.is_stale, self.error = False, None

    def _arm(self) -> None:
        """Make the reducer expect every parameter in the next backward."""
        if has_rebuilt_buckets(self._reducer):
            # does what remains of DDP's forward then, 40 us faster
            self._reducer.reducer.prepare_for_forward()
            self._reducer.reducer.prepare_for_backward([])
        else:
            with torch.enable_grad():
                self._reducer()

    def _has_finished(self) -> bool:
        """Whether every parameter has taken part in the finished backward."""
        try:
            check_reducer_finalized(self._reducer.reducer)
        except RuntimeError:
            return False
        return True

    def _received(self) -> torch.Tensor:
        """The reports of the backward; it always reaches the signal."""
        return cast(torch.Tensor, self._signal.grad)

    def _is_read_later(self) -> bool:
        return self._facts.is_cuda and not self.at_once

    def _reported_later(self) -> Reported:
        """The same for a GPU, which the host must not wait for: it divides on the device, and reads reports a step later."""
        facts = self._received()
        divide([p.grad.data for p in self.parameters if p.grad is not None], facts[WEIGHT])
        before, self._on_the_way = self._on_the_way, _OnTheWay(facts[UNEXPECTED:])
        if before is None:
            return Reported()
        unexpected, stale_set, failed, buffers, asked = before.read()
        if unexpected or stale_set or failed:
            self._forget()
        if unexpected or stale_set or failed or buffers:
            self._on_the_way = None
        # a rank that failed has missed a step, which cannot be undone
        return Reported(unexpected > 0, stale_set + failed > 0, buffers=buffers > 0, asked=asked > 0)

    def _forget(self) -> None:
        """Clear this rank's report, because all ranks have read it."""
        self._facts.data[UNEXPECTED:BUFFERS] = 0
        self._has_report = False

    def note_unexpected(self) -> None:
        """Report a gradient outside of the set, in the running backward pass."""
        self._facts.data[UNEXPECTED] = 1
        self._group.coordinator.notify()

    def note_stale_set(self) -> None:
        """Mark the set as stale, because this rank's losses now reach other parameters. The next backward pass reports it."""
        self._facts.data[STALE_SET] = 1
        self._has_report = True

    def others(self, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters among ``leaves`` that are not in the set, though ranks share them."""
        outside = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in self.ids]
        of_one_batch = self._of_one_batch() if outside else ()
        return [leaf for leaf in outside if id(leaf) not in of_one_batch]

    def drop(self, unused: Collection[int]) -> None:
        """Drop the gradients of parameters that no rank has used, as in a single process; ``unused`` are positions."""
        for place in self._without.intersection(unused):
            self.parameters[place].grad = None

    def _unused(self) -> frozenset[int]:
        """The positions of the parameters that no rank has used, according to the reports."""
        flags = self._received()[:WEIGHT].tolist()
        return frozenset(place for place, flag in enumerate(flags) if not flag)

    def _send_nothing_for_the_rest(self, call: Backward) -> None:
        """Make parameters take part that this rank's loss did not reach, so that no rank waits for them."""
        leaves = {id(leaf): leaf for leaf in reached(call.roots)}
        held = {id(p) for p in call.existing_grads}
        rest = [(place, p) for place, p in enumerate(self.parameters) if id(p) not in leaves]
        missing = frozenset(place for place, p in rest if id(p) not in held)
        self._without = frozenset(place for place, p in rest if p.grad is None)
        self.is_stale = bool(self.others(leaves.values())) or any(not p.requires_grad for _, p in rest)
        if self.is_stale or (missing and not self._varies):
            self.missed = missing
            self._group.coordinator.diverge()
        if self.is_stale:
            self.note_stale_set()
        known, self._varies = self._varies, self._varies or bool(missing)
        self._send_nothing([p for _, p in rest])
        if known:
            self.drop(self._unused())

    def _send_nothing(self, parameters: Sequence[torch.Tensor], *roots: torch.Tensor) -> None:
        """Make ``parameters`` take part in a backward of ``roots`` without a gradient."""
        with self._group.coordinator.answering():  # the others may be in a layer that this rank does not reach in this backward
            send_nothing(parameters, self.sparse, *roots)

    def _report_error(self, error: Exception) -> None:
        """Report ``error``, which this rank's backward pass has raised, in the same backward pass."""
        self.error = error
        self._facts.data[FAILED] = 1
        self._group.coordinator.notify()

    def _complete(self, error: Exception) -> None:
        """Send the missing buckets after this rank's backward pass has raised ``error``, so that no rank waits for them."""
        with self._group.coordinator.answering():  # the others may be in a layer that this rank has not reached
            for p in self.parameters:
                send_nothing_once((p,), self.sparse)
            completed = send_nothing_once((), self.sparse, self._root)
        if not completed:
            self.error = None
            raise error  # while it sends, or after it

    def stand_for(self, leaves: Iterable[torch.Tensor]) -> None:
        """Average ``leaves`` from now on, which the script created again instead of the parameters, in :meth:`run_then_average`."""
        new = tuple(leaves)
        if [p.shape for p in new] != [p.shape for p in self.parameters]:
            raise UsageError(
                f"a backward pass reached {len(new)} leaf tensors instead of {len(self.parameters)} of other shapes, so the ranks cannot "
                "match them. Make them nn.Parameters of an optimizer, or change them in place under torch.no_grad()."
            )
        self.parameters = new

    def run_then_average(self, call: Backward, weight: float) -> None:
        """Like :meth:`run`, for gradients that cannot go through a bucket, because they have a graph or arrive several times."""
        self._set_facts(call, weight)
        try:
            call.with_root(self._root, self._signal).run()
        except Exception as error:
            self._report_error(error)
            self._signal.grad = self._facts.clone()
        self._average()

    def _average(self) -> None:
        """Average the existing gradients, and the signal's, after a backward."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() for p in self.parameters]
        signal = self._received().detach()
        signal[:WEIGHT] = signal.new_tensor([p.grad is not None for p in self.parameters])  # a checkpoint may hide some of them
        with self._group.coordinator.answering():
            *sums, signal = all_reduced([*grads, signal], self._group)
        size = self._group.world.size
        self._signal.grad = signal.to(self._facts) / size
        unused = self._unused()
        for place, (p, total) in enumerate(zip(self.parameters, sums, strict=True)):
            average = (total / size).to(p)
            if place in unused:
                continue
            if id(p) in self.sparse:
                p.grad = average.to_sparse(1)
            elif p.grad is None:
                p.grad = average
            else:
                p.grad.data.copy_(average)

    def answer(self, share: Share) -> None:
        """Take part in the :meth:`run` of other ranks without a backward."""
        self._give(share)
        self._arm()
        self._send_nothing(self.parameters, self._root)
        self.drop(self._unused())
        self.missed = self._without

    def answer_then_average(self, share: Share) -> None:
        """Take part in the :meth:`run_then_average` of other ranks without a backward."""
        self._give(share)
        self._signal.grad = self._facts.clone()
        self._average()

    def _give(self, share: Share) -> None:
        """Contribute only ``share``: not even earlier gradients, which DDP would send."""
        given = [id(p) in share.gradients for p in self.parameters]
        self._facts.data[:UNEXPECTED] = self._facts.new_tensor([*given, share.weight])
        self._facts.data[BUFFERS], self._facts.data[ASKS] = 0, 1  # the others find out whose buffers they copy
        self._sent_buffers = True
        self._varies, self._sent_weight = True, share.weight  # the flags must be set again before this rank's next backward
        self._signal.grad, self.is_stale, self.error = None, False, None
        self._without = frozenset(place for place, is_given in enumerate(given) if not is_given)
        for p in self.parameters:
            p.grad = share.gradients.get(id(p))


def note_gradients(parameters: Iterable[torch.Tensor], noted: Noted) -> None:
    """Record which gradients ``parameters`` have, and how often each was changed in place."""
    for p in parameters:
        if (grad := p.grad) is not None:
            noted[id(p)] = ref(grad), version_of(grad)


def has_timed_out(error: BaseException) -> bool:
    """Whether another rank has not sent its part within the timeout of the process group."""
    return isinstance(error, RuntimeError) and TIMED_OUT in str(error)


def _has_lost_rank(error: Exception) -> bool:
    """Whether another rank has ended: there is nothing left to agree on."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ("closed by peer", "reset by peer", "Broken pipe"))


def divide(grads: Iterable[torch.Tensor], weight: torch.Tensor) -> None:
    """Divide ``grads`` by ``weight``, which stays on its device; a weight of 1 leaves every bit unchanged."""
    factor = torch.where(((weight - 1).abs() > EXACT) & (weight != 0), 1 / weight, torch.ones_like(weight))
    dense: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        if grad.is_sparse:
            grad.mul_(factor)
        else:
            dense.setdefault(grad.dtype, []).append(grad)
    for dtype, same in dense.items():  # a factor of another dtype would take one kernel for each
        foreach_mul_(same, factor.to(dtype))


def _in_new_thread(build: Callable[[], T]) -> T:
    """The result of ``build``, called in a context that is unaffected by the caller's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(build).result()
