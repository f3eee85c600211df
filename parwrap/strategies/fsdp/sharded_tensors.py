"""Operations of a script on sharded tensors outside training: each returns the same as with whole tensors.

Torch shards an operation where it can. If a sharded tensor is combined with a whole one, or must be whole (printed, copied, pickled), it is
gathered; gradients go back as the mean over ranks. When values are written to a sharded tensor, each rank keeps its part. ``fsdp.py``
decides when to shard a model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parwrap.coordination.call_site import location
from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.torch_private.fsdp import local_tensor
from parwrap.torch_private.pytree import tree_map_only
from parwrap.torch_private.tensors import disable_torch_function

__all__ = ["Moved", "ShardedTensors", "is_sharded", "refuse_hook", "sharded_like"]

T = torch.Tensor

WHOLE = frozenset(
    {
        *(T.__bool__, T.__float__, T.__int__, T.__index__, T.__complex__, T.__format__, T.__array__, T.__contains__),
        *(T.__deepcopy__, T.__reduce_ex__, T.item, T.tolist, T.numpy, T.equal, torch.equal, T.allclose, torch.allclose),
        *(torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, T.bernoulli, torch.normal, torch.dropout),
    }
)
"""Operations that need a whole tensor, or must draw the same random numbers as for a whole tensor."""

DRAWING = frozenset((T.normal_, T.uniform_, T.random_, T.bernoulli_, T.exponential_, T.cauchy_, T.geometric_, T.log_normal_, T.__setitem__))
"""Operations that write to a whole copy first: random numbers, and elements by index."""

IN_PLACE = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")) | {
    "__setitem__"
}

VIEWS = frozenset(("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "diagonal", "detach")) | {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
}
"""Operations whose result is a view of a whole tensor, but may be a copy of a sharded one."""

GRAD = T.grad.__get__  # type: ignore[union-attr]
SETTERS = T.data.__set__, T.grad.__set__  # type: ignore[attr-defined, union-attr]


def is_sharded(thing: Any) -> bool:
    """Whether ``thing`` is a tensor of which this rank has a part."""
    return isinstance(thing, DTensor)


def sharded_like(whole: torch.Tensor, like: Any) -> DTensor:
    """This rank's part of ``whole``, which all ranks have, placed like ``like``; nothing is sent."""
    whole = whole.detach().to(like.device)
    mesh = like.device_mesh
    part = DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(placements=_settled(like)).to_local()
    own = part.contiguous().clone()
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(own, mesh, _settled(like), run_check=False, shape=whole.shape, stride=stride)


class Moved(nn.Parameter):
    """Replaces a parameter whose module is sharded while a script still holds it: it stands for the sharded one."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*_current(args), **_current(kwargs or {}))

    def __deepcopy__(self, memo: dict) -> Any:
        return copy.deepcopy(_current(self), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(_current(self))

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, like ``DTensor.full_tensor()``."""
        return _current(self).full_tensor()


class _Gathered(torch.autograd.Function):
    """The whole of a sharded tensor; its gradient is the mean of the ranks' gradients, of which each keeps its part."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, _settled(tensor)
        whole = tensor.full_tensor()
        return whole.clone() if whole.data_ptr() == local_tensor(tensor).data_ptr() else whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        mean = DTensor.from_local(grad.contiguous(), ctx.mesh, [Partial("avg")], run_check=False)
        return mean.redistribute(placements=ctx.placements)


class ShardedTensors(Interceptor):
    """Carries out operations on sharded tensors.

    Args:
        enter: a function, called before ranks exchange their parts.
        past: a function, called after the exchange.
    """

    def __init__(self, enter: Callable[[], None], past: Callable[[], None]) -> None:
        self._enter, self._past = enter, past

    @intercepts
    def call_sharded(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func``, which has tensors of ``types`` among its arguments."""
        if func is T.backward:
            return self.whole(args[0]).backward(*args[1:], **kwargs)
        with disable_torch_function():
            if Moved in types:
                args, kwargs = _current(args), _current(kwargs)
            return self._call(func, args, kwargs)

    def _call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            result = func(*args)
            return _marked(result, args[0]) if "copy_of_sharded" in args[0].__dict__ and func != GRAD else result
        if func is T.register_hook:
            refuse_hook(f"at {location()} on a sharded parameter")
        if func is torch.autograd.grad:
            _refuse_grad()
        if name == "__repr__":
            return self.show_sharded(args[0])
        if name == "__set__" and func in SETTERS:
            return self._set(func, *args)
        if func is T.__iter__:
            return iter(self._call(torch.unbind, args, kwargs))
        if func in WHOLE:
            return self._on_whole(func, args, kwargs)
        if _writes(name, kwargs) and func is not T.requires_grad_:
            _refuse_lost_write(name, args)
        if func in DRAWING or getattr(func, "__module__", "") == nn.init.__name__:
            return self._write(func, args, kwargs)
        lists = "foreach" in name or (_writes(name, kwargs) and bool(args) and isinstance(args[0], (list, tuple)))
        if not (_mixed(args, kwargs) if not lists else _has_whole(args)):
            try:
                result = self._settled(func(*args, **kwargs))
                return _marked(result, args[0]) if name in VIEWS and args and isinstance(args[0], DTensor) else result
            except (NotImplementedError, RuntimeError):
                if lists or not _about_sharding():
                    raise
                if _writes(name, kwargs):
                    return self._write(func, args, kwargs)
                result = self._on_whole(func, args, kwargs)
                return _marked(_replicated(result, args[0]), args[0]) if name in VIEWS and not args[0].requires_grad else result
        if lists:
            return self._each_kind(func, args, kwargs)
        return self._write(func, args, kwargs) if _writes(name, kwargs) else self._on_whole(func, args, kwargs)

    @intercepts
    def show_sharded(self, tensor: DTensor) -> str:
        """The ``repr`` of ``tensor``, with all its values."""
        whole = self.whole(tensor.detach())
        return repr(nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole)

    def whole(self, tensor: Any) -> torch.Tensor:
        """All of ``tensor``, on every rank, as part of the graph; the ranks' gradients for it are averaged."""
        self._enter()
        with disable_torch_function():
            whole = _Gathered.apply(tensor)
        self._past()
        return whole

    def _settled(self, result: Any) -> Any:
        """``result`` with the ranks' partial sums added up, because torch does not always handle further operations on partial sums."""
        if isinstance(result, DTensor) and any(placement.is_partial() for placement in result.placements):
            self._enter()
            result = result.redistribute(placements=_settled(result))
            self._past()
        elif isinstance(result, (list, tuple)) and any(isinstance(each, DTensor) for each in result):
            result = type(result)([self._settled(each) for each in result])
        return result

    def _on_whole(self, func: Callable, args: Any, kwargs: Any) -> Any:
        if func in (T.__deepcopy__, T.__reduce_ex__):
            p = args[0]
            whole = self.whole(p.detach()).clone()
            alike = nn.Parameter(whole, p.requires_grad) if isinstance(p, nn.Parameter) else whole
            return alike if func is T.__deepcopy__ else alike.__reduce_ex__(*args[1:])
        if func in (T.numpy, T.__array__, T.__format__) and args[0].requires_grad:
            return func(self.whole(args[0].detach()).requires_grad_(), *args[1:], **kwargs)
        return func(*self._gathered(args), **self._gathered(kwargs))

    def _gathered(self, values: Any) -> Any:
        return tree_map_only(DTensor, self.whole, values)

    def _write(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Write to a whole copy, and keep this rank's part."""
        target = kwargs.get("out", kwargs.get("tensor", args[0] if args else None))
        if not isinstance(target, DTensor):
            return self._on_whole(func, args, kwargs)
        if target.requires_grad and target.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        with torch.no_grad():
            if func is T.copy_ and not isinstance(args[1], DTensor):
                copy = torch.as_tensor(args[1]).to(target.dtype).expand(target.shape)
            else:
                copy = self.whole(target.detach()).clone()
                func(*(copy if each is target else self._gathered(each) for each in args), **{
                    name: copy if each is target else self._gathered(each) for name, each in kwargs.items()
                })  # fmt: skip
            local_tensor(target).copy_(local_tensor(sharded_like(copy, target)))
        return target

    def _set(self, func: Callable, target: DTensor, value: Any) -> None:
        """``p.data = value`` writes to the memory that modules gather from; ``p.grad = value`` keeps this rank's part of the value."""
        if value is not None and value.shape != target.shape:
            raise UsageError(
                f"a parameter of shape {tuple(target.shape)} is sharded by strategy='fsdp' and cannot be assigned a value of shape "
                f"{tuple(value.shape)} at {location()}. Change the model before you build its optimizer."
            )
        if func == SETTERS[0]:
            with torch.no_grad():
                self._write(T.copy_, (target.detach(), value), {})
            return
        if value is not None and (not isinstance(value, DTensor) or value.placements != target.placements):
            value = sharded_like(self._gathered(value), target)
        func(target, value)

    def _each_kind(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run ``func`` separately for the sharded and for the whole tensors in its lists."""
        length = len(args[0])
        of_first = [isinstance(each, DTensor) for each in args[0]]
        results: list[Any] = [None] * length
        for kind in (True, False):
            places = [place for place in range(length) if of_first[place] is kind]
            if not places:
                continue
            picked = [[arg[place] for place in places] if isinstance(arg, (list, tuple)) and len(arg) == length else arg for arg in args]
            if kind:
                first = [_parts_like(arg, picked[0]) if isinstance(arg, list) and len(arg) == len(places) else arg for arg in picked]
                ran = func(*first, **kwargs)
            else:
                ran = func(*self._gathered(picked), **kwargs)
            for place, result in zip(places, ran or (), strict=False):
                results[place] = result
        return None if results[0] is None else results


def _parts_like(values: list[Any], like: list[Any]) -> list[Any]:
    """``values`` for use with the sharded tensors ``like``: this rank's part of each whole tensor."""
    return [
        sharded_like(value, of) if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() else value
        for value, of in zip(values, like, strict=True)
    ]


def _settled(like: Any) -> list[Any]:
    return [placement if isinstance(placement, Shard) else Replicate() for placement in like.placements]


def _tensors(args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from (one for one in each if isinstance(one, torch.Tensor))


def _mixed(args: tuple, kwargs: dict) -> bool:
    """Whether the arguments contain a whole tensor that is not a plain number; a number is the same for all parts."""
    whole = numbers = False
    of_parts = 0
    for tensor in _tensors(args, kwargs):
        if isinstance(tensor, DTensor):
            of_parts = max(of_parts, tensor.dim())
        elif tensor.dim() or tensor.requires_grad:
            whole = True
        else:
            numbers = True
    return whole or (numbers and not of_parts)


def _has_whole(args: tuple) -> bool:
    listed = (each for arg in args if isinstance(arg, (list, tuple)) for each in arg)
    return any(isinstance(each, torch.Tensor) and not isinstance(each, DTensor) for each in listed)


def _writes(name: str, kwargs: dict) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE or isinstance(kwargs.get("out"), DTensor)


def _about_sharding() -> bool:
    """Whether the exception being handled means that torch cannot shard the operation, rather than that the call is invalid."""
    text = str(sys.exc_info()[1])
    return any(said in text for said in ("DTensor", "Sharding propagation", "shard", "sharding strategy", "is not supported"))


def _current(values: Any) -> Any:
    """``values`` with each moved parameter replaced by the sharded one that it stands for."""
    with disable_torch_function():
        return tree_map_only(Moved, lambda moved: moved.__dict__["sharded"], values)


def _replicated(result: Any, like: DTensor) -> Any:
    """``result`` with whole tensors as replicated ``DTensor`` objects, so that writes to them are noticed."""
    return tree_map_only(torch.Tensor, lambda whole: DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False), result)


def _marked(result: Any, base: DTensor) -> Any:
    """``result``, a view of ``base``; marked if it is a copy, because writes to it would be lost."""
    if isinstance(result, (list, tuple)):
        return type(result)([_marked(each, base) for each in result])
    if isinstance(result, DTensor) and "copy_of_sharded" not in result.__dict__:
        memory = local_tensor(result).untyped_storage().data_ptr()
        if "copy_of_sharded" in base.__dict__ or memory != local_tensor(base).untyped_storage().data_ptr():
            result.__dict__["copy_of_sharded"] = True
    return result


def _refuse_lost_write(name: str, args: tuple) -> None:
    if args and isinstance(args[0], DTensor) and "copy_of_sharded" in args[0].__dict__:
        raise UsageError(
            f"{name} at {location()} writes to a slice or view of a tensor that strategy='fsdp' has sharded. The write would be lost, "
            "because its target is a copy. Assign to an index of the tensor itself, as in p.data[i] = value, or use strategy='ddp'."
        )


def refuse_hook(where: str) -> NoReturn:
    """Raise :class:`UsageError` for a hook that torch would not call."""
    raise UsageError(
        f"a hook {where} would never see a gradient: with strategy='fsdp', gradients are reduced before they get there. Change p.grad "
        "after backward(), or use strategy='ddp'."
    )


def _refuse_grad() -> NoReturn:
    raise UsageError(
        f"torch.autograd.grad at {location()} asks for gradients of sharded parameters, but with strategy='fsdp' only backward() "
        "computes them: call loss.backward() and read p.grad, or use strategy='ddp'."
    )
