"""Where rows are after an operation that changes shapes: views, transpositions, joins and splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parwrap.rows.layout import Layout
from parwrap.rows.tensors import NOT_BY_ROWS, Partial, Rows, as_partial, as_rows, plain

__all__ = ["SHAPES", "cat", "chunk", "reshaped", "split", "squeezed", "stack", "unbind"]

MOST = 64
"""A layout of more segments is not followed: the rows are collected."""


def whole_sizes(x: Rows) -> list[int]:
    sizes = list(Tensor.size(x))
    sizes[x.row_dim] = x.row_layout.n
    return sizes


def reshaped(layout: Layout, sizes: Sequence[int], dim: int, target: Sequence[int]) -> tuple[Layout, int, list[int]] | None:
    """Where rows are after a reshape.

    Args:
        layout: how rows lie before.
        sizes: the whole shape before.
        dim: the dimension of the rows before.
        target: the whole shape after.

    Returns:
        The layout and dimension after, and this rank's shape; ``None`` if rows do not stay together.

    >>> reshaped(Layout(((2, 2),), 0), [4, 3, 5], 0, [12, 5])[1:]
    (0, [6, 5])
    """
    before, n = math.prod(sizes[:dim]), sizes[dim]
    for at in range(len(target)):
        prefix = math.prod(target[:at])
        if prefix > before or before % max(prefix, 1) or (target[at] == 1 and n > 1):
            continue
        copies = before // max(prefix, 1)
        if copies > MOST:
            continue
        if copies == 1:
            if target[at] % n == 0:
                found: Layout | None = layout.times(target[at] // n)
            elif n % target[at] == 0:
                found = layout.divided(n // target[at])
                if found is None and (one := layout.unrepeated(target[at])) is not None and at + 1 < len(target):
                    found = one if target[at + 1] == one.n else None  # [copies * rows] becomes [copies, rows]
                    if found is not None:
                        local = [*target]
                        local[at + 1] = found.mine
                        return found, at + 1, local
            else:
                found = None
        else:
            found = layout.times(target[at] // (copies * n)).repeated(copies) if target[at] % (copies * n) == 0 else None
        if found is None or found.n != target[at]:
            continue
        local = [*target]
        local[at] = found.mine
        return found, at, local
    return None


def _reshape(func: Any, x: Rows, target: Sequence[int]) -> Any:
    sizes, target = whole_sizes(x), [int(each) for each in target]
    if -1 in target:
        known = -math.prod(target)
        if not known or math.prod(sizes) % known:
            return NOT_BY_ROWS
        target[target.index(-1)] = math.prod(sizes) // known
    if math.prod(target) != math.prod(sizes):
        return NOT_BY_ROWS
    if (found := reshaped(x.row_layout, sizes, x.row_dim, target)) is None:
        return NOT_BY_ROWS
    layout, dim, local = found
    return as_rows(func(plain(x), local), layout, dim)


def _sizes(args: tuple, kwargs: dict, name: str = "size") -> Any:
    if len(args) == 2:
        return args[1] if isinstance(args[1], (tuple, list, torch.Size)) else (args[1],)
    return args[1:] if len(args) > 2 else kwargs.get(name, kwargs.get("shape"))


def of_rows(handler: Callable[[Any, Rows, tuple, dict], Any]) -> Callable[[Any, tuple, dict], Any]:
    """A handler for calls whose first argument must be rows; a :class:`Partial` keeps being one."""

    def handle(func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Partial) and not isinstance(result := func(*args, **kwargs), (tuple, list)):
            return as_partial(result)
        if not isinstance(x, Rows) or any(isinstance(each, Partial) for each in args):
            return NOT_BY_ROWS
        return handler(func, x, args, kwargs)

    return handle


@of_rows
def view(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    sizes = _sizes(args, kwargs)
    if sizes is None or (len(args) == 2 and isinstance(args[1], torch.dtype)) or any(not isinstance(each, int) for each in sizes):
        dtype = args[1] if len(args) == 2 else kwargs.get("dtype")
        return (
            as_rows(func(*args, **kwargs), x.row_layout, x.row_dim)
            if isinstance(dtype, torch.dtype) and dtype.itemsize == x.dtype.itemsize
            else NOT_BY_ROWS
        )
    return _reshape(Tensor.view, x, sizes)


@of_rows
def reshape(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    sizes = _sizes(args, kwargs, "shape")
    return NOT_BY_ROWS if sizes is None else _reshape(Tensor.reshape, x, sizes)


@of_rows
def view_as(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    other = args[1]
    return _reshape(Tensor.reshape, x, whole_sizes(other) if isinstance(other, Rows) else list(other.shape))


@of_rows
def flatten(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    sizes = whole_sizes(x)
    start = (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) % max(x.ndim, 1)
    end = (args[2] if len(args) > 2 else kwargs.get("end_dim", -1)) % max(x.ndim, 1)
    return _reshape(Tensor.reshape, x, [*sizes[:start], math.prod(sizes[start : end + 1]), *sizes[end + 1 :]])


@of_rows
def unflatten(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    dim, into = (args[1] if len(args) > 1 else kwargs["dim"]) % x.ndim, list(args[2] if len(args) > 2 else kwargs["sizes"])
    sizes = whole_sizes(x)
    if -1 in into:
        into[into.index(-1)] = sizes[dim] // -math.prod(into)
    return _reshape(Tensor.reshape, x, [*sizes[:dim], *into, *sizes[dim + 1 :]])


def squeezed(x: Rows, args: tuple, kwargs: dict) -> tuple[int, ...]:
    """The dimensions that a ``squeeze`` of the whole takes away."""
    sizes, dim = whole_sizes(x), args[1] if len(args) > 1 else kwargs.get("dim")
    dims = range(x.ndim) if dim is None else [each % x.ndim for each in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    return tuple(each for each in dims if sizes[each] == 1)


@of_rows
def squeeze(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    gone = squeezed(x, args, kwargs)
    if x.row_dim in gone:
        return NOT_BY_ROWS
    return as_rows(func(plain(x), gone), x.row_layout, x.row_dim - sum(each < x.row_dim for each in gone))


@of_rows
def unsqueeze(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % (x.ndim + 1)
    return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim + (dim <= x.row_dim))


@of_rows
def permute(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    order = [each % x.ndim for each in _sizes(args, kwargs, "dims")]
    return as_rows(plain(x).permute(order), x.row_layout, order.index(x.row_dim))


def _exchange(x: Rows, order: list[int]) -> Any:
    return as_rows(plain(x).permute(order), x.row_layout, order.index(x.row_dim))


@of_rows
def transpose(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    first, second = (
        each % x.ndim for each in (args[1:] if len(args) > 2 else (kwargs.get("dim0", args[1] if len(args) > 1 else 0), kwargs.get("dim1")))
    )
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    return _exchange(x, order)


@of_rows
def t(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    return as_rows(func(x), x.row_layout, x.ndim - 1 - x.row_dim)


@of_rows
def movedim(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    names = list(range(x.ndim))
    source, target = (
        ([each] if isinstance(each, int) else list(each))
        for each in (args[1:] if len(args) > 2 else (kwargs["source"], kwargs["destination"]))
    )
    source, target = [each % x.ndim for each in source], [each % x.ndim for each in target]
    order = [-1] * x.ndim
    for at, to in zip(source, target, strict=True):
        order[to] = at
    rest = iter(each for each in names if each not in source)
    return _exchange(x, [next(rest) if each < 0 else each for each in order])


@of_rows
def expand(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    sizes = list(_sizes(args, kwargs))
    at = len(sizes) - x.ndim + x.row_dim
    if at < 0 or sizes[at] not in (-1, x.row_layout.n) or x.row_layout.n == 1:
        return NOT_BY_ROWS
    sizes[at] = x.row_layout.mine
    return as_rows(Tensor.expand(plain(x), sizes), x.row_layout, at)


@of_rows
def expand_as(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    other = args[1]
    return expand(func, (x, whole_sizes(other) if isinstance(other, Rows) else list(other.shape)), {})


@of_rows
def repeat(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    times = list(_sizes(args, kwargs, "repeats" if "repeats" in kwargs else "dims"))
    if func.__name__ == "tile":
        times = [1] * (x.ndim - len(times)) + times
    at = len(times) - x.ndim + x.row_dim
    if times[at] < 1 or times[at] * len(x.row_layout.segments) > MOST:
        return NOT_BY_ROWS
    return as_rows(Tensor.repeat(plain(x), times), x.row_layout.repeated(times[at]), at)


@of_rows
def repeat_interleave(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    times, dim = args[1] if len(args) > 1 else kwargs.get("repeats"), args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(times, int) or times < 1 or (dim is None and x.ndim > 1):
        return NOT_BY_ROWS
    dim = (dim or 0) % x.ndim
    return as_rows(plain(x).repeat_interleave(times, dim), x.row_layout.times(times) if dim == x.row_dim else x.row_layout, x.row_dim)


@of_rows
def select(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % x.ndim
    if dim == x.row_dim:
        return NOT_BY_ROWS
    return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim - (dim < x.row_dim))


@of_rows
def narrow(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % x.ndim
    if dim == x.row_dim or any(isinstance(each, Rows) for each in args[1:]):
        return NOT_BY_ROWS
    return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim)


@of_rows
def roll(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    dims = args[2] if len(args) > 2 else kwargs.get("dims")
    if dims is None or x.row_dim in [each % x.ndim for each in (dims if isinstance(dims, (tuple, list)) else (dims,))]:
        return NOT_BY_ROWS
    return as_rows(func(*args, **kwargs), x.row_layout, x.row_dim)


@of_rows
def diagonal(func: Any, x: Rows, args: tuple, kwargs: dict) -> Any:
    return NOT_BY_ROWS


SHAPES: dict[str, Callable[[Any, tuple, dict], Any]] = {
    "view": view,
    "reshape": reshape,
    "view_as": view_as,
    "reshape_as": view_as,
    "flatten": flatten,
    "ravel": flatten,
    "unflatten": unflatten,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "permute": permute,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "t": t,
    "movedim": movedim,
    "moveaxis": movedim,
    "expand": expand,
    "expand_as": expand_as,
    "repeat": repeat,
    "tile": repeat,
    "repeat_interleave": repeat_interleave,
    "select": select,
    "narrow": narrow,
    "index_select": narrow,
    "roll": roll,
}
"""The functions that change shapes, each with its handler."""


def _fitted(tensors: Sequence[Tensor], x: Rows) -> list[Tensor] | None:
    """The tensors beside the rows ``x``, all as this rank needs them; ``None`` if they do not lie alike."""
    found = []
    for each in tensors:
        if isinstance(each, Rows):
            if each.row_layout != x.row_layout or each.row_dim - each.ndim != x.row_dim - x.ndim:
                return None
            found.append(plain(each))
        elif isinstance(each, Partial) or each.ndim != x.ndim or each.shape[x.row_dim] != x.row_layout.n:
            return None
        else:
            found.append(x.row_layout.own(each, x.row_dim))
    return found


def _dim(args: tuple, kwargs: dict, default: int = 0) -> int:
    return int(kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else default)))


def cat(func: Any, args: tuple, kwargs: dict) -> Any:
    tensors: Any = args[0] if args else kwargs.get("tensors")
    if "out" in kwargs:
        return NOT_BY_ROWS
    rows = [each for each in tensors if isinstance(each, Rows)]
    if not rows:
        return _joined_partials(func, tensors, args, kwargs)
    x = rows[0]
    if any(each.row_dim != x.row_dim or each.ndim != x.ndim for each in rows):
        return NOT_BY_ROWS
    dim = _dim(args, kwargs) % x.ndim
    if dim != x.row_dim:
        found = _fitted(tensors, x)
        return NOT_BY_ROWS if found is None else as_rows(torch.cat(found, dim), x.row_layout, x.row_dim)
    if len(rows) < len(tensors):
        return NOT_BY_ROWS
    layout = x.row_layout.after([each.row_layout for each in rows[1:]])
    if len(layout.segments) > 4 * MOST:
        return NOT_BY_ROWS
    return as_rows(torch.cat([plain(each) for each in rows], dim), layout, dim)


def stack(func: Any, args: tuple, kwargs: dict) -> Any:
    tensors: Any = args[0] if args else kwargs.get("tensors")
    if "out" in kwargs:
        return NOT_BY_ROWS
    x = next((each for each in tensors if isinstance(each, Rows)), None)
    if x is None:
        return _joined_partials(func, tensors, args, kwargs)
    found = _fitted(tensors, x)
    if found is None:
        return NOT_BY_ROWS
    dim = _dim(args, kwargs) % (x.ndim + 1)
    return as_rows(torch.stack(found, dim), x.row_layout, x.row_dim + (dim <= x.row_dim))


def _joined_partials(func: Any, tensors: Any, args: tuple, kwargs: dict) -> Any:
    floating = all(each.is_floating_point() for each in tensors)
    kinds = all(isinstance(each, Partial) or type(each) is Tensor for each in tensors)
    return as_partial(func(*args, **kwargs)) if floating and kinds else NOT_BY_ROWS


def _divided(func: Any, args: tuple, kwargs: dict, at: int, fits: Callable[[Rows, Any], list[int] | None]) -> Any:
    """``chunk`` and ``split``: along other dimensions, or where segments end."""
    x = args[0] if args else None
    if not isinstance(x, Rows):
        return NOT_BY_ROWS
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % x.ndim
    if dim != x.row_dim:
        return tuple(as_rows(each, x.row_layout, x.row_dim) for each in func(*args, **kwargs))
    sizes = fits(x, args[1] if len(args) > 1 else next(iter(kwargs.values())))
    if sizes is None:
        return NOT_BY_ROWS
    found, begin = [], 0
    for size in sizes:
        part = x.row_layout.between(begin, begin + size)
        if part is None:
            return NOT_BY_ROWS
        layout, mine = part
        found.append(as_rows(plain(x).narrow(dim, mine, layout.mine), layout, dim))
        begin += size
    return tuple(found)


def chunk(func: Any, args: tuple, kwargs: dict) -> Any:
    def fits(x: Rows, chunks: int) -> list[int]:
        each = -(-x.row_layout.n // chunks)
        return [min(each, x.row_layout.n - start) for start in range(0, x.row_layout.n, each)]

    return _divided(func, args, kwargs, 1, fits)


def split(func: Any, args: tuple, kwargs: dict) -> Any:
    def fits(x: Rows, sizes: Any) -> list[int] | None:
        if isinstance(sizes, int):
            return [min(sizes, x.row_layout.n - start) for start in range(0, x.row_layout.n, sizes)]
        return list(sizes) if sum(sizes) == x.row_layout.n else None

    return _divided(func, args, kwargs, 1, fits)


def unbind(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if not isinstance(x, Rows):
        return NOT_BY_ROWS
    dim = _dim(args, kwargs) % x.ndim
    if dim == x.row_dim:
        return NOT_BY_ROWS
    return tuple(as_rows(each, x.row_layout, x.row_dim - (dim < x.row_dim)) for each in func(*args, **kwargs))
