"""``batch="whole"``: which calls of torch do more while it is open (contract, rules W1 to W8)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from parwrap.intercept.intercepted_calls import Backward
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.patch import Patch, installed, when_imported
from parwrap.intercept.torch_calls import SERIALIZATION
from parwrap.rows.losses import CRITERION, divisor_of, whole_divisor
from parwrap.rows.modules import ModuleCalls
from parwrap.rows.table import leaf
from parwrap.rows.tensors import LOCAL, OfBatch, Partial, Rows, Whole, as_partial, as_rows, collected, open_whole, plain, whole_result
from parwrap.torch_private.autograd import current_transform, in_backward, is_traced
from parwrap.torch_private.functions import TRANSFORMS, enable_torch_function, pytree
from parwrap.torch_private.jit import scripted_as

__all__ = ["WholeBatch"]


class WholeBatch(Interceptor):
    """Differentiates losses of rows as one process does.

    Args:
        whole: what is open.
        own_draws: a context manager in which each rank draws its own random numbers.
    """

    def __init__(self, whole: Whole, own_draws: Callable[[], AbstractContextManager[Any]]) -> None:
        self.whole = whole
        self._modules = ModuleCalls(whole, own_draws)
        self._waiting: dict[int, torch.Tensor] = {}

    def opened(self, module: str | None) -> AbstractContextManager[Any]:
        """Install what no method of ``Interceptor`` covers, inside the block; ``module`` as in ``intercept.patch.installed``."""
        stack = ExitStack()
        stack.enter_context(open_whole(self.whole))
        patches = list(self._patches())
        originals = [getattr(each.owner, each.name) for each in patches]
        stack.enter_context(installed(patches, module))
        for each, original in zip(patches, originals, strict=True):
            stack.enter_context(scripted_as(original, getattr(each.owner, each.name)))
        stack.enter_context(when_imported("wandb", lambda wandb: [Patch(wandb, "init", _logging_whole)]))
        stack.callback(self._closed)
        return stack

    def _closed(self) -> None:
        self.whole.layout = None

    def backward(self, call: Backward) -> None:
        """Run ``call`` on this rank's part: the mean over ranks of its gradients is that of one process."""
        if not any(isinstance(each, (Rows, Partial)) for each in (*call.tensors, *call.grad_tensors)):
            return call.run()
        grads = [self._given(tensor, grad) for tensor, grad in zip(call.tensors, call.grad_tensors, strict=True)]
        tensors = [plain(each) if isinstance(each, Rows) else each for each in call.tensors]
        partials = [each for each in tensors if isinstance(each, Partial)]
        for each in partials:
            each.__class__ = torch.Tensor  # type: ignore[assignment]  # the strategy sends and writes this rank's part
            self._waiting[id(each)] = each
        given = tuple(plain(each) if isinstance(each, Rows) else each for each in call.given)
        try:
            with enable_torch_function():  # hooks of the script get rows
                call._replace(tensors=tuple(tensors), grad_tensors=tuple(grads), given=given).run()
        finally:
            for each in partials:
                if self._waiting.pop(id(each), None) is not None:
                    each.__class__ = Partial
        return None

    def settled(self, loss: torch.Tensor) -> None:
        """Note that the mean over ranks has been written into ``loss``: it is a plain number now."""
        self._waiting.pop(id(loss), None)
        if isinstance(loss, Partial):
            loss.__class__ = torch.Tensor  # type: ignore[assignment]

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable[..., Any]) -> Any:
        return self._modules.call(module, args, kwargs, original)

    def _patches(self) -> Iterable[Patch]:
        for owner, name in ((F, "cross_entropy"), (F, "nll_loss")):
            yield Patch(owner, name, self._criterion)
        for name in ("randn", "rand", "randint"):
            yield Patch(torch, name, self._drawn)
        for owner, names in KNOW_NO_SUBCLASS:
            for name in names:
                yield Patch(owner, name, _on_whole)
        yield Patch(torch.autograd.Variable, "__new__", _variable)
        yield Patch(torch, "compile", self._compile)
        yield Patch(torch.autograd, "grad", self._grad)
        yield Patch(torch.autograd.Function, "apply", self._apply)
        for owner, name in TRANSFORMS:
            yield Patch(owner, name, _on_whole)

    def _criterion(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        """Inside a module, a mean cross entropy divides by the count of the whole batch."""
        whole = self.whole
        if not whole.inside or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        given = dict(zip(CRITERION, args, strict=False), **kwargs)
        mean = given.get("reduction", "mean") == "mean" and given.get("reduce") is not False and given.get("size_average") is not False
        target = given["target"]
        if not mean or target.is_floating_point():
            return wrapped(*args, **kwargs)
        loss = wrapped(*args, **kwargs)
        if whole.counting is not None:
            factor = whole.counting.factor(divisor_of(target, given.get("weight"), given.get("ignore_index", -100)))
        elif whole.calling is not None:
            mine, total = whole_divisor(target, given.get("weight"), given.get("ignore_index", -100))
            share = mine * whole.between.size / total if total else 0.0
            factor = share / whole.calling.weight
        else:
            return loss
        if not factor:
            return torch.where(torch.isnan(loss), 0.0, loss) * 0.0
        return loss if factor == 1.0 else loss * factor

    def _drawn(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        """What is drawn for each row of the batch is drawn for all rows, and each rank keeps its own."""
        drawn = wrapped(*args, **kwargs)
        whole = self.whole
        if whole.layout is None or whole.inside or not drawn.ndim or drawn.shape[0] != whole.layout.n or type(drawn) is not torch.Tensor:
            return drawn
        wants = drawn.requires_grad
        mine = whole.layout.own(drawn.detach()).clone()
        rows = as_rows(mine, whole.layout)
        return rows.requires_grad_() if wants else rows

    def _compile(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        """A compiled function runs without its graphs where it gets rows; a compiled module runs on this rank's rows."""
        model = args[0] if args else kwargs.get("model")
        compiled = wrapped(*args, **kwargs)
        if isinstance(model, nn.Module):
            return compiled
        if model is None:
            return lambda function: _by_rows(compiled(function), function)
        return _by_rows(compiled, model)

    def _grad(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        if self.whole.inside or in_backward() or current_transform() is not None or is_traced():
            return wrapped(*args, **kwargs)
        return self._gradients(wrapped, *args, **kwargs)

    def _gradients(
        self, original: Callable, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad``: gradients of rows are rows, any other is the mean over ranks."""
        one = (torch.Tensor, GradientEdge)
        outputs = [outputs] if isinstance(outputs, one) else list(outputs)
        inputs = [inputs] if isinstance(inputs, one) else list(inputs.values() if isinstance(inputs, dict) else inputs)
        given: Sequence[Any] = [None] * len(outputs) if grad_outputs is None else grad_outputs
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        grads = [self._given(output, grad) for output, grad in zip(outputs, given, strict=True)]
        with LOCAL():
            found = original(
                [plain(each) if isinstance(each, (Rows, Partial)) else each for each in outputs], inputs, grads, *args, **kwargs
            )
        return tuple(self._gradient(each, grad) for each, grad in zip(inputs, found, strict=True))

    def _given(self, output: Any, grad: Any) -> Any:
        """The gradient that the script gives to ``output``, as this rank's graph needs it: below rows the number of ranks times theirs."""
        if not isinstance(output, Rows):
            return collected(grad)
        if grad is None:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")  # as torch says
        mine = plain(grad) if isinstance(grad, Rows) else output.row_layout.own(collected(grad), output.row_dim)
        return mine * self.whole.between.size

    def _gradient(self, of: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            return None
        if isinstance(of, Rows):
            with LOCAL():
                true = plain(grad) if "halved" in of.__dict__ else plain(grad) / self.whole.between.size
                return as_rows(true, of.row_layout, of.row_dim)
        return self.whole.between.mean(plain(grad))

    def _apply(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        """A function of the script with a backward of its own runs on whole tensors."""
        if any(isinstance(each, OfBatch) for each in args):
            return wrapped(*(collected(each, "autograd.Function") for each in args), **kwargs)
        if self.whole.counting is not None and not instance.__module__.startswith(("torch.", "parwrap.")):
            self.whole.counting.own_backward = True
        return wrapped(*args, **kwargs)


def _by_rows(compiled: Callable, function: Callable) -> Callable:
    if isinstance(function, nn.Module):
        return compiled

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        takes_rows = any(isinstance(each, OfBatch) for each in pytree.tree_leaves((args, kwargs)))
        return (function if takes_rows else compiled)(*args, **kwargs)

    return run


def _variable(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """``Variable(x)`` of old scripts, which is ``x`` itself."""
    made, of = wrapped(*args, **kwargs), args[1] if len(args) > 1 else kwargs.get("data")
    if isinstance(of, Rows):
        return leaf(as_rows(made, of.row_layout, of.row_dim))
    return as_partial(made) if isinstance(of, Partial) else made


KNOW_NO_SUBCLASS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("tensor", "as_tensor", "asarray", "scalar_tensor", "to_dlpack")),
    (torch.utils.dlpack, ("to_dlpack",)),
    (torch.Tensor, ("new_tensor", "new")),
    (nn.Parameter, ("__new__",)),
    (torch.jit.ScriptFunction, ("__call__",)),
    *((module, ("save",)) for module in SERIALIZATION),
)
"""Functions of torch that would take rows for the plain tensor of this rank; and ``save``, which rank 0 alone may run to its end."""


def _logging_whole(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """A run of wandb, whose ``log`` collects on all ranks: it looks at the numbers on rank 0 only."""
    run = wrapped(*args, **kwargs)
    log = run.log

    def collecting(data: Any, *rest: Any, **options: Any) -> Any:
        return log(whole_result(data), *rest, **options)

    run.log = collecting
    sys.modules["wandb"].log = collecting  # type: ignore[attr-defined]
    return run


def _on_whole(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    """Run a function of torch that knows no subclasses on whole tensors."""
    args, kwargs = pytree.tree_map_only(OfBatch, collected, (args, kwargs))
    return wrapped(*args, **kwargs)
