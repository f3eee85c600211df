"""The options of ``@distributed``: their values, what these mean, and which are refused. ``decorators/distributed.py`` applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parwrap.errors import UsageError

__all__ = ["CHOICES", "Options"]

CHOICES: dict[str, dict[Any, str]] = {
    "batch": {
        "per_rank": "each rank takes batches of the loader's batch_size, so the global batch is batch_size times the number of ranks",
        "global": "the loader's batch_size is the global batch, and each rank takes a part of it",
    },
    "uneven": {
        "pad": "samples are repeated from the beginning until all ranks have equally many",
        "drop": "samples that are not enough for all ranks are skipped",
        "join": "every sample is used once, and ranks are weighted by their number of samples",
    },
    "lr": {
        "keep": "learning rates are unchanged",
        "linear": "they are multiplied by the number of ranks, like the global batch",
        "sqrt": "they are multiplied by the square root of the number of ranks",
    },
    "loss": {"mean": "the loss is an average over the batch", "sum": "the loss is a sum over the batch"},
    "draws": {
        "by_pass": "each rank has random numbers of its own inside training passes, and all have the same outside",
        "per_rank": "each rank has random numbers of its own from the first backward on, for loops that draw their batches by hand",
    },
    "strategy": {
        "ddp": "gradients are averaged in every backward pass",
        "none": "nothing is averaged, and every rank trains a separate model on all of the data",
    },
}


@dataclass(frozen=True)
class Options:
    """The options of :class:`parwrap.distributed`, checked."""

    backend: str | None = None
    seed: int | None = None
    batch: str = "per_rank"
    uneven: str = "pad"
    lr: str = "keep"
    loss: str = "mean"
    draws: str = "by_pass"
    strategy: str = "ddp"
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    timeout: float | timedelta | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in tuple(choices):
                meanings = "; ".join(f"{choice!r}: {meaning}" for choice, meaning in choices.items())
                raise UsageError(f"{name}={value!r} is not a valid value. Choose one of: {meanings}.")
        if self.lr != "keep" and self.batch == "global":
            raise UsageError(
                f"lr={self.lr!r} has no effect with batch='global', because the global batch is that of a single process: remove one of "
                "them."
            )
        if self.backend is not None and not dist.is_backend_available(self.backend):
            there = ", ".join(name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name))
            raise UsageError(
                f"backend={self.backend!r} is not available in this build of torch, which has {there}. Remove backend= to choose it by "
                "device."
            )
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise UsageError(f"seed={self.seed!r} is not an integer from 0 to 2**64 - 1.")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb={self.bucket_cap_mb!r} is not a positive number of megabytes.")
        if self.timeout is not None and not self.patience > timedelta(0):  # type: ignore[operator]
            raise UsageError(f"timeout={self.timeout!r} is not a positive number of seconds.")

    @property
    def patience(self) -> timedelta | None:
        """``timeout`` as a ``timedelta``, as torch needs it."""
        return timedelta(seconds=self.timeout) if isinstance(self.timeout, (int, float)) else self.timeout

    def lr_factor(self, size: int) -> float:
        """The factor of learning rates on ``size`` ranks.

        >>> Options(lr="sqrt").lr_factor(4)
        2.0
        """
        return {"keep": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[self.lr]
