"""Copies one rank's values of parameters to all ranks, and separates real differences from rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parwrap.coordination.call_site import warn
from parwrap.group.collectives import sums_of
from parwrap.group.group import Group
from parwrap.strategies.common.agreement import is_stand_in

__all__ = ["take_values", "warn_of_different"]

ULPS = 256
"""Roundings of a parameter's largest value by which linear algebra in an initialization (qr, svd, lstsq) may differ between processes."""


@torch.no_grad()
def take_values(different: Sequence[torch.Tensor], source: int, group: Group) -> bool:
    """Copy rank ``source``'s values of the parameters that are ``different``; called on all ranks.

    Returns:
        Whether they differ by more than rounding on any rank. The answer is the same on all ranks.
    """
    apart = False
    for p in different:
        values = p.detach().contiguous()
        mine = values.clone()
        dist.broadcast(values, source)
        apart |= not (is_stand_in(p) or _is_rounding(mine, values))
        p.data.copy_(values)  # .data: the graph of the running step has saved these tensors, and must not find them changed
    return bool(sums_of([apart], group)[0])


def warn_of_different(number: int, of_all: int, source: int, in_loop: bool = False) -> None:
    """Warn that ranks have built that ``number`` of parameters differently, maybe ``in_loop``, and that rank ``source``'s were copied."""
    advice = (
        "They were built in a loop over a DataLoader, where each rank has its own random numbers and samples. Build them before the loop, "
        "or choose their values with parwrap.broadcast."
        if in_loop
        else "Build the model inside the decorated function, or set the seed before you build it. If you already do, look for other "
        "sources of different values: a separate generator with another seed, the time, or the rank."
    )
    warn(f"parwrap: {number} of {of_all} parameters have different values on different ranks; rank {source}'s are used. {advice}")


def _is_rounding(mine: torch.Tensor, others: torch.Tensor) -> bool:
    if not mine.is_floating_point() or not mine.numel():
        return torch.equal(mine, others)
    most = float(others.abs().max()) * ULPS * torch.finfo(mine.dtype).eps
    return bool(((mine - others).abs() <= min(most, 1e-3 * float(others.abs().max()))).all())
