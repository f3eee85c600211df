"""Finds where a host would wait for its GPU, on a machine without one: all tensors of the block count as a GPU's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lagging_backend import Event, pinned

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2"}
"""Operators that need a number of the device, or make a tensor whose size depends on one."""

COPYING = "lift_fresh"
"""What ``torch.tensor([1.0])`` does with memory of the host, which is copied to the device without being pinned."""

READING = ("tolist", "numpy", "cpu")
"""Methods that read the memory of a tensor without an operator where that is the host's."""

ON_THE_HOST = ("/random_streams",)
"""Files whose tensors are on the CPU beside a GPU too: states of generators."""

_OWN = str(Path(torch.__file__).parent), __file__


def _place() -> str:
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_pinned(tensor: Any) -> bool:
    return any(tensor is each for each in pinned)


class _Operators(TorchDispatchMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if args and _is_pinned(args[0]):
            return func(*args, **(kwargs or {}))
        masked = name in ("index", "index_put_") and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in WAITING or name == COPYING or masked:
            self._places.append(f"{name} at {_place()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def synchronizations() -> Iterator[list[str]]:
    """The places at which a host would wait while the block runs, in its thread."""
    places: list[str] = []
    before = len(Event.waits)
    with pytest.MonkeyPatch.context() as patch, _Operators(places):
        for name in READING:
            patch.setattr(torch.Tensor, name, _reading(name, getattr(torch.Tensor, name), places))
        yield places
    places += Event.waits[before:]
    places[:] = [place for place in places if not place.partition(".py:")[0].endswith(ON_THE_HOST)]


def _reading(name: str, read: Callable[..., Any], places: list[str]) -> Callable[..., Any]:
    def reads(tensor: torch.Tensor, *given: Any) -> Any:
        if not _is_pinned(tensor):
            places.append(f"{name} at {_place()}")
        return read(tensor, *given)

    return reads
