"""Warns of weights that change outside of optimizer steps, if a strategy averages only what optimizers step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from parwrap.coordination.call_site import warn, worth_a_look
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.agreement import checksums

__all__ = ["ChangedByHand"]


class ChangedByHand:
    """Checks, ever more rarely, the leaves of backwards that no optimizer owns.

    Args:
        loop: the loop state, which knows the optimizers and the batch.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._visits = 0
        self._warned = False
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}

    @property
    def due(self) -> bool:
        """Whether to check the next backward."""
        self._visits += 1
        return not self._warned and worth_a_look(self._visits) and not self._loop.evaluations

    def look(self, leaves: Iterable[torch.Tensor]) -> None:
        """A backward reaches ``leaves``: warn if one was trained since an earlier one; an input or a latent of one batch is not."""
        owned = {id(p) for p in self._loop.once_owned().values()}
        for leaf in leaves:
            known, batch, before = self._seen.get(id(leaf), (None, 0, 0))
            if id(leaf) in owned:
                continue
            if known is None or known() is not leaf:
                self._seen[id(leaf)] = weakref.ref(leaf), self._loop.batches, checksums([leaf])[0]
            elif (isinstance(leaf, nn.Parameter) or self._loop.batches > batch) and checksums([leaf])[0] != before:
                self._warn(leaf)
                return

    def _warn(self, leaf: torch.Tensor) -> None:
        self._warned = True
        warn(
            f"parwrap: a parameter of shape {tuple(leaf.shape)} that no optimizer owns has changed between two backwards. "
            "strategy='local_sgd' averages what optimizers step, so each rank continues with a different value. Give it to an optimizer "
            "of torch.optim, or choose strategy='ddp'. This is shown once."
        )
