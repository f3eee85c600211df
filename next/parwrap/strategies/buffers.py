"""Keeps the buffers of the modules that a loop calls as DDP does: rank 0's are everybody's (DESIGN: Backward).

Statistics of batch norms are sent when a pass that reads everything begins after a step. Buffers that a training forward reads and
changes (codebooks, running normalizers) are sent after every backward, when the graph has been used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from parwrap.errors import RankMismatchError
from parwrap.ranks.agreement import agree
from parwrap.ranks.group import Group
from parwrap.torch_private.modules import NormBase, registered_buffers
from parwrap.torch_private.tensors import version_of

__all__ = ["Buffers"]

STEPS = 2
"""Modules are noted while the first steps of a new set of parameters run; afterwards no forward is watched."""


class _Buffer(NamedTuple):
    """A buffer of a module, by its name: the script may put another tensor there."""

    module: weakref.ref[nn.Module]
    name: str

    def tensor(self) -> torch.Tensor | None:
        module = self.module()
        buffer = None if module is None else registered_buffers(module).get(self.name)
        return buffer if isinstance(buffer, torch.Tensor) and not buffer.is_inference() and buffer.layout == torch.strided else None


class Buffers:
    """The buffers of the modules that the loop calls.

    Args:
        group: the process group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._modules: list[weakref.ref[nn.Module]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._before: dict[_Buffer, tuple[int, int]] = {}
        self._moving: list[_Buffer] = []
        self._watching: Any = None
        self._steps_left = 0

    def watch(self) -> None:
        """Note the modules that are called in the next steps."""
        self._steps_left = STEPS
        if self._watching is None:
            self._watching = register_module_forward_pre_hook(lambda module, args: self._note(module))

    def _note(self, module: nn.Module) -> None:
        if module in self._known:
            return
        self._known.add(module)
        self._modules.append(weakref.ref(module))
        for buffer in _buffers([module]):
            if not isinstance(module, NormBase) and (tensor := buffer.tensor()) is not None:
                self._before[buffer] = id(tensor), version_of(tensor)

    def after_backward(self) -> None:
        """Send the buffers that training moves; while modules are noted, find out which these are."""
        if self._watching is not None:
            self._steps_left -= 1
            if self._steps_left > 0:
                return
            self._watching.remove()
            self._watching = None
            moved = [buffer for buffer, before in self._before.items() if (now := buffer.tensor()) is not None and _state(now) != before]
            self._moving += [buffer for buffer in moved if buffer not in self._moving]
            self._before.clear()
            _agree_on(self._group, "agreement on the buffers that training changes", self._moving)
        if self._moving:
            self._send(self._moving)

    def begins_whole(self) -> None:
        """Send all buffers: a pass that reads everything begins after a step."""
        modules = [module for ref in self._modules if (module := ref()) is not None]
        buffers = [buffer for buffer in _buffers(modules) if buffer.tensor() is not None]
        _agree_on(self._group, "sending rank 0's buffers as a pass begins", buffers)
        self._send(buffers)

    @torch.no_grad()
    def _send(self, buffers: Iterable[_Buffer]) -> None:
        """Write rank 0's values into ``buffers``, in one broadcast a dtype and device."""
        tensors = [tensor for buffer in buffers if (tensor := buffer.tensor()) is not None]
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            same = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.broadcast(flat, 0)
            if self._group.world.rank:
                for tensor, sent in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                    tensor.data.copy_(sent.view(tensor.shape))

    def name_of(self, parameter: Any) -> str | None:
        """The name of ``parameter`` in the outermost module that was called with it."""
        names = [
            name for ref in self._modules if (module := ref()) is not None for name, each in module.named_parameters() if each is parameter
        ]
        return max(names, key=len, default=None)

    def close(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.remove()
            self._watching = None


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), version_of(tensor)


def _buffers(modules: Iterable[nn.Module]) -> Iterator[_Buffer]:
    return (_Buffer(weakref.ref(module), name) for module in modules for name in registered_buffers(module))


def _agree_on(group: Group, kind: str, buffers: Iterable[_Buffer]) -> None:
    shapes = [(buffer.name, str(tensor.dtype), tuple(tensor.shape)) for buffer in buffers if (tensor := buffer.tensor()) is not None]

    def error(all_ranks: list[Any]) -> Exception:
        rank = next(rank for rank, each in enumerate(all_ranks) if each != all_ranks[0])
        return RankMismatchError(
            f"rank 0's model has the buffers {all_ranks[0]}, but that of rank {rank} has {all_ranks[rank]}. Call the same modules on every "
            "rank."
        )

    agree(group, kind, crc32(repr(shapes).encode()), lambda: shapes, error)
