"""The options of ``parwrap.run`` for how ranks train together. Each has the same name as an option of ``distributed``."""

from __future__ import annotations

import argparse
from typing import Any

from parwrap.launching.command.feature_options import number, whole

__all__ = ["STRATEGY_OPTIONS", "add_strategy_options"]


def _wrap(text: str) -> int | tuple[str, ...]:
    try:
        return whole(text)
    except argparse.ArgumentTypeError:
        return tuple(text.split(","))


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {"help": "How ranks train together: ddp averages gradients; docs/strategies.rst describes the others."},
    "every": {"type": whole, "help": "With --strategy local_sgd: average weights every N steps; by default 8."},
    "warmup": {"type": whole, "help": "With --strategy local_sgd: synchronous steps before the first local one."},
    "outer": {"help": "With --strategy local_sgd: nesterov adds an outer optimizer, as in DiLoCo."},
    "outer_lr": {"type": number, "help": "With --outer: its learning rate; by default 0.7."},
    "outer_momentum": {"type": number, "help": "With --outer: its momentum; by default 0.9."},
    "compress": {"help": "Send gradients in fewer bytes: bf16, fp16 or powersgd."},
    "powersgd_rank": {"type": whole, "help": "With --compress powersgd: the rank of the matrices that are sent; by default 4."},
    "servers": {"type": whole, "help": "Number of ranks that are parameter servers; by default 1."},
    "staleness": {
        "type": whole,
        "help": "How many steps a worker of the parameter servers may be ahead of the slowest one; by default unlimited.",
    },
    "survive": {"action": "store_true", "help": "Keep training when a worker of the parameter servers dies, unless it is rank 0."},
    "wrap": {
        "type": _wrap,
        "metavar": "UNITS",
        "help": "With fsdp: classes of modules to shard one by one, separated by commas, or the number of parameters per unit.",
    },
    "bucket_cap_mb": {"type": number, "help": "Size of DDP's gradient buckets in megabytes."},
    "gradient_as_bucket_view": {
        "action": "store_true",
        "help": "As in DistributedDataParallel: saves memory, but gradients kept across steps change.",
    },
    "lock": {"action": "store_true", "help": "With --strategy hogwild: only one rank steps at a time, for comparison."},
}
"""Arguments of ``argparse`` for each."""


def add_strategy_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to ``group``. An option that is not given sets no attribute."""
    for name, arguments in STRATEGY_OPTIONS.items():
        group.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), default=argparse.SUPPRESS, **arguments)
