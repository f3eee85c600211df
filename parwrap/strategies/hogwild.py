"""Hogwild: the ranks of one node train one set of weights in shared memory, and each steps on its own gradients without waiting.

Nothing is averaged. A step writes into memory that all ranks read. Ranks step at the same time, or with ``lock=True`` one rank at a time.
Each rank has separate gradients, buffers and optimizer states. (Recht et al., 2011, https://arxiv.org/abs/1106.5730; torch's own recipe
is ``model.share_memory()`` and one process for each worker.)
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.errors import RankMismatchError, UsageError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.loop.optimizers import parameters_of
from parwrap.places import script_place
from parwrap.rank_zero.path_rules import passing
from parwrap.ranks.agreement import agree
from parwrap.ranks.group import Group, is_alone
from parwrap.ranks.platform import OPEN_OWN, lock_for_process, shared_memory, unlock_for_process
from parwrap.strategies.ddp_sites import made_equal
from parwrap.strategies.strategy import Loop, OneModel, differing_parameter
from parwrap.torch_private.optimizer import stepping

__all__ = ["Hogwild"]

ALIGNED = 64
"""Storages begin at multiples of this number of bytes."""


class Hogwild(OneModel):
    """Every rank steps by itself, on weights that all ranks share."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        _refuse(loop.group)
        self._weights = _SharedWeights(loop.group)
        self._lock: int | None = None  # a file that this rank locks for a step: when a process ends, even by a crash, its lock is released
        if loop.options().lock:
            assert loop.group.folder is not None
            path = loop.group.folder / f"step-{loop.same_step.positions.opening}"
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_OWN, 0o600)
        self._generation = -1
        self._evaluating = False

    def backward(self, call: Backward) -> None:
        """Run ``call``, whose gradients stay on this rank; before that, move weights that are not shared yet into shared memory."""
        if is_alone():
            self._refuse_alone()
        optimizers = self.loop.optimizers
        self._train_on()
        if not self._weights.put_back() or self._generation != optimizers.generation:
            self._share()
        call.run()
        self.loop.passes.ran_backward()

    def _share(self) -> None:
        loop = self.loop
        owned = {id(p): p for optimizer in loop.optimizers.all() for p in parameters_of(optimizer)}
        if not owned:
            raise UsageError(
                f"{script_place()} runs a backward before any optimizer is built, but strategy='hogwild' shares the parameters of "
                "optimizers: build the optimizer first. For updates by hand, use strategy='ddp'."
            )
        new = [p for p in owned.values() if not self._weights.has(p)]
        if new:
            with self._others_step():
                self._weights.share(new, self._agree)
        self._weights.watch(owned.values())
        self._generation = loop.optimizers.generation

    # steps

    def step(self, optimizer: Optimizer) -> None:
        """Take the lock, if there is one; a step that runs inside the step of another optimizer holds the lock already."""
        if self._lock is not None and len(stepping()) == 1:
            lock_for_process(self._lock)

    def stepped(self, optimizer: Optimizer) -> None:
        """Move parameters back into shared memory, because some steps replace their tensors. Then the outermost step releases the lock."""
        self._name_whole()
        self._weights.put_back()
        self.loop.same_step.passed(script_place())
        if self._lock is not None and len(stepping()) == 1:
            unlock_for_process(self._lock)

    @contextmanager
    def _others_step(self) -> Iterator[None]:
        """Release the lock inside the block, in which this rank waits for others that may need the lock.

        This rank may hold the lock: a closure trains inside a step, and a step that raises does not release it.
        """
        if self._lock is not None:
            unlock_for_process(self._lock)
        yield
        if self._lock is not None and stepping():
            lock_for_process(self._lock)

    # where ranks meet

    def begins_pass(self, trains: bool) -> None:
        if is_alone():
            return
        if trains:
            self._train_on()
        else:
            self._evaluate()
            self.buffers.send_for_evaluation()

    def set_mode(self, module: nn.Module, training: bool) -> None:
        super().set_mode(module, training)
        if not training and not is_alone() and self.loop.optimizers.evaluate():
            self._evaluate()

    def _evaluate(self) -> None:
        """Wait until no rank trains, so that all ranks evaluate the same weights."""
        if self._weights and not self._evaluating:
            self._evaluating = True
            self._meet("an evaluation")

    def _train_on(self) -> None:
        """Wait until no rank evaluates."""
        if self._evaluating:
            self._evaluating = False
            self._meet("training after an evaluation")

    def _meet(self, kind: str) -> None:
        self._weights.put_back()
        with self._others_step():
            agree(self.loop.group, kind)

    def end(self) -> None:
        self._meet("the end of training")

    def close(self) -> None:
        """Move the script's parameters from shared memory into memory of this rank alone."""
        self._weights.close()
        self.buffers.close()
        if self._lock is not None:
            os.close(self._lock)


def _refuse(group: Group) -> None:
    if not group.world.on_one_node:
        raise UsageError(
            f"strategy='hogwild' shares the memory of one node, but the {group.world.size} ranks are on several nodes: start them on one "
            "node, or choose another strategy."
        )
    if group.device.type != "cpu":
        raise UsageError(
            f"strategy='hogwild' shares the memory of the CPU, but this rank trains on {group.device}: set CUDA_VISIBLE_DEVICES to an "
            "empty value to train on the CPU, or choose another strategy."
        )


class _Place(NamedTuple):
    """Where a tensor is in the shared memory; tensors with a common storage still have a common storage there.

    Attributes:
        begin: where the storage begins in the memory, in bytes.
        size: the size of the storage, in bytes.
        offset: where the tensor begins in the storage, in elements.
        stride: the tensor's stride, in elements.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """

    begin: int
    size: int
    offset: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


_memories = itertools.count()
"""Numbers the files for weights that this process maps. The numbers are the same on all ranks."""


class _SharedWeights:
    """Parameters whose storage all ranks share. The parameters stay the same objects; only their memory changes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._watched: list[tuple[torch.Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self._shared)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is shared with its present shape and dtype, or is empty, so that nothing has to be shared."""
        shared = self._shared.get(parameter)
        return (not is_lazy(parameter) and not parameter.numel()) if shared is None else _alike(parameter, shared)

    def share(self, parameters: Sequence[torch.Tensor], agree: Callable[[str, object, Callable[[Sequence[Any]], Exception]], None]) -> None:
        """Move ``parameters`` into memory that all ranks share, with rank 0's values.

        Args:
            parameters: the parameters to share, in the same order on all ranks.
            agree: called with a kind, a value and a function that makes an error; it returns once all ranks have passed equal values.

        Raises:
            UsageError: a parameter cannot be shared.
            RankMismatchError: the ranks have different parameters, or read different data.
        """
        for p in parameters:
            _refuse_unshareable(p)
        places = _laid_out(parameters)
        layout = [(place.shape, str(place.dtype), place.offset, place.stride) for place in places]
        agree("sharing the parameters of optimizers", layout, _different)
        made_equal(self._group, parameters)
        memory = self._memory(max(place.begin + place.size for place in places))
        for p, place in zip(parameters, places, strict=True):
            part = torch.frombuffer(memory, dtype=torch.uint8, count=place.size, offset=place.begin)
            shared = place.tensor(part.untyped_storage())
            with torch.no_grad():
                shared.copy_(p)  # every rank writes the same values
            self._shared[p] = shared
        with self._group.control_message("weights in shared memory"):
            dist.barrier(group=self._group.control)
        for p in parameters:
            p.data = self._shared[p]

    def _memory(self, size: int) -> mmap.mmap:
        """Map ``size`` bytes that the ranks share: an unnamed file of rank 0, which disappears when the processes end, even by a crash.

        Systems other than Linux have no such file, and map one in the job's folder.
        """
        group = self._group
        if not hasattr(os, "memfd_create"):
            assert group.folder is not None
            with passing():
                return shared_memory(group.folder / f"weights-{next(_memories)}", size)
        descriptor = os.memfd_create("parwrap weights") if group.world.rank == 0 else -1  # not in /dev/shm, which is small in containers
        where = torch.tensor([os.getpid(), descriptor])
        with group.control_message("memory for weights"):
            dist.broadcast(where, 0, group=group.control)
            if group.world.rank == 0:
                os.ftruncate(descriptor, size)
            else:
                descriptor = os.open(f"/proc/{int(where[0])}/fd/{int(where[1])}", os.O_RDWR)
            dist.barrier(group=group.control)
        try:
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on, let :meth:`put_back` check these ``parameters`` instead of earlier ones."""
        self._watched = [(p, self._shared[p].data_ptr()) for p in parameters if p in self._shared]

    def put_back(self) -> bool:
        """Move parameters whose tensors were replaced, as ``p.data = ...`` does, back into shared memory with their new values.

        Return whether all parameters are shared again; a parameter with a new shape or dtype needs another :meth:`share`.
        """
        whole = True
        for p, pointer in self._watched:
            if p.data_ptr() == pointer:
                continue
            if _alike(p, shared := self._shared[p]):
                with torch.no_grad():
                    shared.copy_(p)
                p.data = shared
            else:
                whole = False
        return whole

    @torch.no_grad()
    def close(self) -> None:
        """Copy every shared parameter into memory of this rank alone; parameters with a common storage still have a common storage."""
        copies: dict[int, torch.UntypedStorage] = {}
        for p, shared in self._shared.items():
            if p.data_ptr() == shared.data_ptr():
                storage = p.untyped_storage()
                copy = copies.get(storage.data_ptr()) or copies.setdefault(storage.data_ptr(), storage.clone())
                p.data = torch.empty(0, dtype=p.dtype).set_(copy, p.storage_offset(), p.shape, p.stride())
        self._shared, self._watched = WeakTensorKeyDictionary(), []


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)


def _laid_out(parameters: Sequence[torch.Tensor]) -> list[_Place]:
    begins: dict[int, int] = {}
    places, end = [], 0
    for p in parameters:
        storage = p.untyped_storage()
        if storage.data_ptr() not in begins:
            begins[storage.data_ptr()] = end
            end += -(-storage.nbytes() // ALIGNED) * ALIGNED
        places.append(_Place(begins[storage.data_ptr()], storage.nbytes(), int(p.storage_offset()), p.stride(), tuple(p.shape), p.dtype))
    return places


def _refuse_unshareable(parameter: torch.Tensor) -> None:
    if is_lazy(parameter):
        problem = "has no shape yet: run the model once before you build the optimizer"
    elif parameter.device.type != "cpu":
        problem = (
            f"is on {parameter.device}, but only the memory of the CPU is shared: keep the model on the CPU, or choose another strategy"
        )
    elif parameter.layout != torch.strided:
        problem = f"has the layout {parameter.layout}: only gradients may be sparse"
    else:
        return
    raise UsageError(f"strategy='hogwild' cannot share a parameter that is trained at {script_place()}, because it {problem}.")


def _different(all_ranks: Sequence[Any]) -> RankMismatchError:
    return RankMismatchError(
        f"the ranks cannot share the parameters that they train, because {differing_parameter(all_ranks)}. Build, cast and move the same "
        "model on every rank before training."
    )
