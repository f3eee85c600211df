"""Errors of operations that a device does not have in half precision: named, with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parwrap.errors import UsageError

__all__ = ["named"]

NAMES = {"Half": torch.float16, "BFloat16": torch.bfloat16}


@contextmanager
def named(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Raise :class:`UsageError` for an operation that ``device`` does not have in ``dtype``."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        missing = re.search(r"""["'](\w+)["'] not implemented for ['"](\w+)['"]""", str(error))
        if missing is None or NAMES.get(missing[2]) is not dtype or dtype is None:
            raise
        instead = "parwrap.amp(dtype='bf16') has more of them" if dtype is torch.float16 else "leave parwrap.amp away"
        raise UsageError(
            f"{missing[1]} is not there for {str(dtype).removeprefix('torch.')} on {device}: {instead}, and a part of the script "
            "computes in float32 in `with parwrap.amp(level='O0'):`."
        ) from error
