"""The hint that a rank's batches are too small for BatchNorm: their statistics are mostly noise."""

from __future__ import annotations

import gc

from torch import nn
from torch.nn import functional

from parwrap.coordination.call_site import warn
from parwrap.patching.patch import is_patched
from parwrap.torch_private.modules import BatchNorm

__all__ = ["warn_of_small_batches"]

FEW = 2
"""Batches with at most this number of samples are too small for BatchNorm."""


def warn_of_small_batches(batch_size: int | None) -> None:
    """Warn if batches of ``batch_size`` samples are too small for a BatchNorm that trains on each rank's own batch.

    Modules are searched for one only if the batches are that small.
    """
    if batch_size is None or batch_size > FEW or is_patched(functional.batch_norm):
        return
    layers = (thing for thing in gc.get_objects() if issubclass(type(thing), BatchNorm) and type(thing) is not nn.SyncBatchNorm)
    if any(getattr(layer, "training", False) for layer in layers):
        warn(
            f"parwrap: BatchNorm layers train on batches of {batch_size} on each rank, whose statistics are mostly noise. To use the "
            "statistics of all ranks together, add @parwrap.sync_bn (--sync-bn on the command line)."
        )
