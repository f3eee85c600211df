"""Ranks that are new interpreters: cloudpickle packs a rank's task here, and it is unpacked there.

Such a rank has only what its function reaches. ``launching.py`` watches and ends it.
"""

from __future__ import annotations

import importlib
import io
import linecache
import mmap
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, BinaryIO, cast

import torch
from torch.serialization import default_restore_location

from parwrap.errors import UsageError
from parwrap.group.device import cores
from parwrap.inline.child_output import ChildOutput
from parwrap.inline.object_changes import objects_reached
from parwrap.inline.object_graph import within
from parwrap.inline.object_sync import SyncedObjects, is_tracked, pickle_module
from parwrap.inline.rank_process import Job, run
from parwrap.loop.random_streams import get_state
from parwrap.system.shared_memory import private_file

__all__ = ["Spawns", "become"]

EXTRA = "pip install cloudpickle, or install parwrap[notebook]"


class Spawns:
    """Starts ranks that get from this process what their function reaches.

    Args:
        function: the function to call.
        environ: their environment variables.
        size: the number of ranks.
        file: to pack the function into.
        who: the name of the caller in errors.

    Raises:
        UsageError: cloudpickle is not installed, or something that the function reaches cannot be sent.
    """

    def __init__(self, function: Callable[[], Any], environ: Mapping[str, str], size: int, file: BinaryIO, who: str) -> None:
        self.callers = SyncedObjects(*_pack(function, file, who))
        self._function = file.fileno()
        shared_out = {"OMP_NUM_THREADS": str(max(1, cores() // size)), "PYTHONHASHSEED": "0"}
        self._environ = {**shared_out, **os.environ, **environ}
        self._streams = get_state()

    def start(self, job: Callable[..., Job], output: ChildOutput, pipe: int) -> _Interpreter:
        """The process of the rank that runs ``job``, completed with how it starts."""
        how = {"load": partial(_load, self._function), "environ": {}, "threads": None, "streams": self._streams}
        spawned = job(pipe=pipe, outputs={number: number for number in output.outputs}, **how)
        return _Interpreter(spawned, [self._function, spawned.failure, spawned.end, pipe], output.outputs, self._environ)


class _Interpreter:
    """A new interpreter that runs ``job``, with the parts of :class:`multiprocessing.Process` that are used.

    multiprocessing's own class would run the caller's script again.
    """

    def __init__(self, job: Job, inherited: list[int], outputs: Mapping[int, int], environ: Mapping[str, str]) -> None:
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}  # of a notebook
        self.sentinel, ended = os.pipe()
        with private_file() as file:
            pickle.dump((job, sys.argv, cells), file)
            file.flush()
            code = f"import sys; sys.path[:] = {sys.path!r}; from parwrap.inline.spawning import become; become({file.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
                stdin=subprocess.DEVNULL,
                stdout=outputs.get(1),
                stderr=outputs.get(2),
                pass_fds=[file.fileno(), ended, *inherited],
                env=environ,
            )
        os.close(ended)
        self.pid, self.kill = self._process.pid, self._process.kill

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        os.close(self.sentinel)


def become(descriptor: int) -> None:
    """Be the rank that is described in that file."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        job, sys.argv[:], cells = pickle.load(file)
    linecache.cache.update(cells)
    run(job)


class _Sent(list):
    """The objects that a function reaches and that were packed with it; parts that a class omits were not."""

    def pick(self, packed: Mapping[int, Any]) -> list[tuple[str, Any]]:
        self[:] = [(name, thing) for name, thing in self if id(thing) in packed]
        return list(self)


def _pack(function: Callable[[], Any], file: BinaryIO, who: str) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Write ``function`` into ``file``, for :func:`_load`; returns the objects that the caller and the ranks then both have."""
    things: list[Any] = []
    reached = _Sent(objects_reached(function))
    cloudpickle = _cloudpickle(who)

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        def reducer_override(self, thing: Any) -> Any:
            if is_tracked(thing):
                things.append(thing)
            if thing is reached:
                return list, (reached.pick(self.memo.copy()),)
            home = _home(thing) if type(thing) is FunctionType else None
            if home is not None:
                self.globals_ref.setdefault(id(thing.__globals__), _NamesOf(home))
            reduced = super().reducer_override(thing)
            if home not in (None, "__main__") and isinstance(reduced, tuple):
                reduced[2][1]["__globals__"] = {}  # the names of an importable module exist there, with separate state
            return reduced

    try:
        # things and reached come after it, and are complete by then
        torch.save((function, things, reached), file, pickle_module(Pickler=Pickler), pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        name, uses = _unpicklable(function, Pickler), "something that the function uses"
        raise UsageError(
            f"{who} starts ranks in new interpreters here, and {f'{name}, which the function uses,' if name else uses} "
            f"cannot be sent to them: {error}. Make it inside the function, or pass what it is made from."
        ) from error
    file.flush()
    return things, reached


def _unpicklable(function: Callable[[], Any], pickler: type[pickle.Pickler]) -> str:
    """The name by which ``function`` reaches the innermost object that cannot be packed, or an empty string."""

    class Trial(pickler):  # type: ignore[misc,valid-type]
        def reducer_override(self, thing: Any) -> Any:
            return (int, ()) if issubclass(type(thing), torch.Tensor) else super().reducer_override(thing)

    def fails(thing: Any) -> bool:
        try:
            Trial(io.BytesIO()).dump(thing)
        except Exception:
            return True
        return False

    name, thing, seen = "", cast(Any, function), set()
    while not name or _is_sent_in_parts(type(thing)):
        inner = next((each for each in within(thing, name) if id(each[1]) not in seen and fails(each[1])), None)
        if inner is None:
            break
        name, thing = inner
        seen.add(id(thing))
    return name


def _is_sent_in_parts(kind: type) -> bool:
    """Whether it does not define how it is pickled."""
    plain = torch.nn.Module if issubclass(kind, torch.nn.Module) else object
    ways = [(getattr(kind, way, None), getattr(plain, way, None)) for way in ("__reduce_ex__", "__reduce__", "__getstate__")]
    return issubclass(kind, (FunctionType, MethodType, partial)) or all(own is usual for own, usual in ways)


def _load(descriptor: int, device: torch.device) -> tuple[Callable[[], Any], SyncedObjects]:
    """The function, and the caller's objects among its own; objects on the caller's GPU come to ``device``.

    The names that the function uses in the caller's ``__main__`` become this process's, so that lookups by name, as by the workers of a
    loader, find them.
    """
    sys.modules["__main__"] = ModuleType("__main__")
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file:
        function, things, reached = torch.load(
            cast(BinaryIO, file),
            weights_only=False,
            map_location=lambda storage, where: default_restore_location(storage, str(device) if where.startswith("cuda") else where),
            pickle_module=pickle_module(Unpickler=pickle.Unpickler),
        )
    callers = SyncedObjects(things, reached, _cloudpickle("parwrap").Pickler, own=objects_reached(function))
    callers.watch()
    # schedulers mark the step of their optimizers, which is not sent
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    return function, callers


class _NamesOf(dict):
    """Replaces the global names of a module by those that it has in the rank."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __reduce__(self) -> Any:
        return _names_of, (self._module,)


def _names_of(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))


def _home(function: FunctionType) -> str | None:
    """The module whose global names a function uses, if the rank has that module too."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name or "")
    known = name == "__main__" or getattr(module, "__spec__", None) is not None
    return name if known and getattr(module, "__dict__", None) is function.__globals__ else None


def _cloudpickle(who: str) -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(
            f"{who} starts ranks in new interpreters here, but cloudpickle, which sends functions to them, is not installed: {EXTRA}. Or "
            "call it before anything starts CUDA: then ranks are forked, and do not need it."
        ) from None
