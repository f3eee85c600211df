"""What a test on warm ranks must leave as it was: patched calls, environment, threads, torch's global settings.

The next test runs in the same processes. So every test shows that parwrap restores what it patches.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from operator import is_
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch

from parwrap.errors import shortened
from parwrap.ranks.group import current
from parwrap.ranks.platform import known_signals
from parwrap.torch_private.process_state import active_modes, default_device, global_hooks, open_process_groups

__all__ = ["State", "differences", "seed"]

PATIENCE = 2.0
"""Seconds that threads and processes of a test may go on after the test has ended."""

PACKAGES = ("torch.amp", "torch.autograd", "torch.nn", "torch.optim", "torch.utils.data", "numpy.random", "pathlib", "torchdata")
"""Packages whose modules and classes are compared, as far as they are loaded; see ``MODULES``."""

MODULES = frozenset(
    [
        *("builtins", "codecs", "csv", "glob", "io", "json", "logging", "mmap", "os", "pickle", "posixpath", "random", "shutil", "signal"),
        *("sqlite3", "subprocess", "sys", "tarfile", "tempfile", "threading", "time", "warnings", "zipfile", "multiprocessing.process"),
        *("numpy", "torch", "torch.cuda", "torch.func", "torch.jit", "torch.multiprocessing", "torch.onnx", "torch.random"),
        *("torch.serialization", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.distributed_c10d"),
        *("torch.utils.checkpoint", "torch.utils.tensorboard.writer", "torchvision.utils", "cv2", "h5py", "imageio", "joblib"),
        *("matplotlib.pyplot", "pandas", "pandas.core.frame", "pandas.core.generic", "safetensors.torch", "tqdm.std", "yaml"),
    ]
)
"""Modules that are compared if they are loaded: their callables, and the attributes of their classes."""

TORCHS_SIGNALS = known_signals("SIGCHLD")
"""The signals that torch handles from the first ``DataLoader`` with workers on."""


class State:
    """The state of this process.

    Args:
        module: the name of the test's module, in which patches also replace imported names.

    Attributes:
        modules: the names in each module, and a copy: callables must stay the identical objects.
        classes: the attributes of each class, and a copy: they must stay the identical objects, and no callable may be added.
        objects: other objects by name, which must stay the identical ones.
        values: other facts by name, which must stay equal. Of a fact that is a dict, each entry is compared and reported by itself.
        threads: the running threads.
    """

    def __init__(self, module: str) -> None:
        modules = [(name, vars(each)) for name, each in [*sys.modules.items()] if _is_compared(name, each, module)]
        self.modules = [(name, names, names.copy()) for name, names in modules]
        classes = [found for module, _, copy in self.modules for found in _classes(module, copy)]
        self.classes = [(name, attributes, attributes.copy()) for name, attributes in classes]
        self.objects = dict(_objects())
        self.values = dict(_values())
        self.threads = set(threading.enumerate())


def seed() -> None:
    """Give every stream of random numbers the state with which each test starts."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def differences(before: State) -> list[str]:
    """What is different from ``before``, in words; empty if the test has left everything as it was."""
    deadline = time.monotonic() + PATIENCE
    left = [thread for thread in threading.enumerate() if thread not in before.threads and not isinstance(thread, threading._DummyThread)]
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    found = [f"the thread {thread.name!r}" for thread in left if thread.is_alive()]
    found += [f"the process {process.name!r}" for process in multiprocessing.active_children()]
    now = dict(_values())
    for name, value in before.values.items():
        found += _unequal(name, value, now[name])
    for owner, names, copy in before.modules:
        loaded = sys.modules.get(owner)
        if loaded is not None and getattr(loaded, "__dict__", None) is not names:  # a module may be unloaded, but not replaced
            found.append(f"the module {owner}")
        elif not _identical(names, copy):
            found += [f"{owner}.{name}" for name in _replaced(names, copy) if callable(copy[name])]
    for owner, attributes, copy in before.classes:
        if not _identical(attributes, copy):
            added = [name for name, value in attributes.copy().items() if name not in copy and callable(value) and not _hooked(value)]
            found += [f"{owner}.{name}" for name in [*_replaced(attributes, copy), *added]]
    objects = dict(_objects())
    found += [name for name, each in before.objects.items() if objects.get(name) is not each]
    return found


def _identical(names: Mapping[str, Any], copy: Mapping[str, Any]) -> bool:
    """Whether both have the same names and objects, in the same order. This quick check settles nearly all of a thousand classes."""
    return len(names) == len(copy) and all(map(is_, names.values(), copy.values())) and [*names] == [*copy]


def _replaced(names: Mapping[str, Any], copy: Mapping[str, Any]) -> list[str]:
    return [name for name, value in copy.items() if name not in names or (names[name] is not value and not _hooked(names[name]))]


def _hooked(value: Any) -> bool:
    """Whether ``value`` is the ``step`` that torch gives a class when its first optimizer is built."""
    return type(value) is FunctionType and getattr(value, "hooked", False)


def _unequal(name: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, Mapping):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _unequal(f"{name} {key}", before.get(key), after.get(key))
    elif before != after:
        if isinstance(before, list):  # what both have says nothing
            before, after = [each for each in before if each not in after], [each for each in after if each not in before]
        yield f"{name} ({shortened(repr(before), 80)} before, {shortened(repr(after), 80)} now)"


def _is_compared(name: str, loaded: Any, module: str) -> bool:
    return (name in MODULES or name == module or name.startswith(PACKAGES)) and isinstance(loaded, ModuleType)


def _classes(module: str, names: Mapping[str, Any]) -> Iterator[tuple[str, MappingProxyType[str, Any]]]:
    """The attributes of the classes that a module defines."""
    for name, value in names.items():
        if issubclass(type(value), type) and value.__module__ == module:  # isinstance would run code of an object that poses as another
            yield f"{module}.{name}", vars(value)


def _objects() -> Iterator[tuple[str, Any]]:
    for name in ("stdin", "stdout", "stderr"):
        yield f"the stream sys.{name}", getattr(sys, name)
    if (group := current()) is not None:
        yield "group.current()", group
        for name, value in vars(group).items():
            yield f"group.current().{name}", value


def _values() -> Iterator[tuple[str, Any]]:
    yield "the environment variable", dict(os.environ)
    yield "the working directory", os.getcwd()
    yield "the file descriptor", {fd: (os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in (1, 2)}
    yield "sys.path", list(sys.path)
    yield "sys.argv", list(sys.argv)
    yield "sys.meta_path", list(sys.meta_path)
    yield "the tracing function", (sys.gettrace(), sys.getprofile())
    yield "the signal handler", {signal.Signals(each).name: signal.getsignal(each) for each in signal.Signals if each not in TORCHS_SIGNALS}
    yield "the warning filters", list(warnings.filters)
    yield "the root logger", {"level": logging.root.level, "handlers": list(logging.root.handlers), "disable": logging.root.manager.disable}
    yield "numpy's error handling", np.geterr()
    yield "the default dtype", torch.get_default_dtype()
    yield "the default device", default_device()
    yield "whether gradients are on", torch.is_grad_enabled()
    yield "inference mode", torch.is_inference_mode_enabled()
    yield "autocast on", {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    yield "anomaly detection", torch.is_anomaly_enabled()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "cudnn", {"benchmark": torch.backends.cudnn.benchmark, "deterministic": torch.backends.cudnn.deterministic}
    yield "the precision of float32 products", torch.get_float32_matmul_precision()
    yield "torch's number of threads", torch.get_num_threads()
    yield "torch's active modes", active_modes()
    yield "torch's", global_hooks()
    yield "the open process groups", open_process_groups()
