"""The line that is printed once when training begins: what the ranks do together, or that the script distributes itself.

It warns of batches that are too small for BatchNorm.
"""

from __future__ import annotations

import functools
import gc

from torch import nn
from torch.nn import functional

from parwrap.coordination.call_site import warn
from parwrap.data.sharing_options import TrainingData
from parwrap.group import group as groups
from parwrap.group.group import Group
from parwrap.options import Options
from parwrap.patching.patch import is_patched
from parwrap.session.feature_scope import batches_per_step, described
from parwrap.strategies.common.strategy import Strategy
from parwrap.system.progress_bars import write_line
from parwrap.system.wording import counted
from parwrap.torch_private.modules import BatchNorm

__all__ = ["stand_aside", "start_line"]

FEW = 2
"""Batches with at most this number of samples are too small for BatchNorm."""


def start_line(group: Group, strategy: Strategy, options: Options, data: TrainingData | None, lr_factor: float) -> str:
    """The line that says what the ranks of ``group`` do together.

    Args:
        group: the ranks.
        strategy: how they train together.
        options: the options of the innermost running function.
        data: the data of the first training pass.
        lr_factor: the factor of learning rates.
    """
    size = group.world.size
    facts = [counted(size, "rank"), f"{group.backend} on {group.device}", strategy.described()]
    if data is None:
        facts.append("no DataLoader was split: every rank trains on data that it reads or creates itself")
    else:
        shared = f", {data.global_batch} global" if strategy.steps_together else ""
        dealt = "batches dealt out" if options.batch == "per_rank" else "each batch split"
        together = data.global_batch if strategy.steps_together else data.batch_size
        accumulated = f", {together * batches_per_step()} per step" if together and batches_per_step() > 1 else ""
        facts.append(f"batch {data.batch_size} per rank{shared}{accumulated}" if data.batch_size else dealt)
        if options.batch == "per_rank" and strategy.steps_together:
            facts.append("learning rate unchanged" if options.lr == "keep" else f"learning rate times {lr_factor:.4g}")
        facts.append(f"{counted(data.samples, 'sample')} / {counted(size, 'rank')}" if data.samples else "samples without a length")
        facts += [f"{name} {value}" for name in ("uneven", "loss") if (value := getattr(options, name)) != getattr(Options, name)]
        if strategy.steps_together:
            _warn_of_small_batches(data.batch_size)
    return ", ".join([*facts, *described()])


def _warn_of_small_batches(batch_size: int | None) -> None:
    """Warn if batches of ``batch_size`` samples are too small for a BatchNorm that trains on each rank's own batch.

    Modules are searched for one only if the batches are that small.
    """
    if batch_size is None or batch_size > FEW or is_patched(functional.batch_norm):
        return
    layers = (thing for thing in gc.get_objects() if issubclass(type(thing), BatchNorm) and type(thing) is not nn.SyncBatchNorm)
    if any(getattr(layer, "training", False) for layer in layers):
        warn(
            f"parwrap: BatchNorm layers train on batches of {batch_size} on each rank, whose statistics are mostly noise. To use the "
            "statistics of all ranks together, add @parwrap.sync_bn (--sync-bn on the command line)."
        )


@functools.cache
def stand_aside(what: str) -> None:
    """Print once that the script calls ``what`` itself, however often a decorated function runs."""
    if groups.is_rank_zero():
        write_line(
            f"parwrap: this script calls {what} itself, so parwrap leaves it alone: it splits no data and averages no gradients here. To "
            "let parwrap do this, remove the script's own distributed code."
        )
