"""How training data is to be shared out, and what was; how it is done is ``training_share.py``'s."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch.utils.data import DataLoader, Subset, get_worker_info

from parwrap.group.group import is_alone

__all__ = ["OwnPart", "Sharing", "TrainingData", "is_private", "replicated"]

replicated: weakref.WeakSet[DataLoader] = weakref.WeakSet()
"""Loaders of which every rank is to see all; what users say holds in every scope."""


class OwnPart(Subset):
    """A part of a dataset that is this rank's own already, so that its loaders are not shared out."""


class Sharing(NamedTuple):
    """How training data is to be shared out, in the words of :class:`parwrap.distributed`.

    Attributes:
        batch: ``"per_rank"`` or ``"global"``.
        uneven: ``"pad"``, ``"drop"`` or ``"join"``.
        loss: ``"mean"`` or ``"sum"``.
    """

    batch: str = "per_rank"
    uneven: str = "pad"
    loss: str = "mean"

    @property
    def weighs_streams(self) -> bool:
        """Whether the batches of a stream count by their samples."""
        return self.loss == "mean" and (self.batch == "global" or self.uneven == "join")

    def loss_factor(self, weight: float, size: int) -> float:
        """What the loss of a batch is to be multiplied by, beside its ``weight``: a sum weighs by samples as it is."""
        if self.loss == "mean" or not weight:
            return 1.0
        return (size if self.batch == "global" else 1) / weight


class TrainingData(NamedTuple):
    """What the first training pass is over, for the line that says so.

    Attributes:
        samples: in the whole dataset; ``None`` where it has no length.
        batch_size: per rank; ``None`` where batches are of no fixed size.
        global_batch: of all ranks together.
    """

    samples: int | None
    batch_size: int | None
    global_batch: int | None


def is_private() -> bool:
    """Whether a loader is read by a worker process or by a lone rank, so that all of it is read."""
    return get_worker_info() is not None or is_alone()
