"""What a requested dtype, or one of Apex's levels, means on a device, and errors for operations that the device lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from parwrap.errors import UsageError
from parwrap.ranks.device import has_bf16

__all__ = ["LEVELS", "Precision", "check", "choose", "missing_named"]

DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}
"""The values of the option ``dtype``, with the dtypes that they mean; ``None`` is chosen by the device."""

LEVELS = {
    "O0": "float32, without changes",
    "O1": "autocast to float16 with a dynamic loss scale",
    "O2": "a float16 model with float32 BatchNorm, float32 master weights and a dynamic loss scale",
    "O3": "a pure float16 model",
}
"""The values of the option ``level``, with their meanings."""


@dataclass(frozen=True)
class Precision:
    """What a requested dtype or level means on a device.

    Attributes:
        device: the type of device.
        dtype: the dtype to compute in; ``None`` leaves it to the script.
        autocasts: whether torch's autocast chooses the operations that compute in ``dtype``.
        scales: whether losses are scaled, and steps with non-finite gradients skipped.
        model: how a model is cast to ``dtype``. ``""``: not at all; ``"in calls"``: only during its calls, and its weights are unchanged;
            ``"for good"``: permanently.
    """

    device: str
    dtype: torch.dtype | None
    autocasts: bool = False
    scales: bool = False
    model: Literal["", "in calls", "for good"] = ""


def check(dtype: Any, level: str | None) -> None:
    """Raise :class:`UsageError` for unknown values, and for a dtype together with a level."""
    if level is not None and level not in LEVELS:
        raise UsageError(f"level={level!r} is not one of Apex's levels. {'; '.join(f'{name!r}: {each}' for name, each in LEVELS.items())}.")
    if dtype not in DTYPES:
        raise UsageError(
            f"dtype={dtype!r} is not a dtype for mixed precision: use 'bf16', 'fp16' or 'auto', which is bf16 on devices that support it "
            "and fp16 on others."
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
    chosen = DTYPES[dtype] or (torch.bfloat16 if has_bf16(device) else half)
    return Precision(device, chosen, autocasts=True, scales=chosen is half)


# operations that a device lacks

NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}

SAYING = [
    {dtype: text.replace("DTYPE", name) for dtype, name in NAMES.items()}
    for text in (
        r"\"(\w+)\" not implemented for 'DTYPE'",
        r"([\w.]+): Low precision dtypes not supported. Got DTYPE",
        r"could not create a primitive descriptor for (?:the|an?) (\w[\w ]*?) (?:forward|backward)",  # oneDNN does not name the dtype
    )
]
"""Patterns of torch's errors for an operation that is missing in a dtype, by dtype. Their group is the name of the operation."""

NUMPY = "Got unsupported ScalarType BFloat16"
"""A part of torch's error when the script calls ``numpy()`` on a bfloat16 tensor."""


@contextmanager
def missing_named(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the block, turn an error for an operation that ``device``, or NumPy, lacks in ``dtype`` into a :class:`UsageError`."""
    try:
        yield
    except TypeError as error:
        if dtype is not torch.bfloat16 or NUMPY not in str(error):
            raise
        raise UsageError(
            "NumPy has no bfloat16, the dtype of outputs under parwrap.amp: write .float().numpy() instead of .numpy()."
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        operation = dtype is not None and next((match[1] for each in SAYING if (match := re.search(each[dtype], str(error)))), "")
        if not operation:
            raise
        instead = "use parwrap.amp(dtype='bf16'), or" if dtype is torch.float16 else "remove parwrap.amp, or"
        raise UsageError(
            f"{operation} does not exist for {str(dtype).removeprefix('torch.')} on {device}: {instead} pass it float32 tensors in `with "
            "parwrap.amp(level='O0'):`."
        ) from error
