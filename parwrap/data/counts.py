"""How many samples of the dataset this rank has read in a pass over a share, and how many of these only fill up its share.

They are counted where samplers draw them: a collate function may make several rows of one sample, or leave some out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from parwrap.data.samplers import Count, DealtBatches, SplitBatches, batches_by_size, draws_of
from parwrap.data.streams import Dealt

__all__ = ["counting"]


def counting(share: DataLoader) -> Callable[[int, bool], Count | None]:
    """A function that gets how many batches of ``share`` the loop has drawn, and whether it has read all, and returns the count.

    It returns ``None`` where neither samplers nor a stream that parwrap deals out show it, or for a pass of these that the loop has left.
    """
    if isinstance(stream := share.dataset, Dealt):
        batch_size = share.batch_size or 1 if share.drop_last else 1
        return lambda batches, exhausted: stream.count(batch_size) if exhausted else None
    draws = draws_of(share)
    if isinstance(draws, (DealtBatches, SplitBatches)):
        ahead = draws.weights is None and share.num_workers > 0

        def drawn_so_far(batches: int, exhausted: bool) -> Count | None:
            return None if ahead and not exhausted else draws.count()

        return drawn_so_far
    sampler = getattr(draws, "sampler", draws)
    size = 1 if share.batch_sampler is None else draws.batch_size if batches_by_size(share) else 0
    if not isinstance(sampler, DistributedSampler) or not size:
        return lambda batches, exhausted: None
    own = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]

    def of_size(batches: int, exhausted: bool) -> Count | None:
        samples = min(batches * size, len(sampler))
        return Count(samples, max(0, samples - own))

    return of_size
