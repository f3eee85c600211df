"""The options of ``parwrap.run`` for features: their values, and the decorators that they select.

``plan.py`` decides how they combine with other options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from parwrap.errors import LaunchError, UsageError

__all__ = ["AMP_VALUES", "add_feature_options", "features_of", "number", "refuse_missing_gpus", "whole"]

AMP_VALUES = ("auto", "bf16", "fp16", "bfloat16", "float16", "O0", "O1", "O2", "O3")


def add_feature_options(group: argparse._ArgumentGroup) -> None:
    """Add the options to ``group``. An option that is not given sets no attribute."""
    absent = argparse.SUPPRESS
    group.add_argument(
        "--amp",
        default=absent,
        metavar="DTYPE",
        help=f"Mixed precision: {', '.join(AMP_VALUES)}; without a value, auto: bf16 where the device supports it.",
    )
    group.add_argument("--sync-bn", "--sync_bn", default=absent, action="store_true", help="Compute BatchNorm statistics over all ranks.")
    group.add_argument(
        "--accumulate",
        default=absent,
        metavar="N",
        type=_steps,
        help="Take an optimizer step every N batches; auto for a script that accumulates by hand.",
    )
    group.add_argument(
        "--data-parallel",
        "--data_parallel",
        default=absent,
        metavar="DEVICES",
        type=_devices,
        help="Run the model on several devices of one process: all, or a list such as 0,1 or cpu,cpu.",
    )
    group.add_argument(
        "--no-gather",
        "--no_gather",
        dest="gather",
        default=absent,
        action="store_false",
        help="With --data-parallel: keep outputs on their devices and compute torch's losses there.",
    )
    group.add_argument(
        "--uniform-length",
        "--uniform_length",
        default=absent,
        action="store_true",
        help="Batch samples of similar length, with as little padding as possible.",
    )
    group.add_argument(
        "--pad-value", "--pad_value", default=absent, type=number, help="With --uniform-length: the value to pad sequences with."
    )
    group.add_argument(
        "--max-tokens", "--max_tokens", default=absent, type=whole, help="With --uniform-length: tokens per batch, instead of samples."
    )


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
            raise LaunchError(f"--data-parallel names cuda:{number}, but torch can use only {gpus} GPUs here: choose others, or all.")


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer.") from None


def _steps(text: str) -> int | str:
    return text if text == "auto" else whole(text)


def _devices(text: str) -> list[int | str] | None:
    return None if text == "all" else [int(name) if name.isdecimal() else name for name in text.replace(" ", "").split(",")]


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from None
