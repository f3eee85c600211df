"""The requested precision, by dtype or by one of Apex's levels, and its meaning on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from parwrap.errors import UsageError

__all__ = ["DTYPES", "LEVELS", "Precision", "check", "choose"]

DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}
"""The values of ``dtype``."""

LEVELS = {
    "O0": "float32, without changes",
    "O1": "autocast to float16 with a dynamic loss scale",
    "O2": "a float16 model with float32 BatchNorm, float32 master weights and a dynamic loss scale",
    "O3": "a pure float16 model",
}
"""The values of ``level``."""


@dataclass(frozen=True)
class Precision:
    """The precision settings.

    Attributes:
        device: the type of device.
        dtype: the dtype to compute in; ``None`` leaves it to the script.
        autocasts: whether autocast chooses the operations.
        scales: whether losses are scaled, and steps with non-finite gradients skipped.
        model: how a model is cast: not at all, only during its calls (its weights are unchanged), or permanently.
    """

    device: str
    dtype: torch.dtype | None
    autocasts: bool = False
    scales: bool = False
    model: Literal["", "in calls", "for good"] = ""


def check(dtype: Any, level: str | None) -> None:
    """Raise :class:`UsageError` for unknown values."""
    if level is not None and level not in LEVELS:
        raise UsageError(f"level={level!r} is not one of Apex's levels. {'; '.join(f'{name!r}: {each}' for name, each in LEVELS.items())}.")
    if dtype not in DTYPES:
        raise UsageError(
            f"dtype={dtype!r} is not a dtype for mixed precision: use 'bf16', 'fp16' or 'auto', which is bf16 where the device supports it."
        )
    if level is not None and dtype != "auto":
        raise UsageError(f"level={level!r} sets the dtype, but dtype={dtype!r} is passed too: remove one of them.")


def choose(dtype: Any, level: str | None, device: str) -> Precision:
    """The meaning of ``dtype`` or ``level`` on a type of device.

    >>> choose("auto", None, "cpu")
    Precision(device='cpu', dtype=torch.bfloat16, autocasts=True, scales=False, model='')
    """
    half = torch.float16
    if level is not None:
        return {
            "O0": Precision(device, None),
            "O1": Precision(device, half, autocasts=True, scales=True),
            "O2": Precision(device, half, scales=True, model="in calls"),
            "O3": Precision(device, half, model="for good"),
        }[level]
    chosen = DTYPES[dtype] or (torch.bfloat16 if _has_bf16(device) else half)
    return Precision(device, chosen, autocasts=True, scales=chosen is half)


def _has_bf16(device: str) -> bool:
    return device != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
