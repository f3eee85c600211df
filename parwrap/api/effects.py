"""The side effects of a function: numbers that it leaves in objects, files that it writes, and its output.

If a function runs on a part of the data, its side effects cover only that part, and nothing merges them. They are found by comparing
everything the function can reach before and after, and by observing what it writes.
"""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from parwrap.data.evaluation.evaluation import refuse_unreadable, refused_backward
from parwrap.group.group import together
from parwrap.intercept.backward import Backward
from parwrap.intercept.disk import Opening
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.patching.patch import Patch
from parwrap.rank_zero.open_files import writes
from parwrap.torch_private.modules import registered_buffers, registered_modules
from parwrap.torch_private.tensors import version_of

__all__ = ["Onlooker", "Silent", "State", "modes_set_together", "reached"]

MOST = 20_000
"""The most objects to examine."""
LARGEST = 1 << 24
"""The most bytes of a tensor or array to compare; for a larger tensor only writes are detected."""

PASSED_OVER = (
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    type,
    DataLoader,
    Dataset,
    Sampler,
    logging.Logger,
    torch.optim.Optimizer,
    nn.Parameter,
)
"""Objects that are not examined: data, code, and weights, which an evaluation does not change."""


class Onlooker(Interceptor):
    """Observes a function while it runs on all the data.

    Attributes:
        loaders: the loaders that it has read, with the earlier state of their samplers.
        written: the first file that it has written.
        printed: what it has printed and logged.
    """

    def __init__(self) -> None:
        self.loaders: dict[int, tuple[DataLoader[Any], list[tuple[Any, Any]]]] = {}
        self.written: str | None = None
        self.printed: list[str] = []

    @intercepts
    def iterate(self, loader: DataLoader[Any], original: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        refuse_unreadable(loader)
        self.loaders.setdefault(id(loader), (loader, _samplers_state(loader)))
        return original(loader)

    @intercepts
    def backward(self, call: Backward) -> None:
        raise refused_backward()

    @intercepts
    def open(self, call: Opening) -> Any:
        if writes(call.mode):
            self._wrote(call.file)
        return call.run()

    @intercepts
    def save(self, file: Any, write: Callable[[Any], None]) -> None:
        self._wrote(file)
        write(file)

    @intercepts
    def speak(self, say: Any, file: Any, force: bool) -> None:
        self.printed.append(" ".join(map(str, say.args)))
        say(force=force) if force else say()

    @intercepts
    def log(self, record: logging.LogRecord, handle: Callable[[], None]) -> None:
        self.printed.append(record.getMessage())
        handle()

    def rewind(self) -> None:
        """Reset the samplers of the loaders to their earlier state, to draw the same again."""
        for _, states in self.loaders.values():
            for of, state in states:
                if isinstance(of, torch.Generator):
                    of.set_state(state)
                else:
                    vars(of).update(state)

    def _wrote(self, file: Any) -> None:
        if isinstance(file, (str, os.PathLike)):
            path = os.path.abspath(os.fspath(file))
            if not path.startswith(("/dev/", tempfile.gettempdir() + os.sep + "pymp-")):
                self.written = self.written or path


def modes_set_together() -> Patch:
    """While each rank runs separately, ``model.eval()`` must still give all ranks the same buffers."""

    def train(wrapped: Callable[..., Any], instance: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        with together():
            return cast(nn.Module, wrapped(*args, **kwargs))

    return Patch(nn.Module, "train", train)


def _samplers_state(loader: DataLoader[Any]) -> list[tuple[Any, Any]]:
    samplers = [loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    held = [loader.generator, *(value for each in samplers for value in getattr(each, "__dict__", {}).values())]
    generators = {id(each): each for each in held if isinstance(each, torch.Generator)}
    return [
        *((each, each.get_state()) for each in generators.values()),
        *((each, dict(vars(each))) for each in samplers if hasattr(each, "__dict__")),
    ]


class Silent(Interceptor):
    """Silences a function that runs a second time.

    Attributes:
        printed: what it would have printed.
    """

    def __init__(self) -> None:
        self.printed: list[str] = []

    @intercepts
    def speak(self, say: Any, file: Any, force: bool) -> None:
        self.printed.append(" ".join(map(str, say.args)))

    @intercepts
    def log(self, record: logging.LogRecord, handle: Callable[[], None]) -> None:
        self.printed.append(record.getMessage())


def reached(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What ``function`` can change, by name: its arguments, closure variables and globals, including those of functions that it calls."""
    known: dict[str, Any] = {}
    waiting, seen = [inspect.unwrap(function)], set()
    while waiting:
        each = waiting.pop()
        each = inspect.unwrap(each.__func__ if isinstance(each, MethodType) else each)
        if not isinstance(each, FunctionType) or each in seen or each.__module__.partition(".")[0] in ("torch", "parwrap", "numpy"):
            continue
        seen.add(each)
        names = {name: each.__globals__[name] for name in each.__code__.co_names if name in each.__globals__}
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            try:
                names[name] = cell.cell_contents
            except ValueError:  # unassigned
                continue
        for name, value in names.items():
            known.setdefault(name, value)
        waiting += [value for value in names.values() if isinstance(value, FunctionType)]
    return known | dict(arguments)


class State:
    """The present state of ``roots``.

    Args:
        roots: objects by name.

    >>> history = []; before = State({"history": history}); history.append(0.5); before.changed(State({"history": history}))
    'history[0]'
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._held: dict[str, Any] = {}
        self._in_modules: set[str] = set()
        self._whole = True
        seen: set[int] = set()
        waiting = deque((name, value) for name, value in roots.items())
        while waiting:
            place, value = waiting.popleft()
            if len(self._held) >= MOST:
                self._whole = False
                break
            self._held[place] = _content(value)
            if id(value) not in seen:
                seen.add(id(value))
                inner = _inner(value)
                if isinstance(value, nn.Module):
                    self._in_modules |= {place + name for name, _ in inner}
                waiting.extend((place + name, each) for name, each in inner)

    def changed(self, after: State) -> str | None:
        """The first place where ``after`` differs; ``None`` if it does not, or is too large to compare."""
        if not (self._whole and after._whole):
            return None
        for place, content in after._held.items():
            before = self._held.get(place, _ABSENT)
            if _alike(before, content) or _is_cache(place, before, place in after._in_modules):
                continue
            return place
        return next((place for place in self._held if place not in after._held), None)


_ABSENT = object()


def _is_cache(place: str, before: Any, of_module: bool) -> bool:
    """Whether a new value at ``place`` is something that the first call caches for later calls, rather than a result."""
    return (of_module and (before is _ABSENT or before is None)) or (before is _ABSENT and place.rpartition(".")[2].startswith("_"))


class _Numbers(NamedTuple):
    """A snapshot of a tensor or an array.

    Attributes:
        of: the tensor or array.
        version: the version that a tensor increments with each write.
        content: a digest of the content; ``None`` if it is too large.
    """

    of: Any
    version: int | None
    content: str | None


def _content(value: Any) -> Any:
    """The part of ``value`` that is compared."""
    if isinstance(value, torch.Tensor):
        return _Numbers(value, None if value.is_inference() else version_of(value), _summed(value))
    if isinstance(value, np.ndarray):
        return _Numbers(value, None, str(hash(value.tobytes())) if value.nbytes <= LARGEST and value.dtype != object else "")
    return value


@torch.no_grad()
def _summed(value: torch.Tensor) -> str | None:
    """A value that changes if ``value`` is overwritten, even with equal numbers, for example a buffer that the ranks have agreed on."""
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.nbytes > LARGEST:
        return None
    real = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()
    return f"{real.sum().item()} {real.square().sum().item()}"


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, _Numbers) and isinstance(other, _Numbers):
        unwritten = one.version is not None and one.version == other.version
        return one.of is other.of and (unwritten or (one.content is not None and one.content == other.content))
    if type(one) is not type(other):
        return False
    return one is other or (isinstance(one, (int, float, complex, str, bytes)) and (one == other or one != one))


def _inner(value: Any) -> list[tuple[str, Any]]:
    """The parts of ``value``, by the expression of each."""
    if isinstance(value, (*PASSED_OVER, torch.Tensor, np.ndarray)):
        return []
    if isinstance(value, dict):
        return [(f"[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [(f"[{at}]", each) for at, each in enumerate(value)] if len(value) < MOST else [(" (length)", len(value))]
    if isinstance(value, (set, frozenset)):
        return [(" (length)", len(value))]
    if isinstance(value, nn.Module):
        held = {
            **registered_buffers(value),
            **{name: each for name, each in vars(value).items() if not name.startswith("_") and name != "training"},
        }
        return [(f".{name}", each) for name, each in {**held, **registered_modules(value)}.items()]
    if type(value).__module__.partition(".")[0] in ("tqdm", "torch", "parwrap", "threading", "builtins"):
        return []
    return [(f".{name}", each) for name, each in getattr(value, "__dict__", {}).items()]
