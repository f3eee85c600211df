"""Keeps the buffers of modules as DDP does: all ranks get rank 0's (contract, small print on buffers).

Modules that the script has put in eval mode get rank 0's buffers when a pass that does not train begins after a step, or a module is put
in eval mode after one. So do those that were in eval mode from the beginning: an average of models may copy its statistics from a model
that trains. Buffers that training
changes (codebooks, running normalizers; not the statistics of batch norms) are sent after every backward, not before: a
backward may need the values that its forward has saved.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import is_lazy

from parwrap.checks.same_weights import checksums
from parwrap.errors import RankMismatchError
from parwrap.loop.modules import has_values
from parwrap.places import script_place
from parwrap.ranks.agreement import agree_on, first_difference
from parwrap.ranks.collectives import by_kind
from parwrap.ranks.group import Group, is_on_one_rank
from parwrap.torch_private.modules import NormBase, registered_buffers
from parwrap.torch_private.tensors import version_of

__all__ = ["Buffers"]

STEPS = 2
"""The number of backwards of a new set of parameters that show which buffers training changes."""


class _Buffer(NamedTuple):
    """A buffer, identified by its module and its name, because the script may replace the tensor."""

    module: weakref.ref[nn.Module]
    name: str

    def tensor(self) -> torch.Tensor | None:
        module = self.module()
        buffer = None if module is None else getattr(module, self.name, None)
        if not isinstance(buffer, torch.Tensor) or not has_values(buffer) or buffer.is_inference() or buffer.layout != torch.strided:
            return None
        return buffer


class Buffers:
    """The buffers of the modules of a script, and when they are sent. Strategies call the public methods.

    Args:
        group: the process group.
        modules: the modules that exist when the scope opens.
    """

    def __init__(self, group: Group, modules: Iterable[nn.Module]) -> None:
        self._group = group
        self._modules: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]] = weakref.WeakKeyDictionary()
        modules = list(modules)
        self._evaluated: dict[int, weakref.ref[nn.Module]] = {}  # by numbers, which are equal on all ranks
        self._numbers, self._has_evaluated = itertools.count(), False
        for module in modules:
            if not module.training:
                self.put_in_eval(module)
            for inner in module.modules():
                for name, buffer in registered_buffers(inner).items():
                    self._note(inner, name, buffer)
        self._before: dict[_Buffer, tuple[int, int]] = {}
        self._sums = torch.zeros(0, dtype=torch.int64)
        self._moving: list[_Buffer] = []
        self._kept: list[nn.Module | None] = []
        self._backwards_left = 0
        # no hook on forwards: torch.compile would trace it
        self._hook = register_module_buffer_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        """Note the present tensor and version of a buffer, to find later what a forward has changed. Also torch's hook for new buffers."""
        if not is_on_one_rank() and buffer is not None and (is_lazy(buffer) or not buffer.is_inference()):
            self._modules.setdefault(module, {})[name] = (id(buffer), -1) if is_lazy(buffer) else _state(buffer)

    def put_in_eval(self, module: nn.Module) -> None:
        """Note a module that is in eval mode: the next :meth:`send_for_evaluation` sends its buffers, if it has any."""
        if _buffers(module.modules()):
            self._evaluated = {number: each for number, each in self._evaluated.items() if each() not in (None, module)}
            self._evaluated[next(self._numbers)] = weakref.ref(module)
            self._has_evaluated = True

    def watch(self) -> None:
        """Begin to find out which buffers training changes, and stop sending those of modules that a rank has dropped.

        Called for each new set of parameters. In between, modules whose buffers are compared or sent are kept alive, because garbage
        collection may free them earlier on one rank.
        """
        self._backwards_left = STEPS
        self._forget_dead()
        buffers = [buffer for module in list(self._modules) if not isinstance(module, NormBase) for buffer in _buffers([module])]
        self._before = {buffer: _state(tensor) for buffer in buffers if (tensor := buffer.tensor()) is not None}
        self._sums = _checksums(self._before)
        self._kept = [buffer.module() for buffer in (*self._moving, *self._before)]

    def _forget_dead(self) -> None:
        """Stop sending the buffers of modules that the script has dropped on at least one rank."""
        self._kept.clear()
        if self._moving:
            alive = self._group.on_all_ranks("buffers that are still used", (buffer.tensor() is not None for buffer in self._moving))
            self._moving = [buffer for buffer, used in zip(self._moving, alive, strict=True) if used]

    def after_backward(self) -> None:
        """Send the buffers that training changes. The first ``STEPS`` backwards after :meth:`watch` find out which these are."""
        if self._backwards_left:
            if self._backwards_left == STEPS:
                self._send_changed()
            self._backwards_left -= 1
            if not self._backwards_left:
                kind = "agreement on the buffers that training changes"
                moved = [
                    buffer for buffer, before in self._before.items() if (now := buffer.tensor()) is not None and _state(now) != before
                ]
                values = (self._sums != _checksums(self._before)).tolist()
                moved, _ = self._with_values(kind, moved, values, any)
                self._moving += [buffer for buffer in moved if buffer not in self._moving]
                self._before = {}
                self._kept = [buffer.module() for buffer in self._moving]
                _agree_on(self._group, kind, self._moving)
        if self._moving:
            self._send(self._moving, "sending the buffers that training changes")

    def _send_changed(self) -> None:
        """Send the buffers that have changed since they were noted, as in the first forward, and those whose values differ between ranks.

        Nothing is sent if other buffers have changed on another rank.
        """
        changed = []
        for buffer in self._before:
            module, tensor = buffer.module(), buffer.tensor()
            if module is not None and tensor is not None and self._modules[module].get(buffer.name) != _state(tensor):
                changed.append(buffer)
                self._modules[module][buffer.name] = _state(tensor)
        kind = "sending the buffers that the first forward may have changed"
        sums = _checksums(self._before).tolist()
        changed, are_alike = self._with_values(kind, changed, sums, lambda of_ranks: len({*of_ranks}) > 1)
        if are_alike and changed:
            self._send(changed, kind)

    def _with_values(
        self, kind: str, changed: list[_Buffer], values: list[Any], has_changed: Callable[[list[Any]], bool]
    ) -> tuple[list[_Buffer], bool]:
        """Add to ``changed`` the watched buffers whose values on the ranks say that a rank has changed them.

        Not every operator raises the version of what it changes, and a value may stay the same on one rank by chance.

        Args:
            kind: the kind of the message, for errors.
            changed: the buffers whose versions have changed.
            values: what this rank says about the value of each watched buffer.
            has_changed: whether a buffer has changed of which the ranks say these.

        Returns:
            The buffers, and whether those in ``changed`` are alike on all ranks.
        """
        others = {buffer: value for buffer, value in zip(self._before, values, strict=True) if buffer not in {*changed}}
        mine = _shapes(changed), _shapes(others), [*others.values()]
        all_ranks = agree_on(self._group, kind, mine, lambda all_ranks: None) or [mine]
        if all(each[:2] == mine[:2] for each in all_ranks):
            of_ranks = zip(*(each[2] for each in all_ranks), strict=True)
            changed = [*changed, *(buffer for buffer, of_each in zip(others, of_ranks, strict=True) if has_changed([*of_each]))]
        return changed, all(each[0] == mine[0] for each in all_ranks)

    def send_for_evaluation(self) -> None:
        """Send the buffers of the modules that are in eval mode, or were put in eval mode since the last call.

        Called when a pass that does not train begins after a step, or a module is put in eval mode after one.
        """
        if not self._has_evaluated:
            return
        modules = {number: module for number, each in self._evaluated.items() if (module := each()) is not None}
        self._evaluated = {number: weakref.ref(module) for number, module in modules.items() if not module.training}
        buffers = {number: _buffers(module.modules()) for number, module in modules.items()}
        kind = "sending rank 0's buffers for an evaluation"
        all_ranks = agree_on(self._group, kind, {number: _shapes(each) for number, each in buffers.items()}, partial(_differ, kind))
        common = set(buffers).intersection(*all_ranks or ())  # a rank may still hold a module that is garbage on another
        self._send(list(dict.fromkeys(buffer for number in sorted(common) for buffer in buffers[number])), kind)

    @torch.no_grad()
    def _send(self, buffers: Iterable[_Buffer], kind: str) -> None:
        """Write rank 0's values into ``buffers``, in one broadcast for each dtype and device."""
        tensors = [tensor for buffer in buffers if (tensor := buffer.tensor()) is not None]
        for same in by_kind(tensors, lambda tensor: (tensor.dtype, tensor.device)).values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            with self._group.control_message(f"{kind} ({flat.numel()} numbers)"):
                dist.broadcast(flat.view(torch.uint8), 0)  # gloo does not send every dtype
            if self._group.world.rank:
                for tensor, sent in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                    _write(tensor.data, sent.view(tensor.shape))

    def close(self) -> None:
        """Remove the hook that notes new buffers."""
        self._hook.remove()
        self._kept.clear()


def _buffers(modules: Iterable[nn.Module]) -> list[_Buffer]:
    return [_Buffer(weakref.ref(module), name) for module in modules for name, _ in registered_buffers(module).items()]


def _write(tensor: torch.Tensor, sent: torch.Tensor) -> None:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:  # an expanded tensor, whose elements share memory
            tensor, sent = tensor.narrow(dim, 0, 1), sent.narrow(dim, 0, 1)
    tensor.copy_(sent)


def _checksums(buffers: Iterable[_Buffer]) -> torch.Tensor:
    """A checksum of each of ``buffers``; of one without values, it is that of no values."""
    tensors = (buffer.tensor() for buffer in buffers)
    return checksums([torch.empty(0) if tensor is None or tensor.is_meta else tensor for tensor in tensors])


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), version_of(tensor)


def _shapes(buffers: Iterable[_Buffer]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(buffer.name, str(tensor.dtype), tuple(tensor.shape)) for buffer in buffers if (tensor := buffer.tensor()) is not None]


def _agree_on(group: Group, kind: str, buffers: Iterable[_Buffer]) -> None:
    agree_on(group, kind, _shapes(buffers), lambda all_ranks: _differ(kind, [{0: each} for each in all_ranks]))


def _differ(kind: str, all_ranks: list[dict[int, Any]]) -> Exception | None:
    """The error if the buffers of a module differ between ranks in name, dtype or shape; ``None`` if they do not.

    ``all_ranks`` has a dict for each rank, from the number of each module to the :func:`_shapes` of its buffers.
    """
    for number in set(all_ranks[0]).intersection(*all_ranks):
        shapes = [each[number] for each in all_ranks]
        if any(each != shapes[0] for each in shapes):
            _, mine, rank, theirs = first_difference(shapes, lambda each: "{}, {} of shape {},".format(*each))
            return RankMismatchError(
                f"the buffers to send at {script_place()} differ between ranks: {mine} on rank 0 and {theirs} on rank {rank} ({kind}). Put "
                "the same modules in eval mode on every rank. Put what only rank 0 does into a function decorated with "
                "@parwrap.rank_zero_only."
            )
    return None
