"""The actor on module calls that runs one on several devices of this process, each with a part of the batch.

It decides which calls are divided. Cutting and putting together is ``scattering.py``'s, replicas are ``replicas.py``'s, their threads
``replica_threads.py``'s. What cannot be divided so that the numbers stay right runs as it would without, and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parwrap import group as groups
from parwrap.errors import UsageError
from parwrap.strategies.criteria import Criteria, is_criterion
from parwrap.strategies.pieces import Pieces, in_whole
from parwrap.strategies.replica_threads import is_undivided, run_together, undivided
from parwrap.strategies.replicas import replicas
from parwrap.strategies.scattering import cut, leaves_of, merged, rows_of, sizes_of, why_not

__all__ = ["DataParallel", "refuse_ranks"]


class DataParallel:
    """Divides the calls of models over devices.

    Args:
        devices: one replica on each; the first has the model. With a single one, calls run as they are.
        gather: whether outputs are put together on the first.
        loss: what a number that a model returns is over the samples: ``"mean"`` or ``"sum"``.
        asked: whether the devices were named, rather than all that there are.
    """

    def __init__(self, devices: Sequence[torch.device], gather: bool, loss: str, asked: bool) -> None:
        self._devices, self._gather, self._loss, self._asked = devices, gather, loss, asked
        self._criteria = Criteria()
        self._warned: set[str] = set()

    def call(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        """Run the call of ``module``: on several devices if it is called from outside of any other, and has parameters."""
        if is_undivided() or _is_aside(module):
            return run(*args, **kwargs)
        if isinstance(module, nn.parallel.DistributedDataParallel):  # the script deals with devices itself
            with undivided():
                return run(*args, **kwargs)
        if is_criterion(module, (args, kwargs)):
            return self._criteria.call(module, args, kwargs, run)
        if next(module.parameters(), None) is None:
            return run(*args, **kwargs)
        with undivided():
            return self._call(module, args, kwargs, run)

    def _call(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        if groups.current() is not None:
            if self._asked and len(self._devices) > 1:
                refuse_ranks(self._devices, groups.world_size())
            return run(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        rows = rows_of(leaves)
        sizes = sizes_of(rows, len(self._devices))
        if len(self._devices) < 2 or any(is_lazy(p) for p in module.parameters()):  # whose shapes the first batch tells
            return run(*args, **kwargs)
        self._check_device(module)
        reason = _why_whole(module) or why_not(leaves, rows)
        if reason is not None:
            self._say_once(module, reason)
            return run(*args, **kwargs)
        if len(sizes) < 2:
            return run(*args, **kwargs)
        return self._divided(module, args, kwargs, run, sizes)

    def _divided(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable, sizes: list[int]) -> Any:
        devices = self._devices[: len(sizes)]
        calls = []
        copies = replicas(module, devices)
        for replica, (own, named) in zip(copies, cut((args, kwargs), sizes, devices), strict=True):
            calls.append(lambda run=run if replica is module else replica, own=own, named=named: run(*own, **named))
        outputs = run_together(devices, calls, copies)
        weights = [size / sum(sizes) if self._loss == "mean" else 1.0 for size in sizes]
        return merged(outputs, sizes, weights, in_whole if self._gather else Pieces, type(module).__name__)

    def _check_device(self, module: nn.Module) -> None:
        first = self._devices[0]
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.device != first:
                raise UsageError(
                    f"{type(module).__name__} has a tensor on {tensor.device}, and the first of the devices of parwrap.data_parallel is "
                    f"{first}, where the model must be: move it there, model.to('{first}'), or name other device_ids."
                )

    def _say_once(self, module: nn.Module, reason: str) -> None:
        name = type(module).__name__
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"parwrap: {name} runs on the whole batch on {self._devices[0]} alone, and parwrap.data_parallel does nothing for it: "
                f"{reason}. This is said once.",
                stacklevel=2,
            )


def refuse_ranks(devices: Sequence[torch.device], ranks: int) -> None:
    """Several devices were named, and each of the ranks has one."""
    raise UsageError(
        f"parwrap.data_parallel(device_ids={[str(device) for device in devices]}) is for one process, and there are {ranks} ranks, each of "
        "which has one device. Leave device_ids out, and it does nothing on several ranks, or run one rank."
    )


def _is_aside(module: nn.Module) -> bool:
    """Whether a call is one of a replica, or of a model that torch computes again, traces or transforms."""
    return (
        isinstance(module, nn.DataParallel)  # which calls its own replicas, or the model
        or getattr(module, "_is_replica", False)
        or torch._C._current_graph_task_id() != -1  # a checkpoint computes its part again
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _why_whole(module: nn.Module) -> str | None:
    """Why ``module`` cannot have replicas, or their outputs not be those of the whole."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:  # torch._dynamo takes seconds to load
        return "it is compiled; compile the parts of it instead"
    if getattr(module, "batch_first", True) is False:
        return "its batch is not the first dimension (batch_first=False)"
    return None
