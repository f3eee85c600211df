"""The order in which ranks read a shuffled loader, by torch's own sampler: a reference."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler


class DrawnOrder(DistributedSampler):
    """``DistributedSampler`` with a new seed in each pass, drawn from a stream as a single process draws the seed of its shuffled order.

    Args:
        dataset: the dataset.
        seed: the seed of the stream.
        options: those of ``DistributedSampler``.
    """

    def __init__(self, dataset: Any, *, seed: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.stream = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Any:
        _of_workers, self.seed = (int(torch.empty((), dtype=torch.int64).random_(generator=self.stream)) for _ in range(2))
        return super().__iter__()
