"""The gradients that skipped steps would have used, kept for the next real step, and restored for it.

Gradients count only when ``step()`` is called on them: without accumulation, gradients that a loop zeroes or drops before that would be
lost too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from parwrap.errors import UsageError
from parwrap.intercept.clipping import Clip
from parwrap.loop.loop_state import parameters_of
from parwrap.torch_private.tensors import foreach_add, foreach_add_, version_of

__all__ = ["Asked", "Sums", "merged", "put_back"]


class Sums:
    """Sums of gradients, by parameter."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lent: dict[int, int] = {}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and sums; the loop has no reference to these tensors."""
        for key in self._lent:
            p, total = self._known[key]
            self._known[key] = p, total.clone()
        self._lent.clear()
        return iter(self._known.values())

    def __bool__(self) -> bool:
        return bool(self._known)

    @torch.no_grad()
    def add(self, parameters: Iterable[torch.Tensor], lent: bool = False) -> None:
        """Add the gradients of ``parameters`` to the sums. The gradients themselves do not change.

        Args:
            parameters: those without a gradient are skipped.
            lent: whether the loop is about to drop the gradients. The first dense gradient of each parameter is then used without a copy.
        """
        onto_lent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        sums, grads = [], []
        for p in parameters:
            if p.grad is None:
                continue
            known = self._known.get(id(p))
            if known is None and lent and not p.grad.is_sparse:
                self._known[id(p)] = p, p.grad.detach()
                self._lent[id(p)] = version_of(p.grad)
            elif known is None:
                self._known[id(p)] = p, p.grad.detach().clone()
            elif p.grad.is_sparse or known[1].is_sparse:
                self._known[id(p)] = p, known[1] + p.grad
            elif id(p) in self._lent:
                onto_lent.append((*known, p.grad))
            else:
                sums.append(known[1])
                grads.append(p.grad)
        if onto_lent:  # the loop may have kept what it has dropped
            parameters, lents, added = zip(*onto_lent, strict=True)
            for p, total in zip(parameters, foreach_add(lents, added), strict=True):
                self._known[id(p)] = p, total
                del self._lent[id(p)]
        if sums:
            foreach_add_(sums, grads)

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add the gradients of ``parameters``, and remove them there."""
        there = [p for p in parameters if p.grad is not None]
        self.add(there)
        for p in there:
            p.grad = None

    def settle(self) -> bool:
        """Copy gradients that were lent but not dropped.

        Returns:
            Whether the loop has dropped all gradients since they were added.

        Raises:
            UsageError: one was changed in place.
        """
        for key, version in list(self._lent.items()):
            p, total = self._known[key]
            if version_of(total) != version:
                raise UsageError(
                    "a gradient was changed in place after optimizer.step() was called on it, but parwrap.accumulate still needs it, "
                    "because the script dropped it with zero_grad() or p.grad = None in earlier batches. Zero gradients in the same way "
                    "in every batch."
                )
            if p.grad is not None and p.grad.data_ptr() == total.data_ptr():
                self._known[key] = p, total.clone()
                del self._lent[key]
        return all(p.grad is None for p, _ in self._known.values())


@dataclass
class Asked:
    """One skipped step that an optimizer should have taken in the batches of a window.

    Attributes:
        optimizer: the optimizer; ``None`` if the loop will call ``step()`` itself.
        at: which backward pass of its batch the step followed, counted from 0.
        sums: the gradients that it would have used.
        clips: the clipping calls before it.
        given: whether the sums were added to a backward.
    """

    optimizer: torch.optim.Optimizer | None
    at: int = -1
    sums: Sums = field(default_factory=Sums)
    clips: list[Clip] = field(default_factory=list)
    given: bool = False

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.optimizer) if self.optimizer else []


def merged(several: Iterable[Asked]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and sums of several steps, by the id of the parameter; one that two optimizers share counts once, as in ``.grad``."""
    return {id(p): (p, total) for asked in reversed(list(several)) for p, total in asked.sums}


def put_back(several: Sequence[Asked], correction: float) -> tuple[torch.Tensor, ...]:
    """Add the sums of ``several``, multiplied by ``correction``, to ``.grad``; returns their parameters."""
    found = [(p, total) for p, total in merged(several).values() if p.requires_grad]
    for asked in several:
        asked.sums, asked.given = Sums(), True
    with torch.no_grad():
        if correction != 1.0:
            found = [(p, total * correction) for p, total in found]
        for p, total in found:
            p.grad = total if p.grad is None else p.grad + total
    return tuple(p for p, _ in found)
