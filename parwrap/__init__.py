"""Run a plain single-GPU PyTorch training function or script on many ranks, unchanged.

The public names; each is imported on first use, so that ``import parwrap`` costs nothing besides torch and ``python -m parwrap.run`` can
set things up before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parwrap.api import signatures
    from parwrap.api.amp import amp_state
    from parwrap.api.gather_with_grad import gather_with_grad
    from parwrap.api.launch import launch
    from parwrap.api.loaders import loaders
    from parwrap.api.mean_over_ranks import mean_over_ranks
    from parwrap.api.mixins import AccumulateMixin, AmpMixin, DistributedMixin, EvaluateMixin, SyncBNMixin, UniformLengthMixin
    from parwrap.api.shard import replicate, shard
    from parwrap.errors import LaunchError, ParwrapError, RankMismatchError, RankZeroError, UsageError
    from parwrap.group.collectives import all_ranks, any_rank, barrier, broadcast, gather, reduce_mean, reduce_sum
    from parwrap.group.group import is_rank_zero, local_rank, rank, world_size

    accumulate: signatures.Accumulate
    amp: signatures.Amp
    data_parallel: signatures.DataParallel
    distributed: signatures.Distributed
    evaluate: signatures.Evaluate
    every_rank_writes: signatures.WithoutOptions
    hogwild: signatures.Hogwild
    rank_zero_first: signatures.RankZeroFirst
    rank_zero_only: signatures.RankZeroOnly
    sync_bn: signatures.SyncBN
    uniform_length: signatures.UniformLength

__version__ = "0.1.0"

_HOMES = {
    "parwrap.group.collectives": ("all_ranks", "any_rank", "barrier", "broadcast", "gather", "reduce_mean", "reduce_sum"),
    "parwrap.errors": ("LaunchError", "ParwrapError", "RankMismatchError", "RankZeroError", "UsageError"),
    "parwrap.api.accumulate": ("accumulate",),
    "parwrap.api.amp": ("amp", "amp_state"),
    "parwrap.api.data_parallel": ("data_parallel",),
    "parwrap.api.distributed": ("distributed",),
    "parwrap.api.evaluate": ("evaluate",),
    "parwrap.api.every_rank_writes": ("every_rank_writes",),
    "parwrap.api.gather_with_grad": ("gather_with_grad",),
    "parwrap.api.hogwild": ("hogwild",),
    "parwrap.api.launch": ("launch",),
    "parwrap.api.loaders": ("loaders",),
    "parwrap.api.mean_over_ranks": ("mean_over_ranks",),
    "parwrap.api.rank_zero": ("rank_zero_first", "rank_zero_only"),
    "parwrap.api.shard": ("replicate", "shard"),
    "parwrap.api.sync_bn": ("sync_bn",),
    "parwrap.api.uniform_length": ("uniform_length",),
    "parwrap.group.group": ("is_rank_zero", "local_rank", "rank", "world_size"),
    "parwrap.api.mixins": ("AccumulateMixin", "AmpMixin", "DistributedMixin", "EvaluateMixin", "SyncBNMixin", "UniformLengthMixin"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AccumulateMixin",
    "AmpMixin",
    "DistributedMixin",
    "EvaluateMixin",
    "LaunchError",
    "ParwrapError",
    "RankMismatchError",
    "RankZeroError",
    "SyncBNMixin",
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
    "gather",
    "gather_with_grad",
    "hogwild",
    "is_rank_zero",
    "launch",
    "loaders",
    "local_rank",
    "mean_over_ranks",
    "rank",
    "rank_zero_first",
    "rank_zero_only",
    "reduce_mean",
    "reduce_sum",
    "replicate",
    "shard",
    "sync_bn",
    "uniform_length",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module("parwrap.data")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'parwrap' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "data"])
