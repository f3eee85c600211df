"""Private names of what torch keeps for the whole process: global hooks, open process groups and active modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import _python_dispatch

__all__ = ["active_modes", "default_device", "global_hooks", "open_process_groups"]

_GLOBAL = "_global_"
"""How torch begins the names of its dicts of global hooks."""


def global_hooks() -> dict[str, list[Any]]:
    """The global hooks on modules and optimizers, by the kind of hook. Publicly, they can only be added and removed."""
    return {
        name.removeprefix(_GLOBAL): list(hooks.values())
        for room in (modules, optimizers)
        for name, hooks in vars(room).items()
        if name.startswith(_GLOBAL) and isinstance(hooks, dict)
    }


def open_process_groups() -> set[str]:
    """The names of all open process groups of this process. Publicly, only the default group can be asked for."""
    return set(dist.distributed_c10d._world.pg_names.values())


def active_modes() -> list[Any]:
    """The active modes of ``__torch_function__``, then those of ``__torch_dispatch__``, each outermost first.

    Publicly, modes can only be entered.
    """
    stacks: list[Callable[[], list[Any]]] = [
        torch.overrides._get_current_function_mode_stack,
        _python_dispatch._get_current_dispatch_mode_stack,
    ]
    return [mode for stack in stacks for mode in stack()]


def default_device() -> torch.device:
    """``torch.get_default_device()``, which fails in torch 2.9 after ``torch.set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")
