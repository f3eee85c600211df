"""The line that is printed once when training begins: what the ranks do together, or that the script distributes itself."""

from __future__ import annotations

import functools

from parwrap.data.sharing_options import TrainingData
from parwrap.group import group as groups
from parwrap.group.group import Group
from parwrap.options import Options
from parwrap.session.feature_scope import batches_per_step, described
from parwrap.strategies.common.small_batch_hint import warn_of_small_batches
from parwrap.strategies.common.strategy import Strategy
from parwrap.system.progress_bars import write_line
from parwrap.system.wording import counted

__all__ = ["stand_aside", "start_line"]


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
            warn_of_small_batches(data.batch_size)
    return ", ".join([*facts, *described()])


@functools.cache
def stand_aside(what: str) -> None:
    """Print once that the script calls ``what`` itself, however often a decorated function runs."""
    if groups.is_rank_zero():
        write_line(
            f"parwrap: this script calls {what} itself, so parwrap leaves it alone: it splits no data and averages no gradients here. To "
            "let parwrap do this, remove the script's own distributed code."
        )
