"""The scopes around a script as options of ``parwrap.run``: a table for ``distributed``, whose options ``options.py`` explains, and one
for other decorators."""

from __future__ import annotations

import argparse
from typing import Any

from parwrap.options import CHOICES

__all__ = ["DECORATORS", "SCOPE_OPTIONS", "add_options", "decorators", "scope_options"]


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


DECORATORS: dict[str, dict[str, Any]] = {
    "accumulate": {"type": _whole, "help": "Take an optimizer step every so many batches."},
    "amp": {"help": "Mixed precision: bf16, fp16, auto, or one of Apex's levels, O0 to O3."},
}
"""The arguments of ``argparse`` for each decorator of parwrap around the script, whose first argument is the value of the option."""


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add all of them to ``group``; one that is not given leaves no attribute."""
    for name, arguments in {**SCOPE_OPTIONS, **DECORATORS}.items():
        given = {"type": _choice, **arguments} if name in CHOICES else arguments
        group.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), default=argparse.SUPPRESS, **given)


def scope_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options for the scope that ``arguments`` give. torchrun's ``--start-method`` is none of them.

    >>> scope_options(argparse.Namespace(seed=3, nnodes="1"))
    {'seed': 3}
    """
    return {name: getattr(arguments, name) for name in SCOPE_OPTIONS if hasattr(arguments, name)}


def decorators(arguments: argparse.Namespace) -> dict[str, Any]:
    """The decorators that ``arguments`` ask for, each with its first argument.

    >>> decorators(argparse.Namespace(amp="bf16", seed=3))
    {'amp': 'bf16'}
    """
    return {name: getattr(arguments, name) for name in DECORATORS if hasattr(arguments, name)}
