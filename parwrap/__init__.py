"""Run a plain single-GPU PyTorch training function or script on many ranks, unchanged.

The public names; each is imported when it is first used, so that ``import parwrap`` costs nothing beside torch and
``python -m parwrap.run`` can set things up before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parwrap.collectives import all_ranks, any_rank, barrier, broadcast, gather, reduce_mean, reduce_sum
    from parwrap.decorator import Decorating
    from parwrap.errors import LaunchError, ParwrapError, RankMismatchError, RankZeroError, UsageError
    from parwrap.features.amp import amp_state
    from parwrap.features.gather_with_grad import gather_with_grad
    from parwrap.features.launch import launch
    from parwrap.features.loaders import loaders
    from parwrap.features.mean import mean_over_ranks
    from parwrap.features.shard import replicate, shard
    from parwrap.group import is_rank_zero, local_rank, rank, world_size
    from parwrap.mixins import AccumulateMixin, AmpMixin, DistributedMixin, EvaluateMixin, SyncBNMixin, UniformLengthMixin

    accumulate: Decorating
    amp: Decorating
    data_parallel: Decorating
    distributed: Decorating
    evaluate: Decorating
    every_rank_writes: Decorating
    hogwild: Decorating
    rank_zero_first: Decorating
    rank_zero_only: Decorating
    sync_bn: Decorating
    uniform_length: Decorating

__version__ = "0.1.0"

_HOMES = {
    "parwrap.collectives": ("all_ranks", "any_rank", "barrier", "broadcast", "gather", "reduce_mean", "reduce_sum"),
    "parwrap.errors": ("LaunchError", "ParwrapError", "RankMismatchError", "RankZeroError", "UsageError"),
    "parwrap.features.accumulate": ("accumulate",),
    "parwrap.features.amp": ("amp", "amp_state"),
    "parwrap.features.data_parallel": ("data_parallel",),
    "parwrap.features.distributed": ("distributed",),
    "parwrap.features.evaluate": ("evaluate",),
    "parwrap.features.every_rank": ("every_rank_writes",),
    "parwrap.features.gather_with_grad": ("gather_with_grad",),
    "parwrap.features.hogwild": ("hogwild",),
    "parwrap.features.launch": ("launch",),
    "parwrap.features.loaders": ("loaders",),
    "parwrap.features.mean": ("mean_over_ranks",),
    "parwrap.features.rank_zero": ("rank_zero_first", "rank_zero_only"),
    "parwrap.features.shard": ("replicate", "shard"),
    "parwrap.features.sync_bn": ("sync_bn",),
    "parwrap.features.uniform_length": ("uniform_length",),
    "parwrap.group": ("is_rank_zero", "local_rank", "rank", "world_size"),
    "parwrap.mixins": ("AccumulateMixin", "AmpMixin", "DistributedMixin", "EvaluateMixin", "SyncBNMixin", "UniformLengthMixin"),
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
    return sorted({*globals(), *__all__})
