"""Reading and writing parts of rows with ``x[...]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parwrap.rows.layout import Layout
from parwrap.rows.tensors import NOT_BY_ROWS, Partial, Rows, as_partial, as_rows, collected, current, plain

__all__ = ["get_item", "set_item"]


def get_item(func: Any, x: Tensor, index: Any) -> Any:
    if isinstance(x, Partial):
        return as_partial(func(x, index)) if not _has_tensors(index) else NOT_BY_ROWS
    if not isinstance(x, Rows):
        return _looked_up(func, x, index)
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        return _masked(x, index)
    if (pick := _pick_of_each(x, index)) is not None:
        return as_rows(func(plain(x), pick), x.row_layout, 0)
    at = _local_index(x, index)
    if at is None:
        return NOT_BY_ROWS
    local, layout, dim = at
    return as_rows(func(plain(x), local), layout, dim)


def _has_tensors(index: Any) -> bool:
    return any(isinstance(each, (Tensor, list)) for each in (index if isinstance(index, tuple) else (index,)))


def _looked_up(func: Any, table: Tensor, index: Any) -> Any:
    """A row of a plain ``table`` for each row of ``index``; or the numbers of a plain tensor where a mask of rows is true."""
    if isinstance(index, Rows) and index.dtype != torch.bool:
        return as_rows(func(collected(table), plain(index)), index.row_layout, index.row_dim)
    if isinstance(index, Rows) and index.row_dim == 0 and table.shape[0] == index.row_layout.n and type(table) is Tensor:
        return _masked(as_rows(index.row_layout.own(table).clone(), index.row_layout), index)  # type: ignore[arg-type]
    return NOT_BY_ROWS


def _masked(x: Rows, mask: Tensor) -> Any:
    if x.row_dim != 0 or len(x.row_layout.segments) > 1:
        return NOT_BY_ROWS
    if isinstance(mask, Rows):
        if mask.row_dim != 0 or mask.row_layout != x.row_layout:
            return NOT_BY_ROWS
        local = plain(mask)
    elif mask.ndim and mask.shape[0] == x.row_layout.n:
        local = x.row_layout.own(mask)
    else:
        return NOT_BY_ROWS
    found = plain(x)[local]
    between = current().between
    counts = torch.cat(between.parts(torch.tensor([found.shape[0]]), [1] * between.size)).tolist()
    return as_rows(found, Layout((tuple(counts),), between.rank))


def _pick_of_each(x: Rows, index: Any) -> tuple[Tensor, Tensor] | None:
    """This rank's index of ``x[torch.arange(len(x)), y]``, which is a number of each row; ``None`` for other indices."""
    if not (
        isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], Tensor) and x.row_dim == 0 and len(x.row_layout.segments) == 1
    ):
        return None
    every, pick = index
    if isinstance(every, (range, list)):
        every = torch.tensor(list(every))
    if not isinstance(every, Tensor) or every.dtype == torch.bool or pick.dtype == torch.bool or every.ndim != 1 or pick.ndim != 1:
        return None
    layout, every = x.row_layout, collected(every)
    if every.shape[0] != layout.n or not torch.equal(every.cpu(), torch.arange(layout.n)):
        return None
    if isinstance(pick, Rows):
        if pick.row_layout != layout:
            return None
        mine = plain(pick)
    elif pick.shape[0] == layout.n:
        mine = layout.own(pick)
    else:
        return None
    return torch.arange(layout.mine, device=x.device), mine


def _local_index(x: Rows, index: Any) -> tuple[tuple, Layout, int] | None:
    """The index into this rank's rows that does what ``index`` does, and where rows are in the result; ``None`` if it takes other rows."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = [each for each in parts if isinstance(each, (Tensor, list, range))]
    if len(tensors) > 1 or any(isinstance(each, (Rows, bool)) for each in parts):
        return None
    if any(not isinstance(each, (int, slice, list, range, Tensor, type(None), type(Ellipsis))) for each in parts):
        return None
    if tensors and not (isinstance(tensors[0], (list, range)) or (tensors[0].ndim == 1 and tensors[0].dtype != torch.bool)):
        return None
    used = sum(each is not None and each is not Ellipsis for each in parts)
    full: list[Any] = []
    for each in parts:
        full += [slice(None)] * (x.ndim - used) if each is Ellipsis else [each]
    if Ellipsis not in [each for each in parts if not isinstance(each, (Tensor, list))]:
        full += [slice(None)] * (x.ndim - used)
    at = out = 0
    dim, layout, local = -1, x.row_layout, list[Any]()
    for each in full:
        if each is None:
            local.append(None)
            out += 1
            continue
        if at == x.row_dim:
            if not isinstance(each, slice) or each.step not in (None, 1) or any(isinstance(end, Tensor) for end in (each.start, each.stop)):
                return None
            start, stop, _ = each.indices(layout.n)
            if (start, stop) != (0, layout.n):
                found = layout.between(start, stop)
                if found is None:
                    return None
                layout, mine = found
                each = slice(mine, mine + layout.mine)
            else:
                each = slice(None)
            dim = out
        local.append(each)
        at += 1
        out += not isinstance(each, int)
    return tuple(local), layout, dim


def set_item(func: Any, x: Tensor, index: Any, value: Any) -> Any:
    if not isinstance(x, Rows):
        return NOT_BY_ROWS
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if not isinstance(index, Rows) and index.ndim and x.row_dim == 0 and index.shape[0] == x.row_layout.n:
            index = as_rows(x.row_layout.own(index).clone(), x.row_layout)
        if (
            not isinstance(index, Rows)
            or index.row_dim != x.row_dim
            or index.row_layout != x.row_layout
            or (isinstance(value, Tensor) and value.ndim)
        ):
            return NOT_BY_ROWS
        func(plain(x), plain(index), collected(value))
        return None
    if (pick := _pick_of_each(x, index)) is not None and not (isinstance(value, Tensor) and value.ndim):
        func(plain(x), pick, collected(value))
        return None
    found = _local_index(x, index)
    if found is None or found[1] != x.row_layout:
        return NOT_BY_ROWS
    local, layout, dim = found
    if isinstance(value, Tensor) and value.ndim:
        part = plain(x)[local]
        if isinstance(value, Rows):
            if value.row_layout != layout or value.row_dim - value.ndim != dim - part.ndim:
                return NOT_BY_ROWS
        else:
            value, here = collected(value), dim - part.ndim
            if value.ndim >= -here and value.shape[here] != 1:
                if value.shape[here] != layout.n:
                    return NOT_BY_ROWS
                value = layout.own(value, value.ndim + here)
    func(plain(x), local, plain(value) if isinstance(value, Tensor) else value)
    return None
