"""Run a plain single-GPU PyTorch training function or script on many ranks, unchanged.

Lists the public names. Each is imported on first use, so ``import parwrap`` takes no longer than importing torch, and ``python -m
parwrap.run`` can prepare the process before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parwrap.api import amp as _amp
    from parwrap.api import data_parallel as _data_parallel
    from parwrap.api import evaluate as _evaluate
    from parwrap.api import every_rank_writes as _every_rank_writes
    from parwrap.api import hogwild as _hogwild
    from parwrap.api import rank_zero as _rank_zero
    from parwrap.api import signatures
    from parwrap.api import sync_bn as _sync_bn
    from parwrap.api import uniform_length as _uniform_length
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
    distributed: signatures.Distributed
    amp = signatures.decorator(_amp.amp.__init__)
    data_parallel = signatures.decorator(_data_parallel.data_parallel.__init__)
    evaluate = signatures.decorator(_evaluate.evaluate.__init__)
    every_rank_writes = signatures.decorator(_every_rank_writes.every_rank_writes.__init__)
    hogwild = signatures.decorator(_hogwild.hogwild.__init__)
    rank_zero_first = signatures.decorator(_rank_zero.rank_zero_first.__init__)
    rank_zero_only = signatures.decorator(_rank_zero.rank_zero_only.__init__)
    sync_bn = signatures.decorator(_sync_bn.sync_bn.__init__)
    uniform_length = signatures.decorator(_uniform_length.uniform_length.__init__)

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
