"""The tensors of a whole batch, and how a call of torch on one of them is run.

``Rows`` has this rank's rows and stands for all of them. ``Partial`` stands for the mean over ranks of what each holds: a loss, or a count,
which travels only when it is read. Inside a call of torch both are plain tensors of this rank;
``table.py`` says what is right for which call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from parwrap.errors import UsageError
from parwrap.places import Place, script_place
from parwrap.rows.collectives import Collectives
from parwrap.rows.layout import Layout
from parwrap.torch_private.autograd import outside_of_transforms, view_base
from parwrap.torch_private.functions import is_view, pytree
from parwrap.torch_private.tensors import disable_torch_function, version_of

__all__ = [
    "LOCAL",
    "NOT_BY_ROWS",
    "Borrowed",
    "OfBatch",
    "Partial",
    "Rows",
    "Whole",
    "as_partial",
    "as_rows",
    "collected",
    "current",
    "handlers",
    "is_rows",
    "open_whole",
    "plain",
    "run_collected",
    "whole_is_open",
    "whole_result",
]

LOCAL = disable_torch_function
"""Inside this context torch takes rows for the plain tensor of this rank's rows."""

NOT_BY_ROWS = object()
"""What a handler returns for a call that needs the rows of other ranks: they are collected, and every rank runs it whole."""

handlers: dict[Any, Callable[[Any, tuple, dict], Any]] = {}
"""How to run each of torch's functions on rows; filled by ``table.py``. Whatever is missing here collects its rows."""


class Whole:
    """What is open while ranks share whole batches.

    Args:
        between: the collectives of the ranks.
        draws_kept: a context manager after which random numbers go on as before it.

    Attributes:
        between: the collectives of the ranks.
        inside: whether a module runs on this rank's rows now: tensors are plain there.
        layout: how the rows of the newest batch lie on the ranks; ``None`` if every rank has all of them.
        calling: how the rows lie of the module that runs now.
        counting: what counts cross entropies while a module is tried on a few rows.
        collections: for each line and operation that collected rows: how often, and how many bytes.
    """

    def __init__(self, between: Collectives, draws_kept: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self.between, self.draws_kept = between, draws_kept
        self.inside = 0
        self.layout: Layout | None = None
        self.collections: Counter[tuple[Place, str]] = Counter()
        self.collected_bytes: Counter[tuple[Place, str]] = Counter()
        self.calling: Layout | None = None
        self.counting: Any = None


_open: Whole | None = None


def whole_is_open() -> Whole | None:
    """What is open now, if anything."""
    return _open


def current() -> Whole:
    """What is open now.

    Raises:
        UsageError: the scope of these rows has ended.
    """
    if _open is None:
        raise UsageError(
            f"{script_place()} uses rows of a batch after the function that read them has ended, where each rank has its own rows only. "
            "Use them inside, or return numbers or parwrap.gather(rows)."
        )
    return _open


@contextlib.contextmanager
def open_whole(whole: Whole) -> Iterator[None]:
    """Make ``whole`` the current one inside the block."""
    global _open
    before, _open = _open, whole
    try:
        yield
    finally:
        _open = before


class OfBatch(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with LOCAL():
            if _open is None:
                current()
            handler = handlers.get(func)
            result = NOT_BY_ROWS if handler is None else handler(func, args, kwargs or {})
            return run_collected(func, args, kwargs or {}) if result is NOT_BY_ROWS else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collected(self).__reduce_ex__(protocol)


class Rows(OfBatch):
    """This rank's rows of a tensor, in dimension ``row_dim``. ``row_layout`` says how all rows lie on the ranks."""

    row_layout: Layout
    row_dim: int
    _whole: tuple[torch.Tensor, int] | None = None


class Partial(OfBatch):
    """Stands for the mean over ranks of the tensors that each holds."""

    _value: tuple[torch.Tensor, int] | None = None


class Borrowed(OfBatch):
    """A part of collected rows that shares their memory: what the script writes into it is written into the rows.

    ``_of`` are the rows, ``_all`` the collected ones, ``_at`` the version of the rows that they show.
    """

    _of: torch.Tensor
    _all: torch.Tensor
    _at: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        lent = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Borrowed)]
        target = args[0] if args and isinstance(args[0], Borrowed) and writes(func) else None
        with LOCAL():
            for each in lent:
                if each._at != version(each._of):  # the rows have changed since
                    each._all.data.copy_(collected(each._of).detach())
                    each._at = version(each._of)
        args, kwargs = pytree.tree_map_only(Borrowed, lambda each: each if each is target else plain(each), (args, kwargs))
        if target is None:
            result = func(*args, **kwargs)
        else:
            args, kwargs = pytree.tree_map_only((Rows, Partial), collected, (args, kwargs))
            with LOCAL():
                result = func(*args, **kwargs)
                _write_back(target._of, target._all)
                target._at = version(target._of)
        _lend_views(result, lent[0]._of, lent[0]._all) if lent else None
        return result


def _lend_views(result: Any, of: torch.Tensor, whole: torch.Tensor) -> None:
    """Make each tensor of ``result`` that shares the memory of ``whole``, the collected rows ``of``, a borrowed one."""
    root = view_base(whole) if is_view(whole) else whole
    for each in pytree.tree_leaves(result):
        if type(each) is torch.Tensor and is_view(each) and view_base(each) is root:
            each.__class__ = Borrowed
            each._of, each._all, each._at = of, whole, version(of)  # type: ignore[attr-defined]


for _kind in (Rows, Partial, Borrowed):
    _kind.__name__ = _kind.__qualname__ = "Tensor"  # as the script prints it


def as_rows(local: torch.Tensor, layout: Layout, dim: int = 0) -> torch.Tensor:
    """Make the plain tensor ``local``, which nothing else uses as such, the rows of this rank; the same object."""
    if type(local) is torch.Tensor:
        local.__class__ = Rows
        local.row_layout, local.row_dim = layout, dim  # type: ignore[attr-defined]
    elif not isinstance(local, Rows):  # a parameter, or a tensor of another library
        local = as_rows(local.as_subclass(torch.Tensor), layout, dim)
    return local


def as_partial(local: torch.Tensor) -> torch.Tensor:
    """Make the plain tensor ``local``, which nothing else uses as such, this rank's part of a mean over ranks; the same object."""
    if type(local) is torch.Tensor:
        local.__class__ = Partial
    return local


def version(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was changed; another number each time for tensors of ``inference_mode``, which do not count."""
    return next(_never) if tensor.is_inference() else version_of(tensor)


_never = itertools.count(-1, -1)


def is_rows(x: Any) -> bool:
    """Whether ``x`` is a tensor of a whole batch (``batch="whole"``), of which this rank holds some rows or a part of a mean.

    >>> is_rows(torch.zeros(2))
    False
    """
    return isinstance(x, OfBatch)


def whole_result(result: Any) -> Any:
    """``result`` with its rows collected, for a caller outside of the scope."""
    return pytree.tree_map_only(OfBatch, collected, result)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, or its part of a mean, as a plain tensor."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, OfBatch) else tensor


def collected(tensor: Any, why: str = "") -> Any:
    """The whole tensor of which ``tensor`` has this rank's part, on every rank; anything else as it is."""
    if isinstance(tensor, Partial):
        return _mean_of(tensor)
    if isinstance(tensor, Borrowed):
        return plain(tensor)
    if not isinstance(tensor, Rows):
        return tensor
    whole = current()
    if (
        tensor._whole is not None
        and tensor._whole[1] == version(tensor)
        and (tensor._whole[0].requires_grad or not (tensor.requires_grad and torch.is_grad_enabled()))
    ):
        return tensor._whole[0]
    if why:
        place = script_place()
        whole.collections[place, why] += 1
        with LOCAL():
            whole.collected_bytes[place, why] += tensor.nbytes * whole.between.size
    with LOCAL(), outside_of_transforms():
        found = whole.between.gathered(plain(tensor), tensor.row_layout, tensor.row_dim)
        tensor._whole = found, version(tensor)
    return found


def _mean_of(tensor: Partial) -> torch.Tensor:
    whole = current()
    with LOCAL():
        if tensor.requires_grad and torch.is_grad_enabled():
            return whole.between.mean(plain(tensor))
        if tensor._value is None or tensor._value[1] != version(tensor):
            with torch.no_grad():
                if tensor.numel() == 1 and tensor.is_cpu and not tensor.is_complex():
                    total, size = whole.between.total(tensor.item()), whole.between.size
                    value = torch.full_like(plain(tensor), total / size if tensor.is_floating_point() else total // size)
                else:
                    value = whole.between.mean(plain(tensor).detach())
                tensor._value = value, version(tensor)
        return tensor._value[0]


IN_PLACE = frozenset(
    (
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
    )
)


def writes(func: Any) -> bool:
    """Whether ``func`` changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def run_collected(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on whole tensors, as every rank does, and write back what it has written."""
    name = getattr(func, "__name__", str(func))
    target = args[0] if args and isinstance(args[0], (Rows, Partial)) and writes(func) else kwargs.get("out")
    whole_args, whole_kwargs = pytree.tree_map_only(OfBatch, lambda each: collected(each, name), (args, kwargs))
    if not isinstance(target, OfBatch):
        result = func(*whole_args, **whole_kwargs)
        lender = next((each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Rows)), None)
        if lender is not None and lender._whole is not None:
            _lend_views(result, lender, lender._whole[0])
        return result
    changed = collected(target).clone()
    if target is kwargs.get("out"):
        func(*whole_args, **{**whole_kwargs, "out": changed})
    else:
        func(changed, *whole_args[1:], **whole_kwargs)
    _write_back(cast(torch.Tensor, target), changed)
    return None if name == "__setitem__" else target


def _write_back(target: torch.Tensor, changed: torch.Tensor) -> None:
    """Write the whole tensor ``changed`` into ``target``, which has this rank's part of it."""
    mine = target.row_layout.own(changed, target.row_dim) if isinstance(target, Rows) else changed
    if mine.requires_grad and torch.is_grad_enabled():
        target.copy_(mine)
    else:
        with torch.no_grad():
            plain(target).copy_(mine)
    if isinstance(target, Rows):
        target._whole = (changed, version(target)) if not target.requires_grad else None


def named(text: str) -> tuple[str, ...]:
    """The names in ``text``."""
    return tuple(text.split())


@functools.cache
def signature_of(func: Callable) -> inspect.Signature:
    """The signature of a function of torch that is written in Python."""
    return inspect.signature(inspect.unwrap(func))
