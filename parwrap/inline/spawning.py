"""Starts ranks as new interpreters: cloudpickle packs a rank's task here, and the rank unpacks it.

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
from parwrap.inline.object_graph import within
from parwrap.inline.python_changes import objects_reached
from parwrap.inline.rank_process import Job, run
from parwrap.inline.returned_state import SyncedObjects, is_tracked, pickle_module
from parwrap.loop.random_streams import get_state
from parwrap.system.shared_memory import private_file

__all__ = ["Spawns", "become"]

EXTRA = "pip install cloudpickle, or install parwrap[notebook]"


class Spawns:
    """Starts ranks that receive from this process what their function reaches.

    Args:
        function: the function to call.
        environ: their environment variables.
        size: the number of ranks.
        file: the file to pack the function into.
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
        """The process of the rank that runs ``job``; adds to ``job`` how the rank starts."""
        how = {"load": partial(_load, self._function), "environ": {}, "threads": None, "streams": self._streams}
        spawned = job(pipe=pipe, outputs={number: number for number in output.outputs}, **how)
        return _Interpreter(spawned, [self._function, spawned.failure, spawned.end, pipe], output.outputs, self._environ)


class _Interpreter:
    """A new interpreter that runs ``job``. It has those methods of :class:`multiprocessing.Process` that are used.

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
    """Run as the rank whose job is in the file ``descriptor``."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        job, sys.argv[:], cells = pickle.load(file)
    linecache.cache.update(cells)
    run(job)


class _Sent(list):
    """The objects that a function reaches and that were packed with it, without parts that a class omits from its pickle."""

    def pick(self, packed: Mapping[int, Any]) -> list[tuple[str, Any]]:
        self[:] = [(name, thing) for name, thing in self if id(thing) in packed]
        return list(self)


def _pack(function: Callable[[], Any], file: BinaryIO, who: str) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Write ``function`` into ``file`` for :func:`_load`. Returns the objects that both the caller and the ranks then have."""
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
                reduced[2][1]["__globals__"] = {}  # an importable module exists in the rank too, with separate state
            return reduced

    try:
        # things and reached come after it, and are complete by then
        torch.save((function, things, reached), file, pickle_module(Pickler=Pickler), pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        name, uses = _unpicklable(function, Pickler), "something that the function uses"
        raise UsageError(
            f"{who} starts ranks in new interpreters here, and {f'{name}, which the function uses,' if name else uses} cannot be sent to "
            f"them: {error}. Create it inside the function, or pass what it is created from."
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
    """Whether ``kind`` has no pickling method of its own, so that its objects are sent attribute by attribute."""
    plain = torch.nn.Module if issubclass(kind, torch.nn.Module) else object
    ways = [(getattr(kind, way, None), getattr(plain, way, None)) for way in ("__reduce_ex__", "__reduce__", "__getstate__")]
    return issubclass(kind, (FunctionType, MethodType, partial)) or all(own is usual for own, usual in ways)


def _load(descriptor: int, device: torch.device) -> tuple[Callable[[], Any], SyncedObjects]:
    """Load the function, and those of its objects that are the caller's. Objects on the caller's GPU are moved to ``device``.

    The names that the function uses in the caller's ``__main__`` are defined in this process's ``__main__``, where DataLoader workers, for
    example, look them up.
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
    # schedulers mark their optimizer's step method, and the mark is not sent
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    return function, callers


class _NamesOf(dict):
    """Replaces the global names of a module with those that it has in the rank."""

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
            "call it before anything initializes CUDA: then ranks are forked, and do not need cloudpickle."
        ) from None
