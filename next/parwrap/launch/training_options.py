"""The options of the ``distributed`` scope as options of ``parwrap.run``, one table; ``options.py`` has their meaning."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from parwrap.options import CHOICES, Options

__all__ = ["OTHER_SCOPES", "SCOPE_OPTIONS", "add_options", "scope_options"]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from None


def _choice(text: str) -> str:
    return text.replace("-", "_")


SCOPE_OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {"help": "Backend of the process group; by default nccl for GPUs and gloo for the CPU."},
    "seed": {"type": _whole, "help": "Seed of torch, numpy and python on all ranks."},
    "batch": {"help": "per_rank: each rank takes whole batches; global: each takes its part of every batch."},
    "uneven": {"help": "If samples do not divide evenly: pad repeats some; drop skips some; join uses each once."},
    "lr": {"help": "How learning rates follow the larger global batch: keep, linear or sqrt."},
    "loss": {"help": "How the loss combines the samples of a batch: mean or sum."},
    "draws": {"help": "by-pass: ranks draw their own random numbers in training passes; per-rank: from the first backward on."},
    "strategy": {"help": f"How ranks train together: {'; '.join(f'{name}: {text}' for name, text in CHOICES['strategy'].items())}."},
    "bucket_cap_mb": {"type": _number, "help": "Size of DDP's gradient buckets in megabytes."},
    "gradient_as_bucket_view": {
        "action": "store_true",
        "help": "As in DistributedDataParallel: saves memory, but gradients kept across steps change.",
    },
    "compress": {"help": "Send gradients in fewer bytes: bf16, fp16 or powersgd."},
    "powersgd_rank": {"type": _whole, "help": "With --compress powersgd: the rank of the matrices that are sent; by default 4."},
    "every": {"type": _whole, "help": "With --strategy local-sgd: average weights every N steps; by default 8."},
    "warmup": {"type": _whole, "help": "With --strategy local-sgd: synchronous steps before the first local one."},
    "outer": {"help": "With --strategy local-sgd: nesterov adds an outer optimizer, as in DiLoCo."},
    "outer_lr": {"type": _number, "help": "With --outer: its learning rate; by default 0.7."},
    "outer_momentum": {"type": _number, "help": "With --outer: its momentum; by default 0.9."},
    "timeout": {"type": _number, "help": "Seconds that a rank waits for another."},
}
"""The arguments of ``argparse`` for each option of the scope."""

OTHER_SCOPES: dict[str, dict[str, Any]] = {
    "sync_bn": {"action": "store_true", "help": "Batch norms use the statistics of all ranks, as with @parwrap.sync_bn."},
}
"""Those of decorators that are opened inside it."""


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add all of them to ``group``; one that is not given leaves no attribute."""
    for name, arguments in (SCOPE_OPTIONS | OTHER_SCOPES).items():
        given = {"type": _choice, **arguments} if name in CHOICES else arguments
        group.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), default=argparse.SUPPRESS, **given)


def scope_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options for the scope that ``arguments`` give.

    >>> scope_options(argparse.Namespace(seed=3, nnodes="1"))
    {'seed': 3}
    """
    names = (*(field.name for field in fields(Options)), *OTHER_SCOPES)
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
