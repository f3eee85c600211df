"""Losses on outputs that are in pieces: a module of the user's own runs on each piece, with the targets that belong to it.

That gives the loss of the whole batch if it is a mean over the samples, or a sum. Whether it is one is looked at on the first batch, and
ever more rarely, by computing the whole too; a loss that is neither is computed on the whole from then on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_map_only

from parwrap.sites import worth_a_look
from parwrap.strategies.pieces import Pieces
from parwrap.strategies.replica_threads import run_together, undivided
from parwrap.strategies.replicas import replicas
from parwrap.strategies.scattering import cut, leaves_of, why_not

__all__ = ["Criteria", "is_criterion"]

CLOSE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""How far sums in another order may be apart, relatively; in other dtypes it is 1e-4."""


def is_criterion(module: nn.Module, given: Any) -> bool:
    """Whether ``module`` is a loss, which takes what a model has returned: by its class, its name, or what it is given."""
    if isinstance(module, _Loss) or type(module).__name__.lower().endswith(("loss", "criterion")):
        return True
    return next(module.parameters(), None) is None and any(isinstance(leaf, Pieces) for leaf in leaves_of(given))


@dataclass
class _Known:
    """What has been seen of one loss: how often it ran, and how its values for the pieces make up the whole's, if they do."""

    calls: int = 0
    kind: str | None = "mean"


class Criteria:
    """Runs losses, on pieces where that gives what the whole would."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()

    def call(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        """The loss ``module`` of what may be in pieces."""
        pieces = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Pieces)]
        if not pieces or type(module).__module__.startswith("torch.nn."):  # whose functions take pieces themselves
            with undivided():
                return run(*args, **kwargs)
        known = self._known.setdefault(module, _Known())
        sizes = pieces[0].sizes
        if known.kind is None or not all(each.fits(sizes) for each in pieces) or why_not(leaves_of((args, kwargs)), sum(sizes)):
            return self._whole(args, kwargs, run)
        known.calls += 1
        if not worth_a_look(known.calls):
            return _joined(self._on_each(module, args, kwargs, run, pieces[0].pieces), sizes, known.kind)
        with torch.no_grad():
            parts = self._on_each(module, args, kwargs, None, pieces[0].pieces)
        whole = self._whole(args, kwargs, run)
        kinds = [kind for kind in ("mean", "sum") if _agree(parts, sizes, kind, whole)]
        known.kind = kinds[0] if kinds else None
        if len(kinds) == 2:
            known.calls -= 1  # a loss of 0 tells nothing, so the next one is looked at
        if not kinds:
            warnings.warn(
                f"parwrap: {type(module).__name__} is neither a mean nor a sum over the samples, so it is computed on the whole batch on "
                f"{pieces[0].device}. This is said once.",
                stacklevel=2,
            )
        return whole

    def _whole(self, args: tuple, kwargs: dict, run: Callable) -> Any:
        args, kwargs = tree_map_only(Pieces, lambda each: each.whole(), (args, kwargs))
        with undivided():
            return run(*args, **kwargs)

    def _on_each(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable | None, pieces: Sequence[torch.Tensor]) -> list[Any]:
        """Its values for each of the ``pieces``; without ``run``, of copies only, so that nothing is changed in it."""
        devices = [piece.device for piece in pieces]
        copies = replicas(module, devices) if run else replicas(module, [devices[0], *devices])[1:]
        calls = []
        for copy, (own, named) in zip(copies, cut((args, kwargs), [len(piece) for piece in pieces], devices), strict=True):
            calls.append(lambda run=run if copy is module else copy, own=own, named=named: run(*own, **named))
        return run_together(devices, calls, copies)


def _joined(parts: Sequence[torch.Tensor], sizes: Sequence[int], kind: str) -> torch.Tensor:
    weights = [size / sum(sizes) if kind == "mean" else 1.0 for size in sizes]
    return torch.stack([part.to(parts[0].device) * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)


def _agree(parts: Sequence[Any], sizes: Sequence[int], kind: str, whole: Any) -> bool:
    """Whether the values for the pieces make up that of the whole."""
    if not all(isinstance(each, torch.Tensor) and not each.dim() and each.is_floating_point() for each in (*parts, whole)):
        return False
    joined = _joined(parts, sizes, kind).double()
    near = CLOSE.get(whole.dtype, 1e-4)
    return torch.allclose(joined, whole.detach().double(), rtol=near, atol=near * 1e-3)
