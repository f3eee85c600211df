"""The script's operations on sharded parameters outside of forwards, with the same results as on whole parameters.

An operation on a sharded tensor gathers the tensor; its gradient is the mean over ranks. A value that the script writes must be the same
on all ranks, and each rank keeps its part. Only the operations of an optimizer's step run on the parts, as ``DTensor`` defines them.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import utils
from torch.optim import Optimizer

from parwrap.checks.same_weights import checksums
from parwrap.errors import RankMismatchError, UsageError
from parwrap.intercept.intercepted_calls import Clip
from parwrap.places import script_place
from parwrap.ranks.agreement import agree
from parwrap.ranks.environment import attribute
from parwrap.ranks.group import Group, is_alone
from parwrap.ranks.structures import mapped
from parwrap.torch_private.fsdp import clip_grads_with_norm_, local_tensor
from parwrap.torch_private.tensors import disable_torch_function

__all__ = ["Sharded", "ShardedTensors", "clip_by_norm", "is_sharded", "refuse_alone", "refuse_hook"]

T = torch.Tensor

NEEDS_NO_VALUES = frozenset(
    {
        *(T.size, T.dim, T.ndimension, T.numel, T.nelement, T.stride, T.element_size, T.__len__, T.is_contiguous, T.is_shared),
        *(T.is_floating_point, torch.is_floating_point, T.is_complex, torch.is_complex, torch.numel, T.get_device, T.data_ptr),
        *(T.requires_grad_, T.detach, T.detach_, T.retain_grad, T.is_signed, torch.is_signed),
    }
)
"""Operations that run without gathering, because they use no values of the tensor. The result of ``detach`` shares the tensor's memory."""

ON_WHOLE = frozenset(
    {T.normal_, T.uniform_, T.random_, T.bernoulli_, T.exponential_, T.cauchy_, T.geometric_, T.log_normal_, T.__setitem__}
)
"""Operations that write to a gathered copy, of which each rank keeps its part: random numbers, and assignments to an index."""

IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))
HOOKS = T.register_hook, T.register_post_accumulate_grad_hook
SET_DATA, SET_GRAD = T.data.__set__, T.grad.__set__  # type: ignore[attr-defined, union-attr]
GET_GRAD = T.grad.__get__  # type: ignore[union-attr]

ABOUT_SHARDING = "DTensor", "Sharding propagation", "shard"
"""Parts of torch's errors when it cannot shard an operation."""


class Sharded(nn.Parameter):
    """A sharded parameter of the script. It has no values itself, but stands for a ``DTensor``, which has this rank's part."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*_current(args), **_current(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(_current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _current(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_current(self))

    @staticmethod
    def replace(p: nn.Parameter, new: DTensor) -> None:
        """Make ``p`` stand for ``new``, and free the memory of ``p``."""
        if p.grad is not None:
            new.grad = part_of(p.grad, new)
            p.grad = None
        p.data = torch.empty(0, dtype=p.dtype, device=p.device)
        p.__class__ = Sharded
        p.__dict__["sharded"], new.__dict__["parameter"] = new, weakref.ref(p)

    @staticmethod
    def put_back(p: nn.Parameter, whole: Callable[[DTensor], T]) -> None:
        """Make ``p`` a plain parameter again, on all ranks together; ``whole`` gathers a tensor."""
        new = p.__dict__["sharded"]
        values, grad = whole(new.detach()).clone(), None if new.grad is None else whole(new.grad)
        with disable_torch_function():
            p.__class__ = nn.Parameter
            del p.__dict__["sharded"]
            p.data = values
            p.requires_grad_(new.requires_grad)
            p.grad = grad


def is_sharded(thing: Any) -> bool:
    """Whether ``thing`` is a tensor of which this rank has a part."""
    return isinstance(thing, (Sharded, DTensor))


def part_of(whole: T, like: Any) -> DTensor:
    """This rank's part of ``whole``, which all ranks have, placed like ``like``; nothing is sent."""
    mesh, placements = like.device_mesh, _settled(like)
    replica = DTensor.from_local(whole.detach().to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    own = replica.redistribute(placements=placements).to_local().contiguous().clone()
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


class _Gathered(torch.autograd.Function):
    """Gathers a sharded tensor. Its backward averages the gradients of the ranks, and each rank keeps its part of the mean."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> T:
        ctx.mesh, ctx.placements = tensor.device_mesh, _settled(tensor)
        whole = tensor.full_tensor()
        return whole.clone() if whole.data_ptr() == local_tensor(tensor).data_ptr() else whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: T) -> DTensor:
        mean = DTensor.from_local(grad.contiguous(), ctx.mesh, [Partial("avg")] * ctx.mesh.ndim, run_check=False)
        return mean.redistribute(placements=ctx.placements)


class ShardedTensors:
    """Carries out operations on sharded tensors.

    Args:
        group: the process group.

    Attributes:
        read: the ids of parameters that :meth:`whole` has gathered for autograd since this set was cleared.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._steps = 0
        self.read: set[int] = set()

    def begin_step(self) -> None:
        """Run operations on the parts from now on, because an optimizer steps."""
        self._steps += 1

    def end_step(self) -> None:
        self._steps = max(0, self._steps - 1)

    def outside_of_step(self) -> AbstractContextManager[None]:
        """Inside the block, where the script's closure runs during a step, operations see whole tensors."""
        return attribute(self, "_steps", 0)

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run ``func``, which has sharded tensors among its arguments."""
        with disable_torch_function():
            result = self._call(func, _current(args), _current(kwargs))
            return result if (p := _parameter(result)) is None else p  # as in `model.weight += 1`

    def _call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        name = getattr(func, "__name__", "")
        if func in HOOKS:
            refuse_hook(f"that {script_place()} registers on a sharded parameter")
        if func is torch.autograd.grad:
            _refuse_grad()
        if name == "__get__" or func in NEEDS_NO_VALUES:
            result = func(*args, **kwargs)
            return _as_copy(result) if _is_copy(args[0]) and func != GET_GRAD else result
        if name == "__set__":
            return self._set(func, *args) if func in (SET_DATA, SET_GRAD) else func(*args)
        if func is T.__repr__:
            return self._shown(args[0])
        target = _target(name, args, kwargs)
        if _is_copy(target):
            _refuse_lost_write(name)
        if isinstance(target, (list, tuple)) or "foreach" in name or "fused" in name:
            return self._by_kind(func, args, kwargs)
        if target is not None:
            return self._write(func, target, args, kwargs)
        return self._on_parts(func, args, kwargs) if self._steps else self._on_whole(func, args, kwargs)

    # reading

    def whole(self, tensor: Any) -> T:
        """Gather ``tensor`` on every rank. Autograd records the gathering, and its backward averages the gradients of the ranks."""
        what = f"gathering a sharded tensor of shape {tuple(tensor.shape)}"
        if is_alone():
            refuse_alone(what)
        with self._group.control_message(what), disable_torch_function():
            tensor = _current(tensor)
            if tensor.requires_grad and (p := _parameter(tensor)) is not None:
                self.read.add(id(p))
            return _Gathered.apply(tensor)

    def _on_whole(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func in (T.__deepcopy__, T.__reduce_ex__):
            p = args[0]
            whole = self.whole(p.detach()).clone()
            alike = nn.Parameter(whole, p.requires_grad) if isinstance(p, nn.Parameter) else whole
            return alike if func is T.__deepcopy__ else alike.__reduce_ex__(*args[1:])
        memory = set()

        def gathered(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            whole = self.whole(value)
            memory.add(whole.untyped_storage().data_ptr())
            return whole

        mesh = next(_tensors(args, kwargs, DTensor)).device_mesh
        result = func(*mapped(args, gathered), **mapped(kwargs, gathered))

        def marked(value: Any) -> Any:
            if not isinstance(value, T) or value.requires_grad or value.untyped_storage().data_ptr() not in memory:
                return value
            return _as_copy(DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False))

        return mapped(result, marked)

    def _shown(self, tensor: Any) -> str:
        whole = self.whole(tensor.detach())
        return repr(nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole)

    # steps

    def _on_parts(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            return _summed(func(*args, **kwargs))
        except (NotImplementedError, RuntimeError) as error:
            if not any(text in str(error) for text in ABOUT_SHARDING):
                raise
        return self._on_whole(func, args, kwargs)

    def _by_kind(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run ``func`` on lists, separately for the sharded and for the whole tensors in them."""
        length = len(args[0])
        results: list[Any] = [None] * length
        for kind in (True, False):
            places = [place for place, each in enumerate(args[0]) if isinstance(each, DTensor) is kind]
            if not places:
                continue
            picked = [[arg[place] for place in places] if isinstance(arg, (list, tuple)) and len(arg) == length else arg for arg in args]
            if kind:
                picked = [_parts_like(arg, picked[0]) if isinstance(arg, list) and len(arg) == len(places) else arg for arg in picked]
            else:
                picked = mapped(picked, lambda value: self.whole(value) if isinstance(value, DTensor) else value)
            for place, result in zip(places, _summed(func(*picked, **kwargs)) or (), strict=False):
                results[place] = result
        return None if results[0] is None else results

    # writing

    def _write(self, func: Callable, target: Any, args: tuple, kwargs: dict) -> Any:
        """Write to the parts if all tensors among the arguments are sharded or scalars; else write to a gathered copy, and keep a part."""
        if target.requires_grad and target.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        own_draws = func in ON_WHOLE or getattr(func, "__module__", "") == nn.init.__name__
        if not own_draws and all(isinstance(each, DTensor) or not each.dim() for each in _tensors(args, kwargs, T)):
            try:
                return func(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if not any(text in str(error) for text in ABOUT_SHARDING):
                    raise
        with torch.no_grad():
            whole = self.whole(target.detach()).clone()

            def gathered(value: Any) -> Any:
                return whole if value is target else self.whole(value) if isinstance(value, DTensor) else value

            func(*mapped(args, gathered), **mapped(kwargs, gathered))
            self._keep(whole, target)
        return target

    def _keep(self, whole: T, target: DTensor) -> None:
        local_tensor(target).copy_(local_tensor(self.shared(whole, target)))

    def shared(self, whole: T, like: DTensor) -> DTensor:
        """This rank's part of ``whole``, placed like ``like``, after a check that all ranks have the same values.

        Raises:
            RankMismatchError: the values differ.
        """
        kind, place = "a value for a sharded tensor", script_place()
        if is_alone():
            refuse_alone(f"writing {kind}")

        def error(all_ranks: list[Any]) -> Exception:
            return RankMismatchError(
                f"{place} gives a sharded tensor of shape {tuple(like.shape)} values that differ between ranks. With strategy='fsdp' each "
                "rank keeps a part of the values, so the tensor would mix those of all ranks. Average the values, `values = "
                "parwrap.reduce_mean(values)`, or draw them inside `with parwrap.same_draws():`."
            )

        agree(self._group, kind, int(checksums([whole])), lambda: None, error)
        return part_of(whole, like)

    def _set(self, func: Callable, target: DTensor, value: Any) -> None:
        """Assign to ``p.data``, by writing into the memory that modules gather from, or to ``p.grad``, which keeps this rank's part."""
        if value is not None and value.shape != target.shape:
            shapes = tuple(value.shape), tuple(target.shape)
            if func != SET_DATA:
                raise UsageError(
                    f"{script_place()} assigns a gradient of shape {shapes[0]} to a parameter of shape {shapes[1]}: assign one of the "
                    "parameter's shape."
                )
            raise UsageError(
                f"{script_place()} assigns a value of shape {shapes[0]} to a parameter of shape {shapes[1]}, which strategy='fsdp' has "
                "sharded. Change the model before its first forward."
            )
        if func == SET_DATA:
            memory = target.detach()
            self._write(T.copy_, memory, (memory, value), {})
            return
        if value is not None and (not isinstance(value, DTensor) or value.placements != target.placements):
            value = self.shared(self.whole(value) if isinstance(value, DTensor) else value, target)
        func(target, value)

    # states of optimizers

    def whole_state(self, state: Any) -> Any:
        """``state`` with its sharded tensors gathered, as one process would have it."""
        return mapped(state, lambda leaf: self.whole(leaf.detach()) if isinstance(leaf, DTensor) else leaf)

    def shard_state(self, optimizer: Optimizer) -> None:
        """Shard the state of ``optimizer`` after the state is loaded or the model is sharded.

        Of each tensor that has the shape of its sharded parameter, this rank keeps its part.
        """
        for p, state in optimizer.state.items():
            if isinstance(p, Sharded):
                for name, value in state.items():
                    if isinstance(value, T) and not is_sharded(value) and value.dim() and value.shape == p.shape:
                        state[name] = self.shared(value, _current(p))


def clip_by_norm(
    clip: Clip, group: Group, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> T:
    """Clip gradients, some of them sharded, by their norm over all ranks, and return this norm.

    All ranks call it, and all-reduce one number.

    Args:
        clip: the intercepted call.
        group: the process group.
        max_norm: as in ``torch.nn.utils.clip_grad_norm_``, like the arguments after it.
    """
    with disable_torch_function():
        parameters = _current(clip.parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        parts = [local_tensor(grad) for grad in grads if isinstance(grad, DTensor)]
        copies = next(_copies(grad) for grad in grads if isinstance(grad, DTensor))
        norm_type, largest = float(norm_type), norm_type == math.inf
        norm = utils.get_total_norm([part for part in parts if part.numel()], norm_type, foreach=foreach).to(group.device, torch.float64)
        reduced = norm if largest else norm**norm_type / copies
        with group.control_message("clip_grad_norm_"):
            dist.all_reduce(reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        norms = [reduced if largest else reduced ** (1 / norm_type)]
        if whole := [grad for grad in grads if not isinstance(grad, DTensor)]:
            norms.append(utils.get_total_norm(whole, norm_type, foreach=foreach).to(reduced))
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(parts[0])
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
                "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        for alike in (True, False):
            same = [p for p in parameters if isinstance(p, DTensor) is alike]
            clip_grads_with_norm_(same, max_norm, total, foreach)
    return total


def _current(values: Any) -> Any:
    """``values`` with each sharded parameter replaced by its ``DTensor``."""
    return mapped(values, lambda value: value.__dict__["sharded"] if type(value) is Sharded else value)


def _parameter(thing: Any) -> Sharded | None:
    """The script's parameter that stands for ``thing``, or ``None``."""
    return thing.__dict__["parameter"]() if isinstance(thing, DTensor) and "parameter" in thing.__dict__ else None


def _settled(like: Any) -> list[Any]:
    return [placement if isinstance(placement, Shard) else Replicate() for placement in like.placements]


def _copies(like: DTensor) -> int:
    """How many ranks hold each part: one on each node if shards stay within nodes."""
    return math.prod(like.device_mesh.size(dim) for dim, placement in enumerate(like.placements) if not isinstance(placement, Shard))


def _summed(result: Any) -> Any:
    """``result`` with the ranks' partial sums added up, because torch does not always handle further operations on partial sums."""

    def summed(value: Any) -> Any:
        if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
            return value.redistribute(placements=_settled(value))
        return value

    return mapped(result, summed)


def _parts_like(values: list[Any], like: list[Any]) -> list[Any]:
    """``values`` for use with the sharded tensors ``like``: this rank's part of each whole tensor."""
    return [
        part_of(value, of) if isinstance(value, T) and not isinstance(value, DTensor) and value.dim() else value
        for value, of in zip(values, like, strict=True)
    ]


def _tensors(args: tuple, kwargs: Mapping[str, Any], kind: type) -> Iterator[Any]:
    for each in (*args, *kwargs.values()):
        if isinstance(each, kind):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(tuple(each), {}, kind)


def _target(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The sharded tensor, or the list of tensors, that the operation ``name`` writes to; ``None`` if it writes to none."""
    if isinstance(kwargs.get("out"), DTensor):
        return kwargs["out"]
    if not ((name.endswith("_") and not name.endswith("__")) or name in IN_PLACE or name == "__setitem__"):
        return None
    target = args[0] if args else kwargs.get("tensor")
    return target if isinstance(target, (DTensor, list, tuple)) else None


def _is_copy(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and "is_copy" in tensor.__dict__


def _as_copy(result: Any) -> Any:
    """Return ``result`` with a mark: it is a slice or view of a gathered copy, so a write to it would be lost."""
    if isinstance(result, DTensor):
        result.__dict__["is_copy"] = True
    return result


def _refuse_lost_write(name: str) -> NoReturn:
    raise UsageError(
        f"{script_place()} writes by {name} to a slice or view of a tensor that strategy='fsdp' has sharded. The write would be lost, "
        "because its target is a copy. Assign to an index of the tensor itself, as in p.data[i] = value, or use strategy='ddp'."
    )


def refuse_alone(what: str) -> NoReturn:
    """Raise :class:`UsageError`: ``what`` needs all ranks, but only one rank runs the current function."""
    raise UsageError(
        f"{script_place()} needs the other ranks for {what}, because with strategy='fsdp' each rank has only a part of the model. But code "
        "inside @parwrap.rank_zero_only or rank_zero_first runs without them: do this on all ranks before that code, which can then save "
        "or print the result."
    )


def refuse_hook(where: str) -> NoReturn:
    """Raise :class:`UsageError` for a hook that torch would not call, or would call with a part of the gradient. ``where`` describes it."""
    raise UsageError(
        f"a hook {where} would not get the gradient of the whole parameter: with strategy='fsdp', a backward computes that gradient for a "
        "gathered copy, and the parameter gets only this rank's part of it. Change p.grad after backward(), or use strategy='ddp'."
    )


def _refuse_grad() -> NoReturn:
    raise UsageError(
        f"torch.autograd.grad at {script_place()} asks for gradients of sharded parameters, but with strategy='fsdp' only backward() "
        "computes them: call loss.backward() and read p.grad, or use strategy='ddp'."
    )
