"""The interceptor that runs a module call on several devices of this process, each with a part of the batch.

It decides which calls to divide. A call that cannot be divided without changing its results runs unchanged, with a warning.
``scatter_gather.py`` cuts and merges, ``replicas.py`` makes replicas, ``replica_threads.py`` runs them, and ``batch_split_check.py``
compares the parts with the whole.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parwrap.coordination.call_site import location, worth_a_look
from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.strategies.data_parallel.batch_split_check import Untried, note_call, why_not_in_parts
from parwrap.strategies.data_parallel.replica_threads import is_undivided, run_together, undivided
from parwrap.strategies.data_parallel.replicas import replicas
from parwrap.strategies.data_parallel.scatter_gather import cut, items_of_samples, kinds_of, leaves_of, merged, rows_of, sizes_of, why_not
from parwrap.strategies.data_parallel.sharded_outputs import Pieces, in_whole
from parwrap.system.progress_bars import write_line
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id, innermost_saved_tensors_hooks
from parwrap.torch_private.data_parallel import IS_REPLICA
from parwrap.torch_private.modes import DeviceContext, current_transform, dispatch_mode_depth, function_modes, tracing_state
from parwrap.torch_private.modules import ORIGINAL_MODULE, compiled_call, module_hooks, registered_modules
from parwrap.torch_private.pytree import tree_map_only

__all__ = ["DataParallel", "refuse_ranks"]


class _Known:
    """The state of one module: how often it was divided, which kinds of calls were tried, and why it must not be divided."""

    def __init__(self) -> None:
        self.calls, self.kinds = 0, set[Any]()
        self.reason: str | None = None


class DataParallel(Interceptor):
    """Divides the calls of models over devices.

    Args:
        devices: the devices of the replicas; the model is on the first. With a single device, calls run unchanged.
        gather: whether outputs are gathered on the first device.
        loss: how a number that a model returns combines the samples: ``"mean"`` or ``"sum"``. Without it, such a model runs on
            the whole batch.
        named: whether the user named the devices.
    """

    def __init__(self, devices: Sequence[torch.device], gather: bool, loss: str | None, named: bool) -> None:
        self._devices, self._gather, self._loss, self._named = devices, gather, loss, named
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._warned: set[tuple[str, str]] = set()

    @intercepts
    def call(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        """Run a call of ``module``, on several devices if the module has parameters and no other module calls it."""
        if is_undivided() or _is_internal(module):
            note_call(module)
            return run(*args, **kwargs)
        if isinstance(module, nn.parallel.DistributedDataParallel):  # the script deals with devices itself
            with undivided():
                return run(*args, **kwargs)
        if next(module.parameters(), None) is None:
            plain = type(module).__module__.startswith("torch.nn.") and compiled_call(module) is None
            return run(*args, **kwargs) if plain else _on_whole(run, args, kwargs)  # torch's modules accept pieces
        with undivided():
            return self._call(module, args, kwargs, run)

    def _call(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        if groups.current() is not None:
            if self._named and len(self._devices) > 1:
                refuse_ranks(self._devices, groups.world_size())
            return run(*args, **kwargs)
        if len(self._devices) < 2 or any(is_lazy(p) for p in module.parameters()):  # the first batch sets the shapes
            return run(*args, **kwargs)
        self._check_device(module)
        leaves = leaves_of((args, kwargs))
        rows = rows_of(leaves)
        sizes = sizes_of(rows, len(self._devices))
        known = self._known.setdefault(module, _Known())
        reason = self._why_not(known, module, (args, kwargs), leaves, sizes)
        if reason is None and len(sizes) > 1:
            if known.calls == 1:
                _print_division(type(module).__name__, tuple(self._devices[: len(sizes)]), tuple(sizes))
            return self._divided(module, args, kwargs, run, sizes)
        if reason is not None and not isinstance(reason, Untried):
            self._warn_of_whole(module, reason)
        outputs = _on_whole(run, args, kwargs)
        if isinstance(reason, Untried):  # not earlier: if the whole batch fails too, the script must see only that error
            known.reason = reason
            self._warn_of_whole(module, reason)
        return outputs

    def _why_not(self, known: _Known, module: nn.Module, given: tuple[tuple, dict], leaves: list[Any], sizes: list[int]) -> str | None:
        """Why a call must not be divided; ``None`` if it may be divided, or is too small."""
        rows = sum(sizes)
        known.reason = known.reason or why_not(leaves, rows)
        reason = known.reason or _why_whole(module) or items_of_samples([*given[0], *given[1].values()], rows)
        if reason is not None or len(sizes) < 2:
            return reason
        known.calls += 1
        kind = module.training, *kinds_of(leaves, rows)
        if not worth_a_look(known.calls) and kind in known.kinds:
            return None
        reason = self._tried(module, given, sizes)
        if isinstance(reason, Untried):
            return reason
        known.kinds.add(kind)
        known.reason = reason
        return reason

    def _tried(self, module: nn.Module, given: tuple[tuple, dict], sizes: list[int]) -> str | None:
        """Try the call on copies: the reason why it must not be divided, or ``None``."""
        try:
            return why_not_in_parts(module, given, sizes, self._merge(module, sizes, in_whole), self._loss)
        except torch.OutOfMemoryError:
            self._warn_once(
                module,
                f"is divided without checking that the results are the same, because a whole batch does not fit on {self._devices[0]}",
            )
            return None

    def _divided(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable, sizes: list[int]) -> Any:
        devices = self._devices[: len(sizes)]
        calls = []
        copies = replicas(module, devices)
        for replica, (own, named) in zip(copies, cut((args, kwargs), sizes, devices), strict=True):
            calls.append(lambda run=run if replica is module else replica, own=own, named=named: run(*own, **named))
        return self._merge(module, sizes, in_whole if self._gather else Pieces)(run_together(devices, calls, copies))

    def _merge(self, module: nn.Module, sizes: list[int], join: Callable) -> Callable[[list[Any]], Any]:
        weights = {"mean": [size / sum(sizes) for size in sizes], "sum": [1.0] * len(sizes), None: None}[self._loss]
        return functools.partial(merged, sizes=sizes, weights=weights, join=join, who=type(module).__name__)

    def _check_device(self, module: nn.Module) -> None:
        first = self._devices[0]
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.device != first:
                raise UsageError(
                    f"{type(module).__name__} has a tensor on {tensor.device}, but the model must be on the first device of "
                    f"parwrap.data_parallel, {first}: move it there with model.to('{first}'), or choose other device_ids."
                )

    def _warn_of_whole(self, module: nn.Module, reason: str) -> None:
        does = f"runs on the whole batch, only on {self._devices[0]}: parwrap.data_parallel does not divide it"
        self._warn_once(module, f"{does}: {reason}")

    def _warn_once(self, module: nn.Module, what: str) -> None:
        name = type(module).__name__
        if (name, what) not in self._warned:
            self._warned.add((name, what))
            file, _, line = location().rpartition(":")
            warnings.warn_explicit(f"parwrap: {name} {what}. This is shown once.", UserWarning, file, int(line))


@functools.cache
def _print_division(model: str, devices: Sequence[torch.device], sizes: Sequence[int]) -> None:
    """Print how a model is divided; once, however often a function opens the scope."""
    each, parts = ", ".join(map(str, devices)), " + ".join(map(str, sizes))
    write_line(f"parwrap: 1 process on {each}, {model} is divided, batch {sum(sizes)} as {parts}")


def _on_whole(run: Callable, args: tuple, kwargs: dict) -> Any:
    args, kwargs = tree_map_only(Pieces, Pieces.whole, (args, kwargs))
    return run(*args, **kwargs)


def refuse_ranks(devices: Sequence[torch.device], ranks: int) -> None:
    """Raise :class:`UsageError`, because several devices were named but each rank has one."""
    raise UsageError(
        f"parwrap.data_parallel(device_ids={[str(device) for device in devices]}) is for one process, but there are {ranks} ranks, each "
        "with one device. Remove device_ids (without it, parwrap.data_parallel has no effect on several ranks), or run one rank."
    )


def _is_internal(module: nn.Module) -> bool:
    """Whether a call belongs to a replica, or to a model that torch recomputes, traces or transforms."""
    return (
        isinstance(module, nn.DataParallel)  # it calls its own replicas, or the model
        or getattr(module, IS_REPLICA, False)
        or current_graph_task_id() != NO_GRAPH_TASK  # a checkpoint recomputes its part
        or tracing_state() is not None
        or current_transform() is not None
    )


def _why_whole(module: nn.Module) -> str | None:
    """Why ``module`` must run on the whole batch: compiled code, hooks or torch modes; ``None`` if it may be divided."""
    for each in module.modules():
        if isinstance(each, torch.jit.ScriptModule):
            return "it, or a part of it, is compiled by TorchScript"
        if ORIGINAL_MODULE in registered_modules(each) or compiled_call(each) is not None:
            return "it, or a part of it, is compiled"
        for hooks in module_hooks(each):
            if not _are_known(hooks.values()):
                return "it, or a part of it, has hooks, which would see parts of the batch"
    modes = [mode for mode in function_modes() if not isinstance(mode, DeviceContext)]
    if modes or dispatch_mode_depth():
        return "it runs inside a torch mode, which does not apply in the threads of the replicas"
    if not _are_known(innermost_saved_tensors_hooks() or ()):  # a checkpoint's hooks change no numbers
        return "it runs inside hooks on saved tensors, which the threads of the replicas would not call"
    return None


def _are_known(hooks: Iterable[Any]) -> bool:
    """Whether all ``hooks`` belong to torch or parwrap; these may see parts of a batch."""
    return all((getattr(hook, "__module__", None) or "").startswith(("torch.", "parwrap.")) for hook in hooks)
