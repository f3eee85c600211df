"""Adds the name of the operation and advice to errors of operations that do not exist in half precision, on a device or in NumPy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parwrap.errors import UsageError

__all__ = ["named"]

NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}

SAYING = [
    {dtype: text.replace("DTYPE", name) for dtype, name in NAMES.items()}
    for text in (r"\"(\w+)\" not implemented for 'DTYPE'", r"([\w.]+): Low precision dtypes not supported. Got DTYPE")
]
"""Torch's error messages for a missing operation, by dtype."""


NUMPY = "Got unsupported ScalarType BFloat16"
"""The message of ``tensor.numpy()``."""


@contextmanager
def named(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Raise :class:`UsageError` for an operation that ``device``, or NumPy, lacks in ``dtype``."""
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
