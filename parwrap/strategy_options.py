"""The options of ``parwrap.run`` that say how ranks train together: they are those of ``distributed`` of the same names."""

from __future__ import annotations

import argparse
from typing import Any

from parwrap.feature_options import number, whole

__all__ = ["STRATEGY_OPTIONS", "add_strategy_options"]


def _wrap(text: str) -> int | tuple[str, ...]:
    try:
        return whole(text)
    except argparse.ArgumentTypeError:
        return tuple(text.split(","))


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {
        "help": "How ranks train together: ddp averages gradients; fsdp shards the model; none has each rank train a model of its own."
    },
    "wrap": {
        "type": _wrap,
        "metavar": "UNITS",
        "help": "With fsdp: classes of modules that are sharded one by one, with commas between, or how many parameters make one.",
    },
    "bucket_cap_mb": {"type": number, "help": "Size of DDP's gradient buckets in megabytes."},
    "gradient_as_bucket_view": {
        "action": "store_true",
        "help": "As in DistributedDataParallel: saves memory, but gradients kept across steps change.",
    },
}
"""What ``argparse`` is told of each."""


def add_strategy_options(group: argparse._ArgumentGroup) -> None:
    """Add them to ``group``; one that is not given leaves no attribute."""
    for name, told in STRATEGY_OPTIONS.items():
        group.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), default=argparse.SUPPRESS, **told)
