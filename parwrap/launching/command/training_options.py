"""The options of ``parwrap.run`` for training: those of ``distributed``, and those that add a feature decorator.

``plan.py`` decides how they combine with other options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from parwrap.errors import LaunchError, UsageError

__all__ = ["AMP_VALUES", "SCOPE_OPTIONS", "add_options", "features_of", "refuse_missing_gpus"]

AMP_VALUES = ("auto", "bf16", "fp16", "bfloat16", "float16", "O0", "O1", "O2", "O3")


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


def _steps(text: str) -> int | str:
    return text if text == "auto" else _whole(text)


def _devices(text: str) -> list[int | str] | None:
    return None if text == "all" else [int(name) if name.isdecimal() else name for name in text.replace(" ", "").split(",")]


def _wrap(text: str) -> int | tuple[str, ...]:
    try:
        return _whole(text)
    except argparse.ArgumentTypeError:
        return tuple(text.split(","))


SCOPE_OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {"help": "Backend of the process group; by default nccl for GPUs and gloo for the CPU."},
    "seed": {"type": _whole, "help": "Seed of torch, numpy and python on all ranks."},
    "batch": {"help": "per_rank: each rank takes whole batches; global: each takes its part of every batch."},
    "uneven": {"help": "If samples do not divide evenly: pad repeats some; drop skips some; join uses each once."},
    "lr": {"help": "How learning rates follow the larger global batch: keep, linear or sqrt."},
    "loss": {"help": "How the loss combines the samples of a batch: mean or sum."},
    "timeout": {"type": _number, "help": "Seconds that a rank waits for another."},
    "hang_after": {"type": _number, "help": "Seconds before rank 0 reports where every rank is while one waits; by default 60."},
    "strategy": {"help": "How ranks train together: ddp averages gradients; docs/strategies.rst describes the others."},
    "every": {"type": _whole, "help": "With --strategy local_sgd: average weights every N steps; by default 8."},
    "warmup": {"type": _whole, "help": "With --strategy local_sgd: synchronous steps before the first local one."},
    "outer": {"help": "With --strategy local_sgd: nesterov adds an outer optimizer, as in DiLoCo."},
    "outer_lr": {"type": _number, "help": "With --outer: its learning rate; by default 0.7."},
    "outer_momentum": {"type": _number, "help": "With --outer: its momentum; by default 0.9."},
    "compress": {"help": "Send gradients in fewer bytes: bf16, fp16 or powersgd."},
    "powersgd_rank": {"type": _whole, "help": "With --compress powersgd: the rank of the matrices that are sent; by default 4."},
    "servers": {"type": _whole, "help": "Number of ranks that are parameter servers; by default 1."},
    "staleness": {
        "type": _whole,
        "help": "How many steps a worker of the parameter servers may be ahead of the slowest one; by default unlimited.",
    },
    "survive": {"action": "store_true", "help": "Keep training when a worker of the parameter servers dies, unless it is rank 0."},
    "wrap": {
        "type": _wrap,
        "metavar": "UNITS",
        "help": "With fsdp: classes of modules to shard one by one, separated by commas, or the number of parameters per unit.",
    },
    "bucket_cap_mb": {"type": _number, "help": "Size of DDP's gradient buckets in megabytes."},
    "gradient_as_bucket_view": {
        "action": "store_true",
        "help": "As in DistributedDataParallel: saves memory, but gradients kept across steps change.",
    },
    "lock": {"action": "store_true", "help": "With --strategy hogwild: only one rank steps at a time, for comparison."},
}
"""Options of ``distributed``, with the arguments of ``argparse`` for each."""

FEATURE_OPTIONS: dict[str, dict[str, Any]] = {
    "amp": {
        "metavar": "DTYPE",
        "help": f"Mixed precision: {', '.join(AMP_VALUES)}; without a value, auto: bf16 where the device supports it.",
    },
    "sync_bn": {"action": "store_true", "help": "Compute BatchNorm statistics over all ranks."},
    "accumulate": {
        "metavar": "N",
        "type": _steps,
        "help": "Take an optimizer step every N batches; auto for a script that accumulates by hand.",
    },
    "data_parallel": {
        "metavar": "DEVICES",
        "type": _devices,
        "help": "Run the model on several devices of one process: all, or a list such as 0,1 or cpu,cpu.",
    },
    "no_gather": {
        "dest": "gather",
        "action": "store_false",
        "help": "With --data-parallel: keep outputs on their devices and compute torch's losses there.",
    },
    "uniform_length": {"action": "store_true", "help": "Batch samples of similar length, with as little padding as possible."},
    "pad_value": {"type": _number, "help": "With --uniform-length: the value to pad sequences with."},
    "max_tokens": {"type": _whole, "help": "With --uniform-length: tokens per batch, instead of samples."},
}
"""Options of feature decorators, likewise."""


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add all of them to ``group``; one that is not given leaves no attribute."""
    for name, arguments in (SCOPE_OPTIONS | FEATURE_OPTIONS).items():
        group.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), default=argparse.SUPPRESS, **arguments)


def features_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The decorators that the options select, by name, with their arguments."""
    features: dict[str, dict[str, Any]] = {}
    if hasattr(arguments, "amp"):
        features["amp"] = {"level" if arguments.amp.startswith("O") else "dtype": arguments.amp}
    if hasattr(arguments, "sync_bn"):
        features["sync_bn"] = {}
    if hasattr(arguments, "accumulate"):
        features["accumulate"] = {"steps": arguments.accumulate}
    if hasattr(arguments, "data_parallel"):
        features["data_parallel"] = {"device_ids": arguments.data_parallel}
        if hasattr(arguments, "loss"):
            features["data_parallel"]["loss"] = arguments.loss
    if hasattr(arguments, "uniform_length"):
        features["uniform_length"] = {}
    for name, (feature, option) in _PARTS.items():
        if hasattr(arguments, name) and feature not in features:
            missing = f"--{feature.replace('_', '-')}"
            raise UsageError(f"{option} has no effect without {missing}: add it. The script's own options come after its name.")
        if hasattr(arguments, name):
            features[feature][name] = getattr(arguments, name)
    return features


_PARTS = {
    "gather": ("data_parallel", "--no-gather"),
    "pad_value": ("uniform_length", "--pad-value"),
    "max_tokens": ("uniform_length", "--max-tokens"),
}
"""Options of one feature and their names in messages."""


def refuse_missing_gpus(devices: Sequence[int | str], gpus: int) -> None:
    """Raise :class:`LaunchError` if ``devices`` names a GPU beyond the ``gpus`` that torch can use."""
    for device in devices:
        number = str(device).removeprefix("cuda:")
        if number.isdecimal() and int(number) >= gpus:
            raise LaunchError(f"--data-parallel names cuda:{number}, but torch can use {gpus} GPUs here: choose others, or all.")
