"""Decides which length of a dataset, sampler or loader the user's code sees while this rank reads only a part of it.

A function that divides by ``len(loader.dataset)`` gets the mean over its rank's part only if this is the length of the part. Torch and
parwrap see the whole length. The length of a list cannot be changed, so ``loader.dataset`` returns another object then.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from parwrap.coordination.call_site import is_ours, location, warn
from parwrap.errors import UsageError
from parwrap.group.group import is_alone
from parwrap.intercept.source import NAMES
from parwrap.patching.patch import Measured, Patch, installed

__all__ = ["Lengths", "Share", "asked_for_a_bar", "asked_inside", "asker", "can_patch"]

BARS = ("tqdm", "rich", "alive_progress", "progressbar")
"""Packages that ask for the length to show a loop's progress."""

PASSING_ON = (
    __name__,
    "parwrap.data.evaluation.evaluation",
    "parwrap.data.running_numbers",
    "parwrap.intercept.loader",
    "parwrap.intercept.source",
    "parwrap.patching.patch",
    "wrapt.wrappers",
)
"""The modules that a patched call passes through; they are not the ones that ask."""

HEAP_TYPE = 1 << 9
"""The flag of a class whose attributes can be set."""

TELLS = ("CACHE", "PRECALL", "PUSH_NULL", "RESUME", "EXTENDED_ARG")
"""Bytecode instructions that load no value."""


class Share(NamedTuple):
    """A rank's part of a pass; unknown values are ``None``.

    Attributes:
        batches: the number of batches in it.
        samples: the number of samples in these.
        readers: the number of ranks that share the pass.
    """

    batches: int | None
    samples: int | None
    readers: int | None = None


class Lengths:
    """Reports the lengths of this rank's parts to the user's code.

    Args:
        function: the function that reads loaders.
        arguments: its arguments by name.
        parts: whether to report the lengths of parts; if not, lengths are those of all the data, and requests are only recorded.

    Attributes:
        share: a function that returns the part of a loader that this rank reads.
    """

    def __init__(self, function: Callable, arguments: Mapping[str, Any], parts: bool = True) -> None:
        self.share: Callable[[DataLoader], Share] = lambda loader: Share(None, None)
        self._function, self._bound, self._parts = function, _bound(function, arguments), parts
        self._known: dict[int, tuple[Any, DataLoader, str]] = {}
        self._reported: dict[int, int | None] = {}
        self._asked: dict[tuple[int, str], tuple[DataLoader, str, int, str]] = {}
        self._patched: set[type] = set()
        self._patches = ExitStack()
        self._whole = False

    def __enter__(self) -> Lengths:
        for value in list(self._bound.values()):
            for each in (value, *_inner(value)):
                if isinstance(each, DataLoader):
                    self.note(each)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()

    def note(self, loader: DataLoader) -> None:
        """Report the lengths of the sources of ``loader`` from now on.

        Raises:
            UsageError: the function asks for the length of a dataset whose type cannot be changed.
        """
        for name in NAMES:
            thing = vars(loader).get(name)
            if thing is None:
                continue
            if name == "dataset" and self._parts and id(thing) not in self._known:
                self._refuse_length_of(thing)
            self._known[id(thing)] = thing, loader, name
            kind = type(thing)
            if can_patch(kind) and kind not in self._patched and hasattr(kind, "__len__"):
                self._patched.add(kind)
                self._patches.enter_context(installed([Patch(kind, "__len__", self._length)]))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Report whole lengths inside the block, for the user's samplers and datasets while they are read."""
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before

    def of_part(self, loader: DataLoader, name: str, source: Any) -> Any:
        """``source`` for the user's code, with the length of this rank's part of ``loader``."""
        self.note(loader)
        if self._whole or can_patch(type(source)) or not hasattr(source, "__len__"):
            return source
        return Measured(source, lambda: self._of(loader, name, len(source)) if asked_inside() else len(source))

    def of_loader(self, loader: DataLoader, whole: int) -> int:
        """The number of batches of this rank's part of ``loader``, which has ``whole``."""
        return whole if self._whole else self._of(loader, "batches", whole)

    def check(self, loader: DataLoader, readers: int) -> None:
        """Check the reported lengths when a pass over ``loader`` begins, which ``readers`` ranks share."""
        if self._reported.get(id(loader), readers) not in (None, readers):
            raise UsageError(
                "a function decorated with @parwrap.evaluate asks for the length of a DataLoader but reads a smaller one first, so fewer "
                "ranks share the pass than that length assumed: ask for the length when the pass begins, or decorate one function per "
                "loader."
            )

    def warn(self, passes: list[list[list[int]]]) -> None:
        """Warn if a reported length cannot make a mean exact, given the sizes of the batches of each rank in each of the ``passes``."""
        samples = [sum(map(sum, sizes)) for sizes in passes]
        equal = all(sum(each) * len(sizes[0]) == len(each) * sum(sizes[0]) for sizes in passes for each in sizes)
        for _, name, whole, place in self._asked.values():
            if not self._parts:
                _warn(
                    f"the function asked for a length ({place}). It is the length of all the data, because an entry of reduce is 'sum' "
                    "or a function. Results divided by it must use 'sum' too. For 'mean', divide by a count."
                )
            elif name == "batches" and not equal:
                _warn(
                    f"the function asked for the number of batches ({place}), which is smaller on one rank. A result divided by it is "
                    "weighted by samples, so it is not the mean over batches that a single process computes. Use reduce='sum' for it, "
                    "for example reduce={'loss': 'sum', 'accuracy': 'mean'}, or divide by the number of samples."
                )
            elif name in ("dataset", "sampler") and whole not in samples:
                _warn(
                    f"the function asked for the length of a {name} ({place}), which is {whole}, but a pass reads {samples[0]} samples: "
                    "a result divided by that length differs from that of a single process. Use reduce='sum' for it, or divide by a "
                    "count."
                )

    def _length(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        if self._whole:
            return wrapped(*args, **kwargs)
        with self.whole():  # a dataset asks another for its own length
            whole = wrapped(*args, **kwargs)
        known = self._known.get(id(instance))
        if known is None or known[0] is not instance or is_alone() or not asked_inside():
            return whole
        return self._of(known[1], known[2], whole)

    def _refuse_length_of(self, dataset: Any) -> None:
        """Raise an error if the function asks for a length of ``dataset``, or of the data in it, that cannot be reported for the part."""
        bound = self._bound | _locals(self._function)
        for thing in (dataset, *_data_in(dataset)):
            if (thing is not dataset or not can_patch(type(thing))) and _asks_for_length(self._function, bound, thing):
                raise UsageError(
                    f"a function decorated with @parwrap.evaluate asks for the length of a dataset that is a {type(thing).__name__}, "
                    "which counts all samples, but each rank reads only a part: use len(loader.dataset), divide by a count, or use "
                    "reduce='sum'."
                )

    def _of(self, loader: DataLoader, name: str, whole: int) -> int:
        """The length ``name`` of this rank's part of ``loader``; ``whole`` is the length of all the data."""
        batches, samples, readers = self.share(loader) if self._parts else Share(whole, whole)
        length = batches if name in ("batches", "batch_sampler") else samples
        if length is None:
            raise UsageError(
                "a function decorated with @parwrap.evaluate asks for a length before this rank's part of the DataLoader is known: ask "
                "after the loop, divide by a count, or use reduce='sum'."
            )
        self._reported[id(loader)] = readers
        self._asked[id(loader), name] = loader, "batches" if name == "batch_sampler" else name, whole, location()
        return length


def asked_inside() -> bool:
    """Whether the running call comes from the user's code or another library, rather than from torch or parwrap."""
    return not is_ours(asker())


def asked_for_a_bar() -> bool:
    """Whether the running call comes from a package that shows progress bars."""
    return _package(asker()) in BARS


def asker() -> FrameType:
    """The frame that has called the patched function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "") in PASSING_ON:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def can_patch(kind: type) -> bool:
    """Whether methods of ``kind`` can be replaced."""
    return bool(kind.__flags__ & HEAP_TYPE) and not issubclass(kind, torch.Tensor)


def _bound(function: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the names in ``function`` that are not its local variables."""
    function = inspect.unwrap(function)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    everything = getattr(function, "__globals__", {})
    bound = {name: everything[name] for name in names if name in everything}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True) if inspect.isfunction(function) else ()
    for name, cell in cells:
        with suppress(ValueError):  # it has no value yet
            bound[name] = cell.cell_contents
    return bound | dict(arguments)


def _inner(value: Any) -> list[Any]:
    """The objects one level inside ``value``."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) < 100 else []
    return list(getattr(value, "__dict__", {}).values())


def _locals(function: Callable) -> dict[str, Any]:
    """The variables of the running call of ``function``."""
    code, frame = getattr(inspect.unwrap(function), "__code__", None), sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    return dict(frame.f_locals) if frame.f_code is code else {}


def _data_in(dataset: Any) -> list[Any]:
    """The sources of samples of ``dataset``, such as the tensors of a ``TensorDataset``."""
    held = [each for value in getattr(dataset, "__dict__", {}).values() for each in (value if isinstance(value, tuple) else (value,))]
    return [each for each in held if _has_length(each, len(dataset))] if hasattr(dataset, "__len__") else []


def _has_length(value: Any, length: int) -> bool:
    try:
        return len(value) == length
    except TypeError:
        return False


def _asks_for_length(function: Callable, bound: Mapping[str, Any], thing: Any) -> bool:
    """Whether ``function`` contains ``len(name)`` with a name for ``thing``."""
    names = {name for name, value in bound.items() if value is thing}
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not names or code is None:
        return False
    loads = [each.argval for each in dis.get_instructions(code) if each.opname not in TELLS]
    return any(one == "len" and other in names for one, other in pairwise(map(_hashable, loads)))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str) else None


def _warn(text: str) -> None:
    warn(f"parwrap: {text}")
