"""What each of torch's functions does with rows: one line an operation, and a handler for each kind of them.

A handler gets the function and its arguments, runs it on this rank's rows, and says where rows lie in the result. It returns
``NOT_BY_ROWS`` where the call needs other ranks' rows. ``kinds`` is the table; ``tests/rows/test_table.py`` runs every row of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parwrap.rows.indexing import get_item, set_item
from parwrap.rows.losses import LOSSES, cross_entropy, loss
from parwrap.rows.shapes import SHAPES, cat, chunk, split, squeezed, stack, unbind
from parwrap.rows.tensors import (
    NOT_BY_ROWS,
    Borrowed,
    OfBatch,
    Partial,
    Rows,
    as_partial,
    as_rows,
    collected,
    current,
    handlers,
    named,
    plain,
)
from parwrap.torch_private.functions import FOREACH, NATIVE

__all__ = ["kinds"]


ELEMENTWISE = named("""
add sub subtract mul multiply div divide true_divide floor_divide pow float_power remainder fmod neg negative positive abs absolute
exp expm1 exp2 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan arcsin arccos arctan atan2 arctan2 sinh cosh tanh asinh
acosh atanh sigmoid expit relu relu6 gelu silu mish elu celu selu leaky_relu softplus softsign hardtanh hardswish hardsigmoid logsigmoid
threshold tanhshrink softshrink hardshrink prelu eq ne lt le gt ge not_equal greater less greater_equal less_equal isnan isinf
isfinite isposinf isneginf isclose logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not
bitwise_left_shift bitwise_right_shift clamp clip clamp_min clamp_max where maximum minimum fmax fmin sign sgn signbit round floor ceil
trunc fix frac erf erfc erfinv lerp addcmul addcdiv nan_to_num reciprocal masked_fill copysign hypot logaddexp logaddexp2 logit sinc
heaviside xlogy lgamma digamma deg2rad rad2deg gcd lcm float double half int long bool bfloat16 short byte char to cpu cuda detach clone
contiguous type_as conj angle real imag pin_memory copy_ fill_ zero_ requires_grad_ rsub polar complex
__rsub__ __radd__ __rmul__ __rdiv__ __rtruediv__ __rfloordiv__ __rpow__ __rmod__
__add__ __sub__ __mul__ __truediv__ __div__ __floordiv__ __pow__ __mod__ __and__ __or__ __xor__ __invert__ __neg__ __pos__ __abs__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__
__ior__ __ixor__ __rand__ __ror__ __rxor__ __lshift__ __rshift__
""")
"""Functions that work number by number, also under their names with ``_``."""

ALONG = named("""
softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort argsort flip glu normalize gumbel_softmax topk kthvalue
""")
"""Functions that work along a dimension and keep it: where it is among the arguments, and its default."""

AT: dict[str, tuple[int, Any]] = {
    "sort": (1, -1), "argsort": (1, -1), "glu": (1, -1), "normalize": (2, 1), "gumbel_softmax": (4, -1), "topk": (2, -1),
    "kthvalue": (2, -1),
    "norm": (2, None), "vector_norm": (2, None), "cosine_similarity": (2, 1), "diff": (2, -1), "roll": (2, None), "select": (1, None),
    "narrow": (1, None), "index_select": (1, None),
}  # fmt: skip
"""Where the dimension is among the arguments, the tensor being number 0, and its default. Where nothing is said: 1 and none."""

REDUCTIONS = named("""
sum mean prod amax amin argmax argmin any all logsumexp var std nansum nanmean count_nonzero max min median nanmedian mode norm
vector_norm aminmax var_mean std_mean
""")
"""Functions that reduce dimensions."""

LIKE = named("""
zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
""")
DRAWS_LIKE = {"randn_like": torch.randn, "rand_like": torch.rand}

LAYERS = named("""
linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d
avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d interpolate upsample pad embedding layer_norm rms_norm group_norm instance_norm unfold fold grid_sample
pixel_shuffle pixel_unshuffle pairwise_distance local_response_norm scaled_dot_product_attention channel_shuffle lp_pool1d lp_pool2d
""")
"""Layers as functions, whose first argument has a sample in each row."""

READS = named("""
size dim ndimension numel nelement __len__ is_floating_point is_complex storage_offset element_size get_device
""")


def _mark(result: Any, layout: Any, dim: int) -> Any:
    """Make the tensors of ``result``, which are new, rows."""
    if isinstance(result, Tensor):
        return as_rows(result, layout, dim)
    if type(result) in (tuple, list):
        return type(result)(_mark(each, layout, dim) for each in result)
    for each in result:  # torch's named tuples, whose tensors are new
        as_rows(each, layout, dim)
    return result


def fit(operand: Any, layout: Any, from_right: int) -> Any:
    """What this rank needs of a plain ``operand`` beside rows in the dimension ``from_right``; ``NOT_BY_ROWS`` if that cannot be said."""
    if not isinstance(operand, Tensor) or operand.ndim < -from_right:
        return operand
    size = operand.shape[from_right]
    if size == 1:
        return operand
    return layout.own(operand, operand.ndim + from_right) if size == layout.n else NOT_BY_ROWS


def elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    layout: Any = None
    from_right, most, tensors = 0, 0, False
    for each in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(each, Rows):
            here = each.row_dim - each.ndim
            if layout is None:
                layout, from_right = each.row_layout, here
            elif here != from_right or (each.row_layout is not layout and each.row_layout != layout):
                return NOT_BY_ROWS
            most = max(most, each.ndim)
        elif isinstance(each, Tensor):
            tensors = True
        elif isinstance(each, (list, tuple)) and any(isinstance(one, Tensor) for one in each):
            return NOT_BY_ROWS
    if layout is None:
        return of_partial(func, args, kwargs)
    target = args[0] if _writes(func) else None
    if target is not None and (not isinstance(target, Rows) or target.ndim < most):
        return NOT_BY_ROWS
    if "out" in kwargs:
        return NOT_BY_ROWS
    if tensors:
        args = tuple(_operand(each, layout, from_right) for each in args)
        kwargs = {name: _operand(each, layout, from_right) for name, each in kwargs.items()}
        if any(each is NOT_BY_ROWS for each in (*args, *kwargs.values())):
            return NOT_BY_ROWS
        if target is not None and any(isinstance(each, Tensor) and each.ndim > most for each in args):
            return NOT_BY_ROWS
    result = func(*args, **kwargs)
    if result is target or isinstance(result, Rows):
        return result
    return _mark(result, layout, result.ndim + from_right) if isinstance(result, Tensor) else NOT_BY_ROWS


def broadcast(func: Any, args: tuple, kwargs: dict) -> Any:
    """``broadcast_tensors``, by which ``torch.distributions`` makes its parameters alike."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    x = next((each for each in tensors if isinstance(each, Rows)), None)
    if x is None:
        return NOT_BY_ROWS
    layout, from_right, most = x.row_layout, x.row_dim - x.ndim, max(each.ndim for each in tensors)
    fitted = []
    for each in tensors:
        if isinstance(each, Rows) and (each.row_layout != layout or each.row_dim - each.ndim != from_right):
            return NOT_BY_ROWS
        if (mine := plain(each) if isinstance(each, Rows) else fit(collected(each), layout, from_right)) is NOT_BY_ROWS:
            return NOT_BY_ROWS
        fitted.append(mine)
    return tuple(as_rows(each, layout, most + from_right) for each in func(*fitted))


def _operand(each: Any, layout: Any, from_right: int) -> Any:
    if isinstance(each, Rows) or not isinstance(each, Tensor):
        return each
    return fit(collected(each), layout, from_right)


def _writes(func: Any) -> bool:
    name = func.__name__
    return (name[-1] == "_" and name[-2] != "_") or (name.startswith("__i") and name != "__invert__")


LINEAR = frozenset(named("""
add sub subtract mul multiply div divide true_divide neg negative positive float double half bfloat16 to cpu cuda detach clone
contiguous type_as view reshape squeeze unsqueeze rsub __rsub__ __radd__ __rmul__ __add__ __sub__ __mul__ __truediv__ __neg__ __iadd__
__isub__ __imul__ __itruediv__ sum mean requires_grad_ view_as flatten ravel
"""))  # fmt: skip
"""Functions after which a mean over ranks is still one."""


def of_partial(func: Any, args: tuple, kwargs: dict) -> Any:
    """A function that a mean over ranks goes through, if it does."""
    name = func.__name__
    base = name[:-1] if name[-1] == "_" and name[-2] != "_" and name != "requires_grad_" else name
    if base not in LINEAR or not args or "out" in kwargs:
        return NOT_BY_ROWS
    partials = [each for each in args if isinstance(each, Partial)]
    if not partials or any(isinstance(each, Borrowed) for each in args):
        return NOT_BY_ROWS
    times = "mul" in base
    if len(partials) > 1 and (times or "div" in base):
        return NOT_BY_ROWS
    if "div" in base and not isinstance(args[0], Partial):
        return NOT_BY_ROWS
    if _writes(func) and not isinstance(args[0], Partial):
        return NOT_BY_ROWS
    if base in ("float", "double", "half", "bfloat16", "to", "type_as") and not args[0].is_floating_point() and len(partials) > 1:
        return NOT_BY_ROWS
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor) or result is args[0]:
        return result
    if not (result.is_floating_point() or result.is_complex()) and args[0] is partials[0] and args[0].is_floating_point():
        return NOT_BY_ROWS  # an integer of a mean is not the mean of integers
    return as_partial(result)


def _dims(name: str, args: tuple, kwargs: dict, ndim: int) -> tuple[int, ...] | None:
    """The dimensions that a call names, counted from the left; ``None`` if it names none."""
    position, default = AT.get(name, (1, None))
    found = kwargs.get("dim", kwargs.get("axis", kwargs.get("dims", default)))
    if "dim" not in kwargs and "axis" not in kwargs and "dims" not in kwargs and len(args) > position:
        found = args[position]
        if isinstance(found, (bool, Tensor)):
            return None
        if name in ("flip", "count_nonzero") and len(args) > 2:
            found = tuple(map(int, args[1:]))
    if found is None or isinstance(found, str):
        return None
    return tuple(each % ndim for each in (found if isinstance(found, (tuple, list)) else (found,)))


def along(name: str) -> Callable[[Any, tuple, dict], Any]:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else None
        if not isinstance(x, Rows) or "out" in kwargs or _writes(func):
            return NOT_BY_ROWS
        dims = _dims(name, args, kwargs, x.ndim)
        if not dims or x.row_dim in dims or any(isinstance(each, (Rows, Partial)) for each in args[1:]):
            return NOT_BY_ROWS
        dim = x.row_dim - (name == "kthvalue" and not _keeps(name, args, kwargs) and dims[0] < x.row_dim)
        if name == "gumbel_softmax":
            return NOT_BY_ROWS  # it draws
        return _mark(func(*args, **kwargs), x.row_layout, dim)

    return handler


def _keeps(name: str, args: tuple, kwargs: dict) -> bool:
    if name == "count_nonzero":
        return False
    if "keepdim" in kwargs:
        return bool(kwargs["keepdim"])
    at = {"norm": 3, "vector_norm": 3, "kthvalue": 3, "var": 3, "std": 3, "var_mean": 3, "std_mean": 3}.get(name, 2)
    return len(args) > at and args[at] is True


def reduction(name: str) -> Callable[[Any, tuple, dict], Any]:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Partial):
            return of_partial(func, args, kwargs)
        if not isinstance(x, Rows) or "out" in kwargs:
            return NOT_BY_ROWS
        if name in ("max", "min") and (isinstance(kwargs.get("other"), Tensor) or (len(args) > 1 and isinstance(args[1], Tensor))):
            return elementwise(func, args, kwargs)
        if any(isinstance(each, (Rows, Partial)) for each in args[1:]):
            return NOT_BY_ROWS
        dims = _dims(name, args, kwargs, x.ndim)
        keeps = _keeps(name, args, kwargs)
        if dims is not None and dims and x.row_dim not in dims:
            dim = x.row_dim if keeps else x.row_dim - sum(each < x.row_dim for each in set(dims))
            return _mark(func(*args, **kwargs), x.row_layout, dim)
        if name in ("sum", "mean"):
            return _sum_over_rows(name, x, dims, keeps, kwargs.get("dtype"))
        if (
            dims is None
            and len(args) == 1
            and not kwargs
            and not x.requires_grad
            and name in ("max", "min", "amax", "amin", "any", "all", "prod")
        ):
            return _small(func, x)
        return NOT_BY_ROWS

    return handler


def _sum_over_rows(name: str, x: Rows, dims: tuple[int, ...] | None, keeps: bool, dtype: Any) -> Any:
    local, size = plain(x), current().between.size
    if local.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32) and dtype is None:
        local = local.long()
    options = {"dtype": dtype} if dtype is not None else {}
    over = dims or tuple(range(x.ndim))
    if name == "sum":
        return as_partial(local.sum(over, keepdim=keeps, **options) * size)
    if x.row_layout.mine == 0:
        return as_partial(local.sum(over, keepdim=keeps, **options))
    mean = local.mean(over, keepdim=keeps, **options)
    return as_partial(mean if x.row_layout.weight == 1.0 else mean * x.row_layout.weight)


def _small(func: Any, x: Rows) -> Any:
    """A reduction of everything: of each rank's rows first, then of what the ranks have found."""
    if 0 in x.row_layout.per_rank or not x.numel():
        return NOT_BY_ROWS
    between = current().between
    return func(torch.cat(between.parts(func(plain(x)).reshape(1), [1] * between.size)))


def like(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Rows):
        return NOT_BY_ROWS
    result = func(*args, **kwargs)
    return leaf(as_rows(result, x.row_layout, x.row_dim)) if func.__name__.endswith("like") else result


def draws_like(name: str) -> Callable[[Any, tuple, dict], Any]:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs.pop("input")
        if not isinstance(x, Rows):
            return NOT_BY_ROWS
        given = {"dtype": x.dtype, "device": x.device, **kwargs}
        given.pop("memory_format", None)
        wants = given.pop("requires_grad", False)
        drawn = x.row_layout.own(DRAWS_LIKE[name](whole_shape(x), **given), x.row_dim).clone()
        return leaf(as_rows(drawn.requires_grad_(wants), x.row_layout, x.row_dim))

    return handler


def by_index(func: Any, args: tuple, kwargs: dict) -> Any:
    """``gather``, ``scatter`` and others whose index says where, along another dimension than that of the rows."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else args[2] if len(args) > 2 else None)
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not isinstance(dim, int) or any(each.row_dim == dim % each.ndim for each in tensors if isinstance(each, Rows)):
        return NOT_BY_ROWS
    if func.__name__.startswith("index_fill"):
        x, index = tensors[:2]
        return (
            _kept(func(*args, **kwargs), x) if isinstance(x, Rows) and not isinstance(index, OfBatch) and len(tensors) == 2 else NOT_BY_ROWS
        )
    return elementwise(func, args, kwargs) if len({each.ndim for each in tensors if each.ndim}) == 1 else NOT_BY_ROWS


def _kept(result: Tensor, x: Rows) -> Tensor:
    """``result`` with the rows where they are in ``x``; it may be ``x`` itself."""
    return as_rows(result, x.row_layout, x.row_dim)


def same_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """Calls that add or take away a last dimension, or that of their argument, behind the rows."""
    x = args[0] if args else None
    if not isinstance(x, Rows) or any(isinstance(each, OfBatch) for each in args[1:]):
        return NOT_BY_ROWS
    if func.__name__ == "view_as_complex" and x.row_dim == x.ndim - 1:
        return NOT_BY_ROWS
    if func.__name__ == "unfold" and kwargs.get("dimension", args[1] if len(args) > 1 else 0) % x.ndim == x.row_dim:
        return NOT_BY_ROWS
    return _kept(func(*args, **kwargs), x)


def shape_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """``unsqueeze_``, ``t_`` and others: like the function without ``_``, on the same object."""
    x = args[0]
    if not isinstance(x, Rows):
        return NOT_BY_ROWS
    name = func.__name__[:-1]
    after = handlers[getattr(Tensor, name)](getattr(Tensor, name), args, kwargs)
    if after is NOT_BY_ROWS:
        return NOT_BY_ROWS
    layout, dim = after.row_layout, after.row_dim
    func(*args, **kwargs) if name != "squeeze" else x.squeeze_(squeezed(x, args, kwargs))
    x.row_layout, x.row_dim = layout, dim
    return x


def memory(func: Any, args: tuple, kwargs: dict) -> Any:
    """How the whole would lie in memory."""
    x = args[0]
    if not isinstance(x, Rows):
        return func(*args, **kwargs)
    order = sorted(range(x.ndim), key=lambda dim: (-x.stride()[dim], dim))
    sizes, strides, step = whole_shape(x), [0] * x.ndim, 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(sizes[dim], 1)
    return func(torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta"), *args[1:], **kwargs)


def dropout(func: Any, args: tuple, kwargs: dict) -> Any:
    """Dropout outside of modules: the draws are those of the whole batch."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Rows) or any(isinstance(each, Rows) for each in args[1:]) or not x.is_floating_point() or kwargs.get("inplace"):
        return NOT_BY_ROWS
    mask = func(torch.ones(whole_shape(x), dtype=x.dtype, device=x.device), *args[1:], **kwargs)
    return as_rows(plain(x) * x.row_layout.own(mask, x.row_dim), x.row_layout, x.row_dim)


def layer(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0] if args else kwargs.get("input")
    name = func.__name__
    if not isinstance(x, Rows) or 0 in x.row_layout.per_rank:
        return NOT_BY_ROWS
    if (name == "embedding" and x.is_floating_point()) or (name == "pairwise_distance" and x.ndim < 2):
        return NOT_BY_ROWS
    if name in ("scaled_dot_product_attention", "pairwise_distance", "grid_sample", "bilinear"):
        if kwargs.get("dropout_p") or len(args) > 4 or x.row_dim != 0 or (name[0] == "s" and x.ndim < 3):
            return NOT_BY_ROWS
        for each in (*args[1:3], kwargs.get("attn_mask")):
            if isinstance(each, Tensor) and not isinstance(each, Rows) and (name != "bilinear" or each is args[1]):
                return NOT_BY_ROWS
            if isinstance(each, Rows) and (each.row_dim != 0 or each.row_layout != x.row_layout or each.ndim != x.ndim):
                return NOT_BY_ROWS
        return as_rows(func(*args, **kwargs), x.row_layout, 0)
    if any(isinstance(each, (Rows, Partial)) for each in (*args[1:], *kwargs.values())):
        return NOT_BY_ROWS
    if name == "embedding":
        return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim)
    if name == "linear":
        return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim) if x.row_dim < x.ndim - 1 else NOT_BY_ROWS
    if name == "layer_norm" or name == "rms_norm":
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim) if x.row_dim < x.ndim - len(shape) else NOT_BY_ROWS
    if name == "pad":
        widths = args[1] if len(args) > 1 else kwargs.get("pad", ())
        return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim) if len(widths) // 2 < x.ndim - x.row_dim else NOT_BY_ROWS
    if x.row_dim != 0 or x.ndim < 3 or (name.endswith("3d") and x.ndim < 5) or (name.endswith("2d") and x.ndim < 4):
        return NOT_BY_ROWS
    return _mark(func(*args, **kwargs), x.row_layout, 0)


def batch_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """A batch norm outside of modules that have parameters: in eval mode each row by itself."""
    training = args[5] if len(args) > 5 else kwargs.get("training", False)
    x = args[0] if args else kwargs.get("input")
    return as_rows(func(*args, **kwargs), x.row_layout, 0) if isinstance(x, Rows) and not training and x.row_dim == 0 else NOT_BY_ROWS


def one_hot(func: Any, args: tuple, kwargs: dict) -> Any:
    x, classes = args[0], args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return as_rows(func(plain(x), classes), x.row_layout, x.row_dim) if isinstance(x, Rows) and classes > 0 else NOT_BY_ROWS


def cosine_similarity(func: Any, args: tuple, kwargs: dict) -> Any:
    x, y = args[0], args[1] if len(args) > 1 else kwargs.get("x2")
    if not (isinstance(x, Rows) and isinstance(y, Rows)) or x.row_layout != y.row_layout or x.row_dim != y.row_dim or x.ndim != y.ndim:
        return NOT_BY_ROWS
    dims = _dims("cosine_similarity", args, kwargs, x.ndim)
    assert dims is not None
    return NOT_BY_ROWS if dims[0] == x.row_dim else as_rows(func(*args, **kwargs), x.row_layout, x.row_dim - (dims[0] < x.row_dim))


def matmul(func: Any, args: tuple, kwargs: dict) -> Any:
    if len(args) < 2 or kwargs:
        return NOT_BY_ROWS
    a, b = args[:2]
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if isinstance(a, Partial) or isinstance(b, Partial):
        return NOT_BY_ROWS
    if isinstance(a, Rows) and isinstance(b, Rows):
        if a.row_layout != b.row_layout:
            return NOT_BY_ROWS
        if a.ndim == b.ndim >= 3 and a.row_dim == b.row_dim < a.ndim - 2:
            return as_rows(torch.matmul(plain(a), plain(b)), a.row_layout, a.row_dim)
        if b.ndim in (1, 2) and a.ndim in (1, 2) and a.row_dim == a.ndim - 1 and b.row_dim == max(b.ndim - 2, 0):  # over the rows
            return as_partial(torch.matmul(plain(a), plain(b)) * current().between.size)
        return NOT_BY_ROWS
    if isinstance(a, Rows):
        if b.ndim > 2 or a.row_dim == a.ndim - 1:
            return NOT_BY_ROWS
        return as_rows(torch.matmul(plain(a), b), a.row_layout, a.row_dim)
    if a.ndim > 2 or b.row_dim != b.ndim - 1 or b.ndim != 2:
        return NOT_BY_ROWS
    result = torch.matmul(a, plain(b))
    return as_rows(result, b.row_layout, result.ndim - 1)


# what a tensor says of itself


def whole_shape(x: Tensor) -> torch.Size:
    """The shape of all rows."""
    shape = Tensor.shape.__get__(x)  # type: ignore[attr-defined]
    return torch.Size((*shape[: x.row_dim], x.row_layout.n, *shape[x.row_dim + 1 :])) if isinstance(x, Rows) else shape


def read(name: str) -> Callable[[Any, tuple, dict], Any]:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0]
        if name == "size":
            shape = whole_shape(x)
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        if name == "__len__":
            return whole_shape(x)[0] if x.ndim else func(x)
        if name in ("numel", "nelement"):
            return math.prod(whole_shape(x))
        return func(*args, **kwargs)

    return handler


def item(func: Any, args: tuple, kwargs: dict) -> Any:
    """One number of all rows is asked for."""
    x = args[0]
    if isinstance(x, Partial):
        return func(collected(x), *args[1:], **kwargs)
    return NOT_BY_ROWS


def same(func: Any, args: tuple, kwargs: dict) -> Any:
    """Calls that concern this rank's tensor as it is."""
    return func(*args, **kwargs)


def requires_grad(func: Any, args: tuple, kwargs: dict) -> Any:
    func(*args, **kwargs)
    return leaf(args[0])


def leaf(x: Tensor) -> Tensor:
    """Let the gradient that collects in a leaf of rows be that of one process: below rows gradients are the number of ranks times it."""
    if isinstance(x, Rows) and x.requires_grad and x.is_leaf and "halved" not in x.__dict__:
        size = current().between.size
        x.__dict__["halved"] = x.register_hook(lambda grad: plain(grad) / size)
    return x


def get_grad(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    grad = func(x)
    if grad is None or not isinstance(x, Rows) or isinstance(grad, Rows):
        return grad
    if not x.is_leaf:
        return as_rows(grad / current().between.size, x.row_layout, x.row_dim)
    return as_rows(grad, x.row_layout, x.row_dim)


def set_grad(func: Any, args: tuple, kwargs: dict) -> Any:
    x, grad = args
    if isinstance(x, Rows) and isinstance(grad, Tensor) and not isinstance(grad, Rows):
        grad = as_rows(x.row_layout.own(grad, x.row_dim).clone(), x.row_layout, x.row_dim)
    elif not isinstance(x, Rows):
        grad = collected(grad)
    return func(x, grad)


def get_data(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    result = func(x)
    return as_rows(result, x.row_layout, x.row_dim) if isinstance(x, Rows) else as_partial(result)


def set_data(func: Any, args: tuple, kwargs: dict) -> Any:
    x, new = args
    if isinstance(x, Rows):
        if isinstance(new, Rows) and new.row_dim == x.row_dim:
            x.row_layout = new.row_layout
            return func(x, plain(new))
        return func(x, x.row_layout.own(collected(new), x.row_dim).clone())
    return func(x, collected(new))


def register_hook(func: Any, args: tuple, kwargs: dict) -> Any:
    """The script's hook on rows gets the gradient of one process."""
    x, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    if not isinstance(x, Rows):
        return func(x, hook)
    layout, dim, size = x.row_layout, x.row_dim, 1 if x.is_leaf else current().between.size

    def of_rows(grad: Tensor) -> Any:
        found = hook(as_rows(plain(grad) / size, layout, dim))
        if found is None:
            return None
        return plain(found if isinstance(found, Rows) else layout.own(found, dim)) * size

    return func(x, of_rows)


def deepcopy(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    result = plain(x).detach().clone().requires_grad_(x.requires_grad)
    return leaf(as_rows(result, x.row_layout, x.row_dim)) if isinstance(x, Rows) else as_partial(result)


def foreach(func: Any, args: tuple, kwargs: dict) -> Any:
    """Optimizers step rows, such as latents, number by number."""
    for each in zip(*(arg for arg in args if isinstance(arg, (list, tuple)) and len(arg)), strict=False):
        layouts = [one.row_layout if isinstance(one, Rows) else None for one in each if isinstance(one, Tensor) and one.ndim]
        if any(layout != layouts[0] for layout in layouts):
            return NOT_BY_ROWS
    func(*args, **kwargs)
    return None


def setitem(func: Any, args: tuple, kwargs: dict) -> Any:
    return set_item(func, *args)


def getitem(func: Any, args: tuple, kwargs: dict) -> Any:
    return get_item(func, *args)


def swapped(func: Any, args: tuple, kwargs: dict) -> Any:
    """``x.T``, ``x.mT``, ``x.H`` and ``x.mH``."""
    x, last = args[0], args[0].ndim - 1
    if not isinstance(x, Rows) or last < 1:
        return NOT_BY_ROWS
    name = func.__self__.__name__
    if name in ("T", "H") and last > 1:
        return as_rows(func(x), x.row_layout, last - x.row_dim)
    return as_rows(func(x), x.row_layout, {last: last - 1, last - 1: last}.get(x.row_dim, x.row_dim))


def attribute(name: str) -> Callable[[Any, tuple, dict], Any]:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        return whole_shape(args[0]) if name == "shape" else func(*args)

    return handler


OWNERS = (Tensor, torch, F, torch.special, torch.linalg, NATIVE)
"""Where functions of torch are; some have one more name in a private module."""

SAME = named("""
backward retain_grad is_pinned __hash__ __dir__ is_inference is_shared is_same_size dim_order has_names is_nonzero_
register_post_accumulate_grad_hook names_ __get__ type_
""")


def kinds() -> dict[str, Sequence[str]]:
    """The table: the names of the functions of each kind."""
    return {
        "elementwise": ELEMENTWISE,
        "along": ALONG,
        "reduction": REDUCTIONS,
        "like": LIKE,
        "draws": list(DRAWS_LIKE),
        "layer": LAYERS,
        "loss": list(LOSSES),
        "shape": list(SHAPES),
        "index": ["gather", "scatter", "scatter_add", "take_along_dim", "index_fill"],
        "same place": ["view_as_real", "view_as_complex", "unfold"],
    }


def _register(name: str, handler: Callable[[Any, tuple, dict], Any]) -> None:
    for owner in OWNERS:
        found = owner.__dict__.get(name, getattr(owner, name, None)) if not isinstance(owner, type) else getattr(owner, name, None)
        if callable(found):
            handlers[found] = handler


def _fill() -> None:
    for name in ELEMENTWISE:
        _register(name, elementwise)
        _register(f"{name}_", elementwise)
    for name in ALONG:
        _register(name, along(name))
    for name in REDUCTIONS:
        _register(name, reduction(name))
    for name in LIKE:
        _register(name, like)
    for name in DRAWS_LIKE:
        _register(name, draws_like(name))
    for name in LAYERS:
        _register(name, layer)
    for name in LOSSES:
        _register(name, loss)
    for name in ("cross_entropy", "nll_loss"):
        _register(name, cross_entropy)
    for name, handler in SHAPES.items():
        _register(name, handler)
    for name in SAME:
        _register(name, same)
    for name in ("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"):
        _register(name, shape_in_place)
    for name in ("is_contiguous", "stride"):
        _register(name, memory)
    _register("broadcast_tensors", broadcast)
    for name in ("gather", "scatter", "scatter_add", "take_along_dim", "index_fill"):
        _register(name, by_index)
        _register(f"{name}_", by_index)
    for name in ("view_as_real", "view_as_complex"):
        _register(name, same_place)
    handlers[Tensor.unfold] = same_place
    for name in READS:
        _register(name, read(name))
    for name in ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "tolist", "is_nonzero"):
        _register(name, item)
    for name, handler in {
        "dropout": dropout, "feature_dropout": dropout, "one_hot": one_hot, "batch_norm": batch_norm,
        "cosine_similarity": cosine_similarity, "matmul": matmul, "mm": matmul, "bmm": matmul, "mv": matmul, "__matmul__": matmul,
        "__rmatmul__": matmul, "requires_grad_": requires_grad, "register_hook": register_hook, "__deepcopy__": deepcopy,
        "__getitem__": getitem,
        "__setitem__": setitem, "cat": cat, "concat": cat, "concatenate": cat, "stack": stack, "chunk": chunk, "split": split,
        "unbind": unbind,
        "tensor_split": lambda func, args, kwargs: NOT_BY_ROWS,
    }.items():  # fmt: skip
        _register(name, handler)
    handlers.update(dict.fromkeys(FOREACH, foreach))
    for name in dir(Tensor):
        found: Any = getattr(Tensor, name, None)
        if type(found).__name__ == "getset_descriptor" or isinstance(found, property):
            handlers[found.__get__] = attribute(name)
            if hasattr(found, "__set__"):
                handlers[found.__set__] = same
    for name in ("T", "mT", "H", "mH"):
        handlers[getattr(Tensor, name).__get__] = swapped
    handlers[Tensor.nbytes.__get__] = memory  # type: ignore[attr-defined]
    for name in ("real", "imag"):
        handlers[getattr(Tensor, name).__get__] = elementwise
    handlers[Tensor.grad.__get__], handlers[Tensor.grad.__set__] = get_grad, set_grad  # type: ignore[union-attr]
    handlers[Tensor.data.__get__], handlers[Tensor.data.__set__] = get_data, set_data  # type: ignore[attr-defined]
    handlers[Tensor.requires_grad.__set__] = requires_grad  # type: ignore[attr-defined]


_fill()
