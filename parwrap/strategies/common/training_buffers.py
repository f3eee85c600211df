"""Buffers that training changes and forward passes read, such as codebooks and running normalizers: rank 0's on every rank, as in DDP.

DDP sends all buffers before each forward. Here changed buffers are sent after the backward, where all ranks are together anyway; for the
next forward that is the same. A change shows in the version of a buffer, or in another tensor in its place. A change by ``.data`` or numpy
shows only in the values, which are checked in the first backward passes, and later ever more rarely. The ranks' reports travel with the
gradients, so nothing is sent if nothing changes. BatchNorm reads its statistics only in evaluation, which ``equal_state.py`` handles.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parwrap.coordination.call_site import worth_a_look
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.sent_values import SENT, Kind, fingerprint, kind_of, send
from parwrap.torch_private.modules import NormBase, is_initialized, registered_buffers, registered_parameters
from parwrap.torch_private.tensors import version_of

__all__ = ["OuterModules", "TrainingBuffers"]

Name = tuple[int, str]
"""Identifies a buffer on all ranks: the position of its model's first parameter in the averaged set, and its path in the model."""


@dataclass
class _Buffer:
    """One buffer of this rank.

    Attributes:
        of: the buffers of its module, which holds it by its ``key``.
        seen: the tensor when it was last the same on all ranks; ``None`` before.
        version: of that tensor then.
        values: the fingerprint of its values then, or later; ``None`` if unknown.
        by_values: whether it has changed without a new version.
    """

    of: dict[str, Any]
    key: str
    seen: torch.Tensor | None = None
    version: int = -1
    values: int | None = 0
    by_values: bool = False

    def now(self) -> torch.Tensor | None:
        """The tensor, if it can be sent."""
        tensor = self.held()
        if tensor is None or tensor.is_inference() or is_lazy(tensor) or tensor.dtype not in SENT or tensor.layout != torch.strided:
            return None
        expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return None if expanded else tensor  # several elements share memory, so values cannot be copied there

    def held(self) -> torch.Tensor | None:
        return self.of[self.key] if self.key in self.of else None  # noqa: SIM401 - what TorchScript has here knows no get

    def changed(self) -> bool:
        tensor = self.held()
        return self.by_values or tensor is not self.seen or (tensor is not None and _version(tensor) != self.version)

    def note(self) -> None:
        """Record that the buffer is the same on all ranks now."""
        self.seen = self.held()
        self.version = -1 if self.seen is None else _version(self.seen)


class OuterModules:
    """The outermost modules around parameters.

    They are found among all living objects, which takes tenths of a second where there are a million. So these are searched when there
    is a parameter that was not there before, or another optimizer, and not for each set of parameters that is averaged.

    Args:
        loop: what the training loop has done so far.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._generation = -1
        self._outermost: list[weakref.ref[nn.Module]] = []
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def around(self, parameters: Sequence[torch.Tensor]) -> list[nn.Module]:
        """The outermost modules that have one of ``parameters``."""
        held = [p for p in parameters if isinstance(p, nn.Parameter)]
        if self._generation != self._loop.generation or any(self._is_new(p) for p in held):
            self._search(held)
        ids = {id(p) for p in held}
        outermost = (module for ref in self._outermost if (module := ref()) is not None)
        return [module for module in outermost if any(id(p) in ids for p in module.parameters())]

    def _is_new(self, parameter: torch.Tensor) -> bool:
        seen = self._seen.get(id(parameter))
        return seen is None or seen() is not parameter

    def _search(self, parameters: list[nn.Parameter]) -> None:
        self._generation = self._loop.generation
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and is_initialized(thing)]
        inner = {id(child) for module in modules for child in module.children()}
        self._outermost = [weakref.ref(module) for module in modules if id(module) not in inner]
        of_modules = (p for module in modules for p in registered_parameters(module).values() if p is not None)
        self._seen = {id(p): weakref.ref(p) for p in (*parameters, *of_modules)}


class TrainingBuffers:
    """The buffers of the models around ``parameters``, except BatchNorm's.

    Args:
        group: the ranks.
        parameters: the parameters whose gradients are averaged together, in the same order on all ranks.
        models: the outermost modules around them.

    Attributes:
        known: whether this rank or rank 0 has any such buffer.
    """

    def __init__(self, group: Group, parameters: Sequence[torch.Tensor], models: Iterable[nn.Module]) -> None:
        self._group = group
        self._places = {id(p): place for place, p in reversed(list(enumerate(parameters)))}
        self._models = [weakref.ref(model) for model in models]
        self._buffers: dict[Name, _Buffer] = {}
        self._agreed: dict[Name, Kind] | None = None
        self._looks = self._taken = 0
        self._late: list[tuple[_Buffer, torch.Tensor]] = []
        self._find()

    def changed(self) -> bool:
        """Whether a buffer of this rank has changed since all ranks had the same; called once in each backward."""
        self._looks += 1
        if worth_a_look(self._looks):
            self._find()
            self._look_at_values()
        return self._lacks_agreed() or any(buffer.changed() for buffer in self._buffers.values())

    def moves(self) -> bool:
        """Whether a buffer is known to change in training."""
        return any(buffer.changed() for buffer in self._buffers.values()) or bool(self._agreed)

    def asks(self) -> bool:
        """Whether the ranks must exchange their buffers: a buffer has changed here that they have not agreed on."""
        agreed = self._agreed
        return (
            agreed is None
            or self._lacks_agreed()
            or any(buffer.changed() and agreed.get(name) != _kind(buffer.now()) for name, buffer in self._buffers.items())
        )

    def _lacks_agreed(self) -> bool:
        """Whether this rank must send an agreed buffer that it does not have, for example because a module was replaced."""
        return self._group.world.rank == 0 and any(
            (buffer := self._buffers.get(name)) is None or _kind(buffer.now()) != kind for name, kind in (self._agreed or {}).items()
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, asked: bool, contributes: bool, late: bool) -> bool:
        """Copy rank 0's values of the buffers that have changed on any rank; called on all ranks.

        Args:
            asked: whether a rank asks all to describe their buffers.
            contributes: whether this rank has run the backward itself. The lowest such rank stands for rank 0.
            late: whether the graph of the running step is needed again, so that values wait for :meth:`settle`.

        Returns:
            Whether buffers are known to move: some that had changed before have changed again, or values differed; the same on all ranks.
        """
        self.settle()
        source, names, move = 0, self._agreed, True
        asked = asked or names is None
        if asked or names is None:
            source, names, move = self._agree(contributes)
        tensors = {name: tensor for name in names if (buffer := self._buffers.get(name)) and (tensor := buffer.now()) is not None}
        for name, values in send(self._group, tensors, names, source).items():
            if (buffer := self._buffers.get(name)) and self._group.world.rank != source:
                self._late.append((buffer, values))
        placed = {id(buffer): values for buffer, values in self._late}
        if not late:
            self.settle()
        for name, buffer in self._buffers.items():
            buffer.note()
            if asked and (tensor := placed.get(id(buffer), buffer.now())) is not None:
                buffer.values = fingerprint(tensor)
            elif name in names:
                buffer.values = None  # copied values are not a change by the script
        return move

    @torch.inference_mode(False)
    @torch.no_grad()
    def settle(self) -> None:
        """Write the copied values in place."""
        for buffer, values in self._late:
            tensor = buffer.now()
            if _kind(tensor) == _kind(values):
                tensor.data.copy_(values)  # type: ignore[union-attr]  # .data: its version says nothing of a change by the script
            elif buffer.held() is not None:
                buffer.of[buffer.key] = values
                buffer.note()
        self._late.clear()

    def _agree(self, contributes: bool) -> tuple[int, dict[Name, Kind], bool]:
        """Exchange descriptions: returns the rank whose values are used, what it has to send, and whether any differ."""
        first = not self._taken
        self._taken += 1
        mine = {name: (_kind(tensor), fingerprint(tensor)) for name, each in self._buffers.items() if (tensor := each.now()) is not None}
        moved = set() if first else {name for name in mine if self._buffers[name].changed()}
        reported = self._group.share("buffers that training changes", (contributes, mine, moved), range(self._group.world.size))
        source = min(rank for rank, (took_part, _, _) in reported.items() if took_part)
        all_moved = set().union(*(each for _, _, each in reported.values()))
        theirs = reported[source][1]
        differ = {name for name, each in theirs.items() if any(view.get(name, each) != each for _, view, _ in reported.values())}
        names = {name: kind for name, (kind, _) in sorted(theirs.items()) if name in all_moved | differ}
        # which of them change in each step is known from the second exchange on
        self._agreed = None if first else {name: theirs[name][0] for name in {**(self._agreed or {}), **names} if name in theirs}
        self.known = bool(self._buffers or self._agreed)
        return source, names if first else self._agreed or {}, bool(differ)

    def _find(self) -> None:
        """Find the buffers, including those registered since."""
        found: dict[Name, _Buffer] = {}
        for model in (model for ref in self._models if (model := ref()) is not None):
            place = min((self._places[id(p)] for p in model.parameters() if id(p) in self._places), default=-1)
            for path, module in model.named_modules() if place >= 0 else ():
                buffers = registered_buffers(module)
                for key in buffers.keys() if not isinstance(module, NormBase) else ():
                    name = place, f"{path}.{key}"
                    known = self._buffers.get(name)
                    found[name] = known if known and known.of is buffers else _Buffer(buffers, key)
        self._buffers = found
        self.known = bool(found or self._agreed)

    def _look_at_values(self) -> None:
        """Detect changes by ``.data`` or numpy, which give a tensor no new version."""
        for buffer in self._buffers.values():
            tensor = buffer.now()
            if tensor is None or buffer.by_values:
                continue
            before, buffer.values = buffer.values, fingerprint(tensor)
            buffer.by_values = not buffer.changed() and before not in (None, buffer.values) and self._looks > 1


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _kind(tensor: torch.Tensor | None) -> Kind | None:
    return None if tensor is None else kind_of(tensor)
