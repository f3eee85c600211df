"""Loaders with the user's own ``DistributedSampler``. The sampler is kept if it was made for the present number of ranks."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from parwrap.coordination.call_site import warn
from parwrap.data.dataset_agreement import Agreement
from parwrap.data.resumed_pass import Skipping
from parwrap.data.samplers import with_indices
from parwrap.system.progress_bars import write_line

__all__ = ["OwnSamplers"]


class OwnSamplers:
    """Makes the user's own sampler draw the samples of this rank.

    Args:
        agreement: compares values with the other ranks; ``None`` for a single rank.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, agreement: Agreement | None, rank: int, size: int) -> None:
        self._agreement, self._rank, self._size = agreement, rank, size
        self._ranks_differ: weakref.WeakKeyDictionary[DataLoader, bool] = weakref.WeakKeyDictionary()
        self._noted = False

    def shares_out(self, loader: DataLoader) -> bool:
        """Whether the user's own sampler divides ``loader`` among the present number of ranks."""
        return isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas == self._size > 1

    def shard(self, loader: DataLoader, done: int) -> DataLoader:
        """A copy of the loader that draws this rank's samples from the user's sampler, without the first ``done``."""
        sampler: Any = loader.sampler
        if loader not in self._ranks_differ and self._agreement:
            self._ranks_differ[loader] = self._agreement.own_sampler(sampler)
            if not self._ranks_differ[loader]:
                warn(
                    f"parwrap: a DataLoader's own DistributedSampler was made with rank={sampler.rank} on more than one rank, so these "
                    "ranks would train on the same share. parwrap gives each rank its own share. Remove num_replicas= and rank=, or the "
                    "DistributedSampler."
                )
        if not self._ranks_differ.get(loader):
            sampler = copy.copy(sampler)  # copied for each pass, because the user calls set_epoch on the original
            sampler.rank = self._rank
        batches: Any = loader.batch_sampler
        if batches is not None and sampler is not loader.sampler:
            batches = copy.copy(batches)
            batches.sampler = sampler
        drawn = sampler if batches is None else batches
        others = {} if batches is None else {"sampler": sampler}
        return with_indices(loader, Skipping(drawn, done) if done else drawn, **others)

    def note(self, sampler: DistributedSampler) -> None:
        """Report once how ``sampler`` is used."""
        if self._noted or self._size == 1:
            return
        self._noted = True
        if self._rank == 0:
            replicas = sampler.num_replicas
            what = "it is kept" if replicas == self._size else f"its draws are divided among {self._size} ranks"
            made_for = "1 replica" if replicas == 1 else f"{replicas} replicas"
            write_line(f"parwrap: a DataLoader has its own DistributedSampler for {made_for}: {what}.")
