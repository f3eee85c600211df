"""Averages the gradients of one set of parameters while a backward runs, with torch's ``DistributedDataParallel``.

DDP wraps a holder of the parameters instead of the user's model. DDP's forward would only arm its reducer: make it expect a gradient of
each parameter. So this file arms the reducer just before a backward; DDP's hooks in C++ then average buckets during the backward as usual.
``ddp_sites.py`` decides which parameters belong to which backward.

One more parameter, the *signal*, is averaged with them. Its gradient holds the numbers that ranks tell each other, so these travel in
the buckets and need no message. Autograd computes it last, so only its own bucket waits for it, and the numbers can describe this backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from parwrap.checks.same_step import GROWS, LOSS, LOSS_LOW, NUMBERS, Exchange
from parwrap.errors import LockstepError, UsageError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.places import script_place
from parwrap.ranks.device import current_stream, on_stream, to_host, uses_nccl
from parwrap.ranks.group import Group
from parwrap.torch_private.autograd import tensor_hooks
from parwrap.torch_private.distributed import has_rebuilt_buckets, unreached
from parwrap.torch_private.modules import registered_parameters
from parwrap.torch_private.tensors import version_of

__all__ = ["BUCKET_MB", "FIRST_BUCKET", "GradientAverager", "Hook", "average_now", "average_sparse"]

T = TypeVar("T")

Hook = Callable[[Any, dist.GradBucket], Future]
"""A communication hook of DDP: starts to send a bucket, and returns a future of its average over the ranks."""

FIRST_BUCKET, BUCKET_MB = 1024 * 1024, 25
"""DDP sends its first bucket at ``FIRST_BUCKET`` bytes, and any other at ``BUCKET_MB`` megabytes, unless ``bucket_cap_mb`` is set."""

SAME = 16
"""After so many backwards in a row that leave the same parameters out on all ranks, a GPU is not waited for to hear so again."""

TORCHS_BACKWARD = torch.autograd.backward
"""Torch's own function, which bypasses the patches of the script's calls."""


class GradientAverager:
    """Averages the gradients of ``parameters`` over the ranks in each backward that it runs.

    Args:
        group: the process group.
        number: identifies the set on all ranks.
        parameters: the leaf tensors, in the order of the model; the same on every rank.
        sparse: the ids of the parameters that get sparse gradients.
        at_end: called when a backward has reached its end, before it waits for the averages.
        outside: the parameters outside of the set that the running backward has reached so far.
        others: the ids of parameters of the set whose gradients something else averages, each with a function that returns whether the
            backward has reached it.
        sender: called with the signal, the parameter whose gradient carries this rank's numbers; returns the hook that compresses and
            sends buckets. With ``None``, buckets are sent uncompressed.
        options: for ``DistributedDataParallel``: ``bucket_cap_mb`` and ``gradient_as_bucket_view``.

    Raises:
        UsageError: some parameters are on the CPU and others on a GPU.

    Attributes:
        ids: the ids of ``parameters``.
        sparse: the ids of the parameters that get sparse gradients.
        broken: the error that a backward has raised, as text, or ``None``.
        has_local: whether ``.grad`` may hold gradients of ``with parwrap.no_sync()`` that no backward has averaged yet.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        parameters: Sequence[torch.Tensor],
        sparse: frozenset[int],
        at_end: Callable[[], None],
        outside: Sequence[torch.Tensor] = (),
        others: Mapping[int, Callable[[], bool]] = MappingProxyType({}),
        sender: Callable[[torch.Tensor], Hook] | None = None,
        **options: Any,
    ) -> None:
        if len(kinds := {p.device.type for p in parameters}) > 1:
            raise UsageError(
                f"the backward at {script_place()} leaves gradients on {' and '.join(sorted(kinds))}, but torch's DistributedDataParallel "
                "averages gradients on one kind of device only. Move the whole model to one device: model.to('cuda')."
            )
        self.parameters, self.number, self.sparse, self._others = tuple(parameters), number, sparse, others
        self._at_end, self._outside = at_end, outside
        self.ids = frozenset(map(id, self.parameters))
        self.has_local = True  # a backward inside ``no_sync`` may have come before the first one of this set
        self.broken: str | None = None
        # the signal has the dtype of the first parameter, to share its bucket, which is the last; but half precision could not tell one
        # missing rank among 16 from rounding, so for half precision the signal is float32 and has a bucket to itself
        like = next((p for p in self.parameters if id(p) not in sparse and p.dtype.is_floating_point), None)
        dtype, device = (torch.float32, group.device) if like is None else (torch.promote_types(like.dtype, torch.float32), like.device)
        # the first layer, the last to arrive, must not fill the only bucket before the signal arrives
        sharing = [p.numel() * p.element_size() for p in self.parameters if id(p) not in sparse and p.dtype == dtype]
        if options.get("bucket_cap_mb") is None and sum(sharing[1:]) < FIRST_BUCKET <= sum(sharing):
            options["bucket_cap_mb"] = BUCKET_MB
        self._facts = facts = torch.zeros(len(self.parameters) + len(others) + NUMBERS, dtype=dtype, device=device)
        facts[:-NUMBERS] = 1
        # numpy reads and writes a few numbers in a tenth of torch's time
        self._numbers = facts[-NUMBERS:].numpy() if facts.is_cpu else None
        self._signal = torch.zeros_like(facts).requires_grad_()  # an nn.Parameter would count as made in the batch
        self._signal.grad = torch.zeros_like(facts)
        self._take_means(self._signal.grad)
        this = weakref.ref(self)  # autograd keeps its hooks alive, where no collector finds the cycle
        self._signal.register_hook(lambda grad: cast(GradientAverager, this())._report())
        # autograd runs the nodes of one device newest first, and counts them in each thread: the first node of a new thread runs last
        # it sends the last bucket from the stream on which this node is made: that of the other gradients, which the script has chosen
        self._root = _in_new_thread(self._signal.sum, on_stream(device, current_stream(device)))
        ordered = [*(p for p in self.parameters if id(p) in sparse), self._signal, *(p for p in self.parameters if id(p) not in sparse)]
        hook = sender(self._signal) if sender else _send if len(sparse) > 1 or (sparse and uses_nccl()) else None
        self._reducer = _Reducer(ordered, sparse, hook, **options)
        self._ordered = [*self._reducer.parameters()]
        self._nobodys: tuple[frozenset[int], int] = frozenset(), 0  # the ids of parameters without a gradient on any rank, and how often
        self._late: tuple[torch.Tensor, torch.Event, list[int]] | None = None

    def refuse_to_go_on(self) -> NoReturn:
        """Raise after a backward that has raised.

        Raises:
            LockstepError: the other ranks may wait for the gradients of that backward.
        """
        raise LockstepError(
            "a backward over these parameters has raised before, and the script has caught the error: the other ranks may still wait "
            f"for its gradients, so this rank cannot go on ({self.broken}). Let the error end the job, or skip the batch before its "
            "backward, on all ranks: `if parwrap.any_rank(bad): continue`."
        )

    def run(self, call: Backward, exchange: Exchange) -> None:
        """Run ``call`` while its gradients are averaged, and send the numbers of ``exchange`` with them, which gets the means."""
        if self._late is not None:
            self._compare_late(*self._late)
        self._prepare(exchange)
        self._arm()
        call.run_with(self._root, self._signal)
        rest = unreached(self._reducer.reducer)
        unused = self._send_nothing(rest) if rest else []
        self.has_local = False
        self._receive(exchange)
        if unused:
            self._clear(unused)

    def run_then_average(self, call: Backward, exchange: Exchange) -> None:
        """Like :meth:`run`, but average after the backward: for gradients that have a graph or arrive several times.

        DDP raises under ``create_graph=True``. If a layer is in two re-entrant checkpoints, DDP does not average its second gradient.
        Gradients that were averaged before, and that this backward does not change, are not averaged again.
        """
        self._prepare(exchange)
        before = [None if p.grad is None or self.has_local else (p.grad, version_of(p.grad)) for p in self.parameters]
        call.run()
        reached = [_changed(p.grad, earlier) for p, earlier in zip(self.parameters, before, strict=True)]
        self._signal.grad = average_now(self.parameters, self._report(reached), self.sparse)
        self.has_local = False
        self._receive(exchange)

    def _receive(self, exchange: Exchange) -> None:
        if self._signal.grad is not self._means:  # DDP has replaced it by a view of its bucket
            self._take_means(cast(torch.Tensor, self._signal.grad))
        exchange.means = self._means[-NUMBERS:] if self._means_on_host is None else self._means_on_host[-NUMBERS:].tolist()

    def _take_means(self, means: torch.Tensor) -> None:
        """From now on, the means arrive in ``means``, the gradient of the signal."""
        self._means = means
        self._means_on_host = means.numpy() if means.is_cpu else None

    def reached_others(self) -> set[int]:
        """The ids in ``others`` whose parameters the last backward has reached on any rank."""
        bits = self._means[len(self.parameters) : -NUMBERS].tolist()
        return {number for number, bit in zip(self._others, bits, strict=True) if bit > 0}

    def _prepare(self, exchange: Exchange) -> None:
        """Write this rank's numbers, with those of its loss, and clear the means.

        The numbers are written to ``.data``, because autograd may still hold the tensor from the last backward.
        """
        numbers, loss = exchange.sent, exchange.loss
        if self._numbers is not None:
            if loss is not None:
                numbers[LOSS] = whole = loss.item()
                if loss.dtype == torch.float64:
                    rounded = float(self._numbers.dtype.type(whole))
                    numbers[LOSS_LOW] = whole - rounded if math.isfinite(rounded) else 0.0
            self._numbers[:] = numbers
        else:
            facts = self._facts.data[-NUMBERS:]
            facts.copy_(torch.tensor(numbers, dtype=facts.dtype, pin_memory=True), non_blocking=True)
            if loss is not None:
                facts[LOSS] = high = loss.reshape(()).to(facts.dtype)
                if facts.dtype != loss.dtype == torch.float64:
                    facts[LOSS_LOW] = (loss.reshape(()) - high).nan_to_num_(0, 0, 0).to(facts.dtype)
        if self._means_on_host is None:
            self._means.zero_()
        else:
            self._means_on_host.fill(0)

    def _report(self, reached: list[bool] | None = None) -> torch.Tensor:
        """Return the gradient of the signal: for each parameter a 1 if this rank has reached it, else a 0; then this rank's numbers.

        Autograd calls this after it has computed all other gradients. Without ``reached``, a parameter counts as reached if it has a
        gradient: one from before has been averaged, so it is there on all ranks.
        """
        self._at_end()
        if reached is None:
            reached = [p.grad is not None for p in self.parameters]
        if self._others:
            reached += [is_reached() for is_reached in self._others.values()]
        if all(reached) and not self._outside:
            return self._facts
        facts = self._facts.clone()
        facts[:-NUMBERS].copy_(torch.tensor(reached, dtype=facts.dtype, pin_memory=not facts.is_cpu), non_blocking=True)
        if self._outside:
            facts[GROWS] = 1
        return facts

    def _arm(self) -> None:
        """Make the reducer expect every parameter in the next backward."""
        if has_rebuilt_buckets(self._reducer):
            # does all that DDP's forward does once buckets are rebuilt, 40 us faster
            self._reducer.reducer.prepare_for_forward()
            self._reducer.reducer.prepare_for_backward([])
        else:
            with torch.enable_grad():
                self._reducer()

    def _send_nothing(self, rest: list[int]) -> list[torch.Tensor]:
        """Average parameters that this rank's loss did not reach too: other ranks may have gradients. Returns those without a gradient."""
        unused: list[torch.Tensor] = []
        before: list[int] = []
        while rest and rest != before:  # torch names a hundred at a time
            parameters = [self._ordered[place] for place in rest]
            unused += [p for p in parameters if p.grad is None]
            send_nothing(parameters, self.sparse)
            before, rest = rest, unreached(self._reducer.reducer)
        return unused

    def _clear(self, unused: list[torch.Tensor]) -> None:
        """Leave ``.grad`` of ``unused`` parameters ``None`` where no rank has a gradient.

        A GPU's answer costs a wait. Once it was no for the same parameters ``SAME`` times in a row, it is read before the next backward.
        """
        ids = frozenset(map(id, unused))
        places = [place for place, p in enumerate(self.parameters) if id(p) in ids]
        known, times = self._nobodys
        if self._means_on_host is not None:
            bits = self._means_on_host
        elif known == ids and times >= SAME:
            self._late, bits = (*to_host(self._means), places), cast(Any, dict.fromkeys(places, 0.0))
        else:
            bits = cast(Any, self._means.tolist())
            self._nobodys = ids, (times * (known == ids) + 1) * (not any(bits[place] for place in places))
        for place in places:
            if not bits[place]:
                self.parameters[place].grad = None

    def _compare_late(self, late: torch.Tensor, event: torch.Event, places: list[int]) -> None:
        """Raise if another rank had a gradient in the last backward of a parameter that all ranks were taken to leave out."""
        self._late = None
        event.synchronize()
        bits = late.tolist()
        if (used := next((self.parameters[place] for place in places if bits[place]), None)) is not None:
            raise LockstepError(
                f"a parameter of shape {tuple(used.shape)} has got a gradient on another rank in the last backward. No rank had used it "
                f"for {SAME} backwards, so this rank has stepped without its average. Use such a parameter on all ranks at the same step, "
                "or in every step: `loss = loss + 0 * parameter.sum()`."
            )


def _changed(grad: torch.Tensor | None, before: tuple[torch.Tensor, int] | None) -> bool:
    if before is None:
        return grad is not None
    return grad is not before[0] or version_of(before[0]) != before[1]


@torch.no_grad()
def average_now(parameters: Sequence[torch.Tensor], signal: torch.Tensor, sparse: frozenset[int] = frozenset()) -> torch.Tensor:
    """Average the gradients of ``parameters``, in one all-reduce for each dtype, and return the mean of ``signal``.

    The first entries of ``signal`` say for each parameter whether this rank has a gradient. ``.grad`` stays ``None`` if no rank has one.
    A rank without one gets a sparse gradient if ``sparse`` has the id of the parameter.
    """
    size = dist.get_world_size()
    signal = signal.clone()
    dist.all_reduce(signal)
    signal /= size
    used = [bit > 0 for bit in signal[: len(parameters)].tolist()]
    chosen = [p for p, is_used in zip(parameters, used, strict=True) if is_used]
    for dtype in dict.fromkeys(p.dtype for p in chosen):
        same = [p for p in chosen if p.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense() for p in same]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= size
        for p, average in zip(same, flat.split([grad.numel() for grad in grads]), strict=True):
            average = average.view(p.shape)
            if p.grad is None:
                p.grad = average.to_sparse(1) if id(p) in sparse else average.clone()
            elif p.grad.is_sparse:
                p.grad = average.to_sparse(1)
            else:
                p.grad.data.copy_(average)
    return signal


class _Nothing(torch.autograd.Function):
    """Makes parameters take part in a backward without a gradient."""

    @staticmethod
    def forward(ctx: Any, sparse: frozenset[int], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.nothing = [_sparse_nothing(p) if id(p) in sparse else None for p in parameters]
        ctx.set_materialize_grads(False)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.nothing)


def _sparse_nothing(like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64), torch.zeros((0, *like.shape[1:]), dtype=like.dtype), like.shape, device=like.device
    )


def send_nothing(parameters: Sequence[torch.Tensor], sparse: frozenset[int]) -> None:
    """Let ``parameters``, also frozen ones, take part in the current backward without a gradient. The script's hooks on them do not run.

    Those whose ids are in ``sparse`` get an empty sparse gradient.
    """
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)  # DDP's own hook of a frozen parameter would not run
    hooks = [(each, dict(each)) for p in parameters if (each := tensor_hooks(p))]
    for each, _ in hooks:
        each.clear()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            TORCHS_BACKWARD(_Nothing.apply(sparse, *parameters))
    finally:
        for each, kept in hooks:
            each.update(kept)
        for p in frozen:
            p.requires_grad_(False)


class _Reducer(DistributedDataParallel):
    """The DDP that parwrap builds; a subclass, to distinguish it from a DDP that the user builds."""

    def __init__(self, parameters: Sequence[torch.Tensor], sparse: frozenset[int], hook: Hook | None, **options: Any) -> None:
        super().__init__(_Holder(parameters, sparse), init_sync=False, **options)
        if hook:
            self.register_comm_hook(None, hook)


class _Holder(nn.Module):
    """The module that DDP wraps: it only holds leaf tensors."""

    def __init__(self, parameters: Sequence[torch.Tensor], sparse: frozenset[int]) -> None:
        super().__init__()
        # register_parameter takes only nn.Parameter, but a hand-written SGD trains plain tensors
        for index, parameter in enumerate(parameters):
            if id(parameter) in sparse:
                self.add_module(f"sparse {index}", _SparselyUsed(parameter))
            else:
                registered_parameters(self)[str(index)] = parameter

    def forward(self) -> None:
        """Does nothing; DDP arms its reducer around this call."""


class _SparselyUsed(nn.Embedding):
    """Tells DDP that the gradient of ``weight`` will be sparse."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.sparse = True
        registered_parameters(self)["weight"] = weight


def _send(state, bucket):  # DDP compares annotations with classes, and here they would be strings
    gradient = bucket.buffer()
    if gradient.layout != torch.strided:
        return average_sparse(bucket)
    # multiply as DDP does without a hook; torch's allreduce_hook divides, which rounds differently on three ranks
    sending = dist.all_reduce(gradient.mul_(1 / dist.get_world_size()), async_op=True)
    return sending.get_future().then(lambda sent: sent.value()[0])


def average_sparse(bucket: dist.GradBucket) -> Future:
    """Average the sparse gradient in ``bucket`` on the CPU, and wait until it is averaged.

    Torch's gloo corrupts memory when it averages two sparse tensors at a time, and nccl cannot average sparse tensors.
    """
    gradient = bucket.buffer()
    average = (gradient / dist.get_world_size()).cpu()
    dist.all_reduce(average)
    sent: Future = Future(devices=[gradient.device] if not gradient.is_cpu else None)
    sent.set_result(average.to(gradient.device))
    return sent


def _in_new_thread(build: Callable[[], T], stream: AbstractContextManager[Any]) -> T:
    """Return ``build()``, run in a new thread with ``stream`` as its current one.

    The caller's grad mode and its count of autograd nodes do not apply there.
    """

    def run() -> T:
        with torch.inference_mode(False), torch.enable_grad(), stream:
            return build()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
