"""Run a plain single-GPU PyTorch training function or script on many ranks, unchanged.

Lists the public names. Each is imported on first use, so ``import parwrap`` does not import torch, and ``parwrap run`` can
prepare the process before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parwrap.data.collate import pad_collate
    from parwrap.data.lengths import UniformLengthBatchSampler
    from parwrap.data.loaders import replicate, shard
    from parwrap.decorators import amp as _amp
    from parwrap.decorators import data_parallel as _data_parallel
    from parwrap.decorators import evaluate as _evaluate
    from parwrap.decorators import explain as _explain
    from parwrap.decorators import hogwild as _hogwild
    from parwrap.decorators import progress as _progress
    from parwrap.decorators import rank_zero as _rank_zero
    from parwrap.decorators import signatures
    from parwrap.decorators import sync_bn as _sync_bn
    from parwrap.decorators import uniform_length as _uniform_length
    from parwrap.decorators.amp import amp_state
    from parwrap.decorators.batch_losses import gather_with_grad, mean_over_ranks
    from parwrap.decorators.distributed import no_sync, same_draws
    from parwrap.decorators.launch import launch
    from parwrap.decorators.mixins import (
        AccumulateMixin,
        AmpMixin,
        DistributedMixin,
        EvaluateMixin,
        SyncBNMixin,
        UniformLengthMixin,
    )
    from parwrap.decorators.total import total
    from parwrap.errors import LaunchError, LockstepError, ParwrapError, RankMismatchError, RankZeroError, UsageError
    from parwrap.insight.verify import verify
    from parwrap.options import Options as _Options
    from parwrap.ranks.collectives import all_ranks, any_rank, barrier, broadcast, gather, reduce_mean, reduce_sum
    from parwrap.ranks.group import is_rank_zero, local_rank, rank, world_size
    from parwrap.rows.tensors import is_rows

    accumulate: signatures.Accumulate
    distributed = signatures.decorator(_Options.__init__)
    amp = signatures.decorator(_amp.amp.__init__)
    data_parallel = signatures.decorator(_data_parallel.data_parallel.__init__)
    evaluate = signatures.decorator(_evaluate.evaluate.__init__)
    explain = signatures.decorator(_explain.explain.__init__)
    hogwild = signatures.decorator(_hogwild.hogwild.__init__)
    progress = signatures.decorator(_progress.progress.__init__)
    every_rank_writes = signatures.decorator(_rank_zero.every_rank_writes.__init__)
    rank_zero_first = signatures.decorator(_rank_zero.rank_zero_first.__init__)
    rank_zero_only = signatures.decorator(_rank_zero.rank_zero_only.__init__)
    sync_bn = signatures.decorator(_sync_bn.sync_bn.__init__)
    uniform_length = signatures.decorator(_uniform_length.uniform_length.__init__)

__version__ = "0.2.0"

_HOMES = {
    "parwrap.data.lengths": ("UniformLengthBatchSampler",),
    "parwrap.data.loaders": ("replicate", "shard"),
    "parwrap.decorators.accumulate": ("accumulate",),
    "parwrap.decorators.amp": ("amp", "amp_state"),
    "parwrap.data.collate": ("pad_collate",),
    "parwrap.decorators.batch_losses": ("gather_with_grad", "mean_over_ranks"),
    "parwrap.decorators.data_parallel": ("data_parallel",),
    "parwrap.decorators.distributed": ("distributed", "no_sync", "same_draws"),
    "parwrap.decorators.evaluate": ("evaluate",),
    "parwrap.decorators.explain": ("explain",),
    "parwrap.decorators.launch": ("launch",),
    "parwrap.decorators.mixins": ("AccumulateMixin", "AmpMixin", "DistributedMixin", "EvaluateMixin", "SyncBNMixin", "UniformLengthMixin"),
    "parwrap.decorators.hogwild": ("hogwild",),
    "parwrap.decorators.progress": ("progress",),
    "parwrap.decorators.rank_zero": ("every_rank_writes", "rank_zero_first", "rank_zero_only"),
    "parwrap.decorators.sync_bn": ("sync_bn",),
    "parwrap.decorators.total": ("total",),
    "parwrap.decorators.uniform_length": ("uniform_length",),
    "parwrap.errors": ("LaunchError", "LockstepError", "ParwrapError", "RankMismatchError", "RankZeroError", "UsageError"),
    "parwrap.insight.verify": ("verify",),
    "parwrap.ranks.collectives": ("all_ranks", "any_rank", "barrier", "broadcast", "gather", "reduce_mean", "reduce_sum"),
    "parwrap.ranks.group": ("is_rank_zero", "local_rank", "rank", "world_size"),
    "parwrap.rows.tensors": ("is_rows",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AccumulateMixin",
    "AmpMixin",
    "DistributedMixin",
    "EvaluateMixin",
    "LaunchError",
    "LockstepError",
    "ParwrapError",
    "RankMismatchError",
    "RankZeroError",
    "SyncBNMixin",
    "UniformLengthBatchSampler",
    "UniformLengthMixin",
    "UsageError",
    "accumulate",
    "all_ranks",
    "amp",
    "amp_state",
    "any_rank",
    "barrier",
    "broadcast",
    "data_parallel",
    "distributed",
    "evaluate",
    "every_rank_writes",
    "explain",
    "gather",
    "gather_with_grad",
    "hogwild",
    "is_rank_zero",
    "is_rows",
    "launch",
    "local_rank",
    "mean_over_ranks",
    "no_sync",
    "pad_collate",
    "progress",
    "rank",
    "rank_zero_first",
    "rank_zero_only",
    "reduce_mean",
    "reduce_sum",
    "replicate",
    "same_draws",
    "shard",
    "sync_bn",
    "total",
    "uniform_length",
    "verify",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'parwrap' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
