"""What a module answers to a few rows, and to two parts of them, without a trace: no gradient, no random number, no changed state."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parwrap.rows.tensors import Whole
from parwrap.torch_private.functions import forward_hooks, pytree
from parwrap.torch_private.modules import registered_buffers
from parwrap.torch_private.tensors import version_of

__all__ = ["KEEPS", "Answers", "Few", "answers", "exchanged_hooks"]


class Answers(NamedTuple):
    """What a module answers.

    Attributes:
        whole: the leaves of its answer to all of a few rows.
        first: to the first of them.
        second: to the others.
        structure: how the answer is built.
        sizes: the numbers of rows in both parts.
        draws: whether it draws random numbers.
        left: for each call, what it leaves in the module's buffers and attributes.
        gradients: for each call, the gradients of the sum of its rows, and of its numbers; empty if all functions in it are torch's.
        hooks_whole: what the script's hooks on the module and those inside would get, call by call; likewise for both parts.
    """

    whole: list[Any]
    first: list[Any]
    second: list[Any]
    structure: Any
    sizes: tuple[int, int]
    draws: bool
    left: list[list[Any]]
    gradients: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    hooks_whole: list[list[Any]]
    hooks_first: list[list[Any]]
    hooks_second: list[list[Any]]


class Few(NamedTuple):
    """A few rows of an argument."""

    rows: torch.Tensor
    dim: int


KEEPS = "it keeps what it computes from a batch"


def answers(whole: Whole, module: nn.Module, run: Callable[..., Any], few: Sequence[Any], structure: Any) -> Answers | str:
    """Call ``module`` three times on a few rows; or say why it cannot be.

    Args:
        whole: what is open.
        module: the module.
        run: what runs it.
        few: the leaves of its arguments; a few rows are a tuple with the dimension that they are in.
        structure: how its arguments are built.
    """
    rows = next(each.rows.shape[each.dim] for each in few if isinstance(each, Few))
    if rows < 2:
        return "it has one row only"
    first = rows // 2 + (rows > 2)  # parts of different sizes, if there can be
    spans = [(0, rows), (0, first), (first, rows)]
    gradients: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    found, hooks, lefts, quiet = list[Any](), list[list[Any]](), list[list[Any]](), _Quiet()
    count = whole.counting = _Counts()
    whole.inside += 1
    try:
        with whole.draws_kept(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for differentiates in (False, True):
                if differentiates and not (count.own_backward and torch.is_grad_enabled()):
                    break
                for start, stop in spans:
                    count.begin(stop - start)
                    seen: list[Any] = []
                    cut = [
                        each.rows.narrow(each.dim, start, stop - start).clone() if isinstance(each, Few) else _copied(each) for each in few
                    ]
                    args, kwargs = (cut, {}) if structure is None else pytree.tree_unflatten(cut, structure)
                    watched = exchanged_hooks(module, lambda hook, kind: _recorder(seen))  # noqa: B023
                    grads = torch.enable_grad() if differentiates else torch.no_grad()
                    with grads, whole.draws_kept(), _unchanged(module) as left, quiet, watched:
                        answer = run(*args, **kwargs)
                        if differentiates:
                            gradients.append(_gradients(module, answer))
                            continue
                        found.append(pytree.tree_flatten(pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), answer)))
                    lefts.append(left)
                    hooks.append(seen)
                count.calls = -1
    except Exception as error:
        return f"it does not run on a few rows ({type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''})"
    finally:
        whole.inside -= 1
        whole.counting = None
    structures = [structure for _, structure in found]
    if structures.count(structures[0]) != 3 or len({len(each) for each in hooks}) > 1:
        return "its answer is built otherwise for other numbers of rows"
    leaves = [leaves for leaves, _ in found]
    if len({len(each) for each in lefts}) > 1:
        return KEEPS
    return Answers(  # type: ignore[call-arg]
        *leaves, structures[0], (first, rows - first), quiet.drew, lefts, gradients, *hooks
    )


@contextlib.contextmanager
def exchanged_hooks(module: nn.Module, exchange: Callable[[Callable, str], Callable]) -> Iterator[int]:
    """Inside the block, the script's forward hooks on ``module`` and those inside are replaced by what ``exchange`` makes of them.

    It gets the hook, and ``"after"`` for one that gets the answer too, ``"before"`` for any other.
    """
    before: list[tuple[dict, Any, Any, str]] = []
    for each in module.modules():
        for hooks, kind in zip(forward_hooks(each), ("after", "before"), strict=True):
            for key, hook in hooks.items():
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                    before.append((hooks, key, hook, kind))
    try:
        for hooks, key, hook, kind in before:
            hooks[key] = exchange(hook, kind)
        yield len(before)
    finally:
        for hooks, key, hook, _ in before:
            if key in hooks:
                hooks[key] = hook


def _gradients(module: nn.Module, answer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of the parameters for the sum of the rows in ``answer``, and for that of its numbers."""
    leaves = [each for each in pytree.tree_leaves(answer) if isinstance(each, torch.Tensor) and each.requires_grad]
    parameters = [each for each in module.parameters() if each.requires_grad]
    found = []
    for wanted in (True, False):
        of_kind = [each.sum() for each in leaves if bool(each.ndim) == wanted]
        grads = torch.autograd.grad(of_kind, parameters, retain_graph=True, allow_unused=True) if of_kind else ()
        found.append([each for each in grads if each is not None])
    return found[0], found[1]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if type(leaf) is torch.Tensor else leaf


def _recorder(seen: list[list[Any]]) -> Callable:
    def record(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        seen.append([each.detach().clone() if isinstance(each, torch.Tensor) else each for each in pytree.tree_leaves(args)])

    return record


class _Counts:
    """The divisors of the cross entropies in the call on all rows, for those in the calls on parts.

    Attributes:
        calls: the number of calls that have ended.
        own_backward: whether a ``torch.autograd.Function`` of the script runs inside.
    """

    own_backward = False

    def __init__(self) -> None:
        self._divisors: list[float] = []
        self.calls, self._rows, self._all = -1, 0, 0
        self._at = 0

    def begin(self, rows: int) -> None:
        self.calls, self._rows, self._at = self.calls + 1, rows, 0
        self._divisors = self._divisors if self.calls else []
        self._all = self._all or rows

    def factor(self, divisor: float) -> float:
        """By what a mean that was divided by ``divisor`` is multiplied, so that the mean over parts is that of all rows."""
        if not self.calls:
            self._divisors.append(divisor)
            return 1.0
        whole = self._divisors[self._at] if self._at < len(self._divisors) else divisor
        self._at += 1
        return divisor / whole * self._all / self._rows if whole else 0.0


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[list[Any]]:
    """After the block, ``module`` and those inside have the attributes and the buffers that they had before.

    Yields:
        a list that gets what the block has left in them.
    """
    held, left = [], list[Any]()
    versions = [(p, version_of(p)) for p in module.parameters() if not p.is_inference()]
    for each in module.modules():
        attributes = dict(vars(each))
        contents = {name: _copy_of(value) for name, value in attributes.items() if isinstance(value, (list, dict, set, deque))}
        values = [(tensor, tensor.detach().clone()) for tensor in _tensors(each)]
        held.append((each, attributes, contents, values))
    try:
        yield left
    finally:
        left += [object() for p, version in versions if version_of(p) != version]
        for each, attributes, contents, values in held:
            left += [value for name, value in vars(each).items() if attributes.get(name, left) is not value]
            for name, content in contents.items():
                now = attributes[name]
                if name not in TORCHS and _differs(now, content):
                    left += pytree.tree_leaves(list(now.values()) if isinstance(now, dict) else list(now))
                elif attributes[name] is registered_buffers(each):
                    left += [tensor for key, tensor in now.items() if content.get(key) is not tensor]
            vars(each).clear()
            vars(each).update(attributes)
            for name, content in contents.items():
                _put_back(attributes[name], content)
            for tensor, value in values:
                if not torch.equal(tensor, value) and not (tensor != tensor).any():
                    left.append(tensor.detach().clone())
                    tensor.detach().copy_(value)


TORCHS = frozenset(vars(nn.Module()))
"""The attributes of torch's own modules."""


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """The buffers of ``module``, and the tensors among its attributes."""
    return [each for each in (*registered_buffers(module).values(), *vars(module).values()) if type(each) is torch.Tensor]


def _differs(now: Any, before: Any) -> bool:
    """Whether a list, dict or set has other contents than before, by identity."""
    if len(now) != len(before):
        return True
    if isinstance(now, dict):
        return any(before.get(key, now) is not value for key, value in now.items())
    return now != before if isinstance(now, set) else any(a is not b for a, b in zip(now, before, strict=True))


def _copy_of(value: Any) -> Any:
    return list(value) if isinstance(value, (list, deque)) else dict(value) if isinstance(value, dict) else set(value)


def _put_back(target: Any, content: Any) -> None:
    target.clear()
    if isinstance(target, (list, deque)):
        target.extend(content)
    else:
        target.update(content)


FILLS = {
    "normal_": 0.25, "uniform_": 0.5, "exponential_": 0.5, "random_": 1.0, "bernoulli_": 1.0, "geometric_": 1.0, "log_normal_": 1.0,
    "cauchy_": 0.25,
}  # fmt: skip
"""Numbers in the place of drawn ones: the same for each row, so that answers to parts can be compared with that to all."""

MAKES = {"rand": 0.5, "randn": 0.25, "rand_like": 0.5, "randn_like": 0.25}


class _Quiet(TorchFunctionMode):
    """Draws nothing, and lets batch norms look at no other row."""

    drew = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in FILLS:
            self.drew = True
            return args[0].fill_(FILLS[name])
        if name in MAKES:
            self.drew = True
            kwargs.pop("generator", None)
            return getattr(torch, "full_like" if name.endswith("like") else "full")(*_sizes(name, args), MAKES[name], **kwargs)
        if name == "randint" or name == "randint_like":
            self.drew = True
            kwargs.pop("generator", None)
            given = args[1:] if name.endswith("like") else args
            bounds = [each for each in given if isinstance(each, int)] or [kwargs.pop("high", 2)]
            kwargs.pop("low", None), kwargs.pop("high", None)
            value = sum(bounds[:2]) // 2 if len(bounds) > 1 else bounds[0] // 2
            if name.endswith("like"):
                return torch.full_like(args[0], value, **kwargs)
            size = next((each for each in args if isinstance(each, (tuple, list))), kwargs.pop("size", ()))
            return torch.full(tuple(size), value, **{"dtype": torch.int64, **kwargs})
        if name == "randperm":
            self.drew = True
            kwargs.pop("generator", None)
            return torch.arange(args[0], **kwargs).flip(0)
        if name == "normal":
            self.drew = True
            return func(*args, **kwargs) * 0 + 0.25
        if name == "bernoulli":
            self.drew = True
            return (args[0] > 0.5).to(args[0].dtype)
        if name == "multinomial":
            self.drew = True
            return torch.topk(args[0], args[1] if len(args) > 1 else kwargs["num_samples"], dim=-1).indices
        if "dropout" in name:
            self.drew = True
            return args[0] if args else kwargs["input"]
        if name == "gumbel_softmax":
            self.drew = True
            return torch.softmax(args[0], kwargs.get("dim", -1))
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            at = next((at for at, each in enumerate(args) if at > 4 and type(each) is float), None)
            if at is not None:
                self.drew |= bool(args[at])
                args = (*args[:at], 0.0, *args[at + 1 :])
        if name == "scaled_dot_product_attention":
            self.drew |= bool(kwargs.get("dropout_p") or (len(args) > 4 and args[4]))
            args, kwargs = (
                (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]),
                {**kwargs, **({"dropout_p": 0.0} if len(args) < 5 else {})},
            )
        if name == "multi_head_attention_forward":
            self.drew |= bool(args[11]) if len(args) > 11 else bool(kwargs.get("dropout_p"))
            args = (*args[:11], 0.0, *args[12:]) if len(args) > 11 else args
        if name == "batch_norm" and func is not torch.batch_norm:
            return _by_row(*args, **kwargs)
        return func(*args, **kwargs)


def _sizes(name: str, args: tuple) -> tuple:
    if name.endswith("like"):
        return (args[0],)
    return (tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args,)


def _by_row(
    input: torch.Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """A batch norm that looks at no other row."""
    if training or running_mean is None:
        running_mean, running_var = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
    return torch.batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, False)
