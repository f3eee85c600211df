"""Starts ranks as new interpreters: cloudpickle packs a rank's task here, and the rank unpacks it.

Such a rank has only what its function reaches. ``launching.py`` watches and ends it.
"""

from __future__ import annotations

import importlib
import io
import linecache
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.serialization import default_restore_location

from parwrap.errors import UsageError
from parwrap.inline.rank_process import Job, Task, run
from parwrap.inline.returned import pickle_module
from parwrap.ranks.device import choose_device
from parwrap.ranks.world import detect

__all__ = ["Interpreter", "become", "loaded", "pack"]


class Interpreter:
    """A new interpreter that runs ``job``, with the methods of :class:`multiprocessing.Process` that ``launching.py`` uses.

    The class of multiprocessing would run the caller's script again.
    """

    def __init__(self, job: Job, outputs: Mapping[int, int], threads: int) -> None:
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}  # of a notebook
        file = job.folder / f"job-{job.rank}"
        file.write_bytes(pickle.dumps((job, sys.argv, cells, _facts_of_main())))
        self.sentinel, ended = os.pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from parwrap.inline.spawning import become; become({str(file)!r})"
        self._process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            stdout=outputs.get(1),
            stderr=outputs.get(2),
            pass_fds=[ended, job.pipe],
            env={"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0", **os.environ, **job.variables},
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


def become(file: str) -> None:
    """Run as the rank whose job is in ``file``."""
    job, sys.argv[:], cells, facts = pickle.loads(Path(file).read_bytes())
    linecache.cache.update(cells)
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(facts)
    run(job)


def _facts_of_main() -> dict[str, Any]:
    """The attributes of ``__main__`` that say where its code is: relative imports and processes that import ``__main__`` need them."""
    main = vars(sys.modules["__main__"])
    facts: dict[str, Any] = {name: main[name] for name in ("__file__", "__package__") if name in main}
    if spec := main.get("__spec__"):
        facts["__spec__"] = ModuleSpec(spec.name, loader=None)  # not every loader can be sent
    return facts


def pack(task: Task, file: Path, who: str) -> None:
    """Write ``task`` into ``file`` for :func:`loaded`.

    Raises:
        UsageError: cloudpickle is not installed, or something that the function reaches cannot be sent.
    """
    cloudpickle = _cloudpickle(who)

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        def reducer_override(self, thing: Any) -> Any:
            home = _home(thing) if type(thing) is FunctionType else None
            if home is not None:
                self.globals_ref.setdefault(id(thing.__globals__), _NamesOf(home))
            reduced = super().reducer_override(thing)
            if home not in (None, "__main__") and isinstance(reduced, tuple):
                reduced[2][1]["__globals__"] = {}  # an importable module exists in the rank too, with separate state
            return reduced

    try:
        torch.save(task, file, pickle_module(Pickler=Pickler), pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        name = next((f"{name}, which the function uses," for name, each in task.names().items() if _fails(each, Pickler)), None)
        raise UsageError(
            f"{who} starts ranks in new interpreters here, and {name or 'something that the function uses'} cannot be sent to them: "
            f"{error}. Create it inside the function, or pass what it is created from."
        ) from error


def _fails(thing: Any, pickler: type[pickle.Pickler]) -> bool:
    try:
        pickler(io.BytesIO()).dump(thing)
    except Exception:
        return True
    return False


def loaded(file: Path, backend: str | None) -> Task:
    """In a rank, the task that is packed in ``file``. Objects on the caller's GPU move to the rank's device.

    The names that the function uses in the caller's ``__main__`` are defined in this process's ``__main__``, where DataLoader workers, for
    example, look them up.
    """
    device = str(choose_device(detect(os.environ), backend))
    # schedulers mark their optimizer's step method, and the mark is not sent
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    return torch.load(
        file,
        weights_only=False,
        map_location=lambda storage, where: default_restore_location(storage, device if where.startswith("cuda") else where),
        pickle_module=pickle_module(Unpickler=pickle.Unpickler),
    )


class _NamesOf(dict):
    """Stands for a module's global names in packed data. A rank unpacks it as the global names of its own module with that name."""

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
            f"{who} starts ranks in new interpreters here, but cloudpickle, which sends functions to them, is not installed: pip install "
            "cloudpickle, or parwrap[notebook]. On Linux, ranks are forked and need no cloudpickle if the call comes before anything "
            "starts CUDA and start_method='spawn' is not passed."
        ) from None
