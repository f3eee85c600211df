"""Averages the gradients of parameters that a sharding strategy leaves whole on every rank, after each backward.

Such parameters are scalars, sparse embeddings, and parameters that are in no module, in no optimizer or only in an optimizer that was built
after the model was sharded. They are few and small, so the code is simple.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from parwrap.coordination.call_site import call_site, location, worth_a_look
from parwrap.errors import UsageError
from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.loop.autograd_graph import reached
from parwrap.loop.loop_state import Loop

__all__ = ["Replicated"]


class Replicated:
    """Finds the parameters that are whole on every rank, and averages their gradients.

    Args:
        group: the ranks.
        loop: the loop state, which knows the optimizers.
        sharded: a function that returns the ids of tensors whose gradients torch averages already.
        enter: a function, called with the number of elements before the ranks send them.
    """

    def __init__(self, group: Group, loop: Loop, sharded: Callable[[], set[int]], enter: Callable[[int], None]) -> None:
        self._group, self._loop, self._sharded, self._enter = group, loop, sharded, enter
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._generation = -1
        self._visits: dict[tuple, int] = {}
        self._bare: dict[tuple, list[weakref.ref[torch.Tensor]]] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record parameters that are whole on every rank, and trained."""
        self._known |= {id(p): weakref.ref(p) for p in parameters}

    def forget(self) -> None:
        """Forget all parameters, before models are sharded again."""
        self._known.clear()
        self._generation = -1

    def has(self, p: torch.Tensor) -> bool:
        """Whether ``p`` is recorded as whole on every rank."""
        ref = self._known.get(id(p))
        return ref is not None and ref() is p

    def look(self, call: Backward) -> None:
        """Find the replicated parameters that ``call`` reaches; less and less often for repeated calls from the same place.

        Raises:
            UsageError: it repeatedly reaches leaf tensors that are in no optimizer, so they are updated by hand.
        """
        self._loop.look_for_parameters()
        if self._generation != self._loop.generation:
            self._generation = self._loop.generation
            sharded = self._sharded()
            self.add(p for p in self._loop.once_owned().values() if id(p) not in sharded)
        key = call_site()
        self._visits[key] = self._visits.get(key, 0) + 1
        if not worth_a_look(self._visits[key]):
            return
        known = self._sharded() | self._loop.tensors_of_one_batch() | {number for number, ref in self._known.items() if ref() is not None}
        leaves = [leaf for leaf in reached(call.roots) if id(leaf) not in known]
        self.add(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
        bare = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]
        again = any(ref() is leaf for ref in self._bare.get(key, ()) for leaf in bare)
        if again or (bare and self._visits[key] > 1 and not any(True for _ in self._loop.optimizers())):
            raise UsageError(
                f"backward() at {location()} reaches tensors that are in no optimizer and are updated by hand. strategy='fsdp' shards "
                "and averages only the parameters of optimizers: pass these tensors to an optimizer, or use strategy='ddp'."
            )
        self._bare[key] = [weakref.ref(leaf) for leaf in bare]

    @torch.no_grad()
    def average(self) -> list[torch.Tensor]:
        """Average the gradients of the replicated parameters, and return these; a gradient that no rank has stays ``None``."""
        known = [p for ref in self._known.values() if (p := ref()) is not None and p.requires_grad]
        if not known:
            return []
        self._enter(sum(p.numel() for p in known))
        there = torch.tensor([p.grad is not None for p in known], dtype=torch.int32)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in known]
        *sums, used = all_reduced([*grads, there], self._group)
        for p, total, by in zip(known, sums, used.tolist(), strict=True):
            if by:
                mean = (total / self._group.world.size).to(p)
                p.grad = mean.to_sparse(1) if p.grad is not None and p.grad.is_sparse else mean
        return known
