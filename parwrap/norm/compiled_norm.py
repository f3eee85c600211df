"""Shared batch normalization in compiled models: two operators that a graph calls, because a compiler cannot trace communication.

``torch.compile`` traces ``traced`` instead of ``torch.nn.functional.batch_norm``. Whenever the operators run, they look up in the open
scopes which ranks share the batch. So a graph contains nothing about a scope, and a graph that torch has cached on disk works in any run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Norm
from parwrap.norm.exchange import Alone, Exchange
from parwrap.norm.forward_backward import differentiable, gradients, normalize
from parwrap.norm.kernels import Running, Whole, accumulated, kernels_for
from parwrap.torch_private.dynamo import EXPORTING

__all__ = ["scopes", "traced"]

BATCH_NORM = functional.batch_norm
"""Torch's own ``batch_norm``, from before it is patched."""

FORWARD = (
    "(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum, float eps) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""The schema of the forward operator.

It returns the output, two tensors with the statistics of the whole batch in the kernels' form, the new running statistics, and two numbers
for the backward: the number of values per channel, and the number of the exchange, for :meth:`_Scopes.used`.
"""

BACKWARD = (
    "(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor spread, Tensor facts, float eps, bool[] needed) -> "
    "(Tensor, Tensor, Tensor)"
)
"""The schema of the backward operator; ``facts`` are the two numbers, and ``needed`` says which of the three gradients to compute."""


class _Scopes:
    """The open scopes of ``sync_bn`` in this process.

    Attributes:
        shared: whether ranks can now share a batch. Compiled code depends on it, so torch compiles again when it changes.
    """

    def __init__(self) -> None:
        self.shared = False
        self._exchanges: list[Callable[[Norm], Exchange | None]] = []
        self._alone = Alone()
        self._numbers: dict[Exchange, int] = {}
        self._used: dict[int, Exchange] = {}
        self._count = itertools.count()

    @contextmanager
    def opened(self, exchange: Callable[[Norm], Exchange | None], shared: bool) -> Iterator[None]:
        """Use ``exchange`` inside the block.

        Args:
            exchange: a function that returns how the ranks share a layer, or ``None`` if this rank normalizes by itself.
            shared: whether there are several ranks.
        """
        before = self.shared
        if not self._exchanges:  # a backward pass may run after its scope has ended, until another scope opens
            self._numbers.clear()
            self._used.clear()
        self._exchanges.append(exchange)
        self.shared = False
        if shared:
            self.share()
        try:
            yield
        finally:
            self._exchanges.pop()
            self.shared = before

    def share(self) -> None:
        """Record that there are several ranks."""
        _define_operators()
        self.shared = True

    def exchange(self, call: Norm) -> tuple[Exchange, int]:
        """How the ranks now share the layer of ``call``, and a unique number for :meth:`used`."""
        found = (self._exchanges[-1](call) if self._exchanges else None) or self._alone
        number = self._numbers.get(found)
        if number is None:
            number = self._numbers[found] = next(self._count)
            self._used[number] = found
        return found, number

    def used(self, number: int) -> Exchange:
        """The exchange with this ``number``.

        A backward pass gets the number from its forward pass, because operators only take and return tensors and numbers.
        """
        if number not in self._used:
            raise UsageError(
                "the backward pass of a compiled batch norm runs after parwrap.sync_bn has ended: call backward() inside parwrap.sync_bn."
            )
        return self._used[number]


scopes = _Scopes()
"""The open scopes of this process, which compiled code and the operators ask."""


def traced(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``torch.nn.functional.batch_norm`` as it is compiled while a ``sync_bn`` is open."""
    if (
        not (scopes.shared and training and eps > 0)
        or getattr(torch.compiler, EXPORTING)
        or input.dim() < 2
        or not input.is_floating_point()
        or input.device.type not in ("cpu", "cuda")
        or (running_mean is None) != (running_var is None)
    ):
        return BATCH_NORM(input, running_mean, running_var, weight, bias, training, momentum, eps)
    out, _, _, mean, var, _ = torch.ops.parwrap.batch_norm(input, weight, bias, running_mean, running_var, momentum, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.copy_(mean)
            running_var.copy_(var)
    return out


@functools.cache
def _define_operators() -> None:
    """Register ``torch.ops.parwrap``, which torch keeps for the life of the process."""
    unsafe = (torch.Tag.cudagraph_unsafe,)
    forward = torch.library.custom_op("parwrap::batch_norm", _forward, mutates_args=(), schema=FORWARD, tags=unsafe)
    forward.register_fake(_fake_forward)
    backward = torch.library.custom_op("parwrap::batch_norm_backward", _backward, mutates_args=(), schema=BACKWARD, tags=unsafe)
    backward.register_fake(_fake_backward)
    forward.register_autograd(_differentiate, setup_context=_save)


def _forward(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    exchange, number = scopes.exchange(Norm(BATCH_NORM, input, running_mean, running_var, weight, bias, True, momentum, eps))
    new_mean, new_var = (None if each is None else each.clone() for each in (running_mean, running_var))
    normalized, merged, total = normalize(exchange, input, weight, bias, Running(new_mean, new_var, momentum), eps)
    out, *empty = _fake_forward(input, weight, bias, None, None)
    out.copy_(normalized)  # in the layout that the compiler relies on
    mean, spread = merged[:2] or empty[:2]
    facts = torch.tensor([int(total), number], dtype=torch.int64)
    return out, mean, spread, *(input.new_empty(0) if each is None else each for each in (new_mean, new_var)), facts


def _fake_forward(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    *numbers: float,
) -> tuple[torch.Tensor, ...]:
    """Tensors like the results of ``_forward``."""
    statistics = [input.new_empty(input.size(1), dtype=accumulated(input)) for _ in range(2)]
    running = [input.new_empty(0) if each is None else torch.empty_like(each) for each in (running_mean, running_var)]
    return torch.empty_like(input), *statistics, *running, torch.empty(2, dtype=torch.int64, device="cpu")


def _backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    spread: torch.Tensor,
    facts: torch.Tensor,
    eps: float,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    total, exchange = facts.tolist()
    like = _fake_backward(grad, input, weight, bias, needed)
    if not total:
        return like[0].copy_(grad) if needed[0] else like[0], like[1].zero_(), like[2].zero_()
    whole = Whole(kernels_for(input).restored(mean, spread, total), total, eps)
    grads = gradients(scopes.used(exchange), grad, (input, weight, bias), (needed[0], needed[1], needed[2]), whole)
    return tuple(given if each is None else given.copy_(each) for given, each in zip(like, grads, strict=True))


def _fake_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Tensors like the results of ``_backward``; the last of ``others`` says which gradients are needed."""
    of = zip((input, weight, bias), others[-1], strict=True)
    return tuple(torch.empty_like(each) if need and each is not None else input.new_empty(0) for each, need in of)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, weight, bias, _, _, _, ctx.eps = inputs
    _, mean, spread, _, _, facts = output
    ctx.save_for_backward(input, weight, bias, mean, spread, facts)


def _differentiate(ctx: Any, grad: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    input, weight, bias, mean, spread, facts = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        total, exchange = facts.tolist()
        grads: Sequence[Any] = differentiable(scopes.used(exchange), grad, (input, weight, bias), tuple(needed), total, ctx.eps)
    else:
        grads = torch.ops.parwrap.batch_norm_backward(grad, input, weight, bias, mean, spread, facts, ctx.eps, needed)
    return *(each if need else None for each, need in zip(grads, needed, strict=True)), *[None] * 4
