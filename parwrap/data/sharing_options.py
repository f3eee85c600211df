"""The options for splitting training data, and facts about data that was split; ``training_share.py`` does the splitting."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch.utils.data import DataLoader, Subset, get_worker_info

from parwrap.group.group import is_alone

__all__ = ["OwnPart", "Sharing", "TrainingData", "is_private", "replicated"]

replicated: weakref.WeakSet[DataLoader] = weakref.WeakSet()
"""Loaders that every rank reads completely, in every scope."""


class OwnPart(Subset):
    """A part of a dataset that already belongs to this rank, so that its loaders are not split."""


class Sharing(NamedTuple):
    """The options for splitting training data, named as in :class:`parwrap.distributed`.

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
        """Whether the batches of a stream are weighted by their number of samples."""
        return self.loss == "mean" and (self.batch == "global" or self.uneven == "join")

    def loss_factor(self, weight: float, size: int) -> float:
        """The factor for a batch's loss in addition to its ``weight``: a sum is already weighted by its number of samples."""
        if self.loss == "mean" or not weight:
            return 1.0
        return (size if self.batch == "global" else 1) / weight


class TrainingData(NamedTuple):
    """Facts about the data of the first training pass, for the line at the start of training.

    Attributes:
        samples: the size of the whole dataset; ``None`` if it has no length.
        batch_size: per rank; ``None`` if batches have no fixed size.
        global_batch: of all ranks together.
    """

    samples: int | None
    batch_size: int | None
    global_batch: int | None


def is_private() -> bool:
    """Whether a loader is read completely because a worker process or a single rank reads it."""
    return get_worker_info() is not None or is_alone()
