"""Adds a note to an error that a fixed batch size in the code may have caused, where each rank has a part of every batch."""

from __future__ import annotations

import linecache
import re

from parwrap.loop.batch_weights import Weighed
from parwrap.system.remote_exception import in_one_line

__all__ = ["note_fixed_size"]

OF_SHAPES = re.compile(r"shape|size|dimension|batch|unpack", re.IGNORECASE)
OF_SHAPE_ASSERTIONS = re.compile(r"\bassert\b.*(shape|size|len\(|batch)", re.IGNORECASE)
START = "parwrap: with batch='global' this rank had"


def note_fixed_size(error: BaseException, batch: Weighed, size: int) -> None:
    """Note on ``error`` how many samples of ``batch`` this rank had, if it is about shapes and there are ``size`` ranks.

    >>> error = RuntimeError("shape '[32, -1]' is invalid for input of size 16")
    >>> note_fixed_size(error, Weighed(1.0, samples=16, split=True), size=2)
    >>> "this rank had 16 of the 32 samples of a batch" in str(getattr(error, "__notes__", error))
    True
    """
    if not (batch.split and size > 1 and _is_of_shapes(error)) or START in str(getattr(error, "__notes__", error)):
        return
    part = f"{batch.samples} of the {round(batch.samples * size / batch.weight)} samples of a batch" if batch.weight else "none of a batch"
    text = f"{START} {part}. If a batch size is fixed in the code, read it from the tensors (x.shape[0]), or try batch='per_rank'."
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        error.args = (f"{error}\n{text}", *error.args[1:])


def _is_of_shapes(error: BaseException) -> bool:
    if isinstance(error, AssertionError) and (trace := error.__traceback__):
        while trace.tb_next:
            trace = trace.tb_next
        return bool(OF_SHAPE_ASSERTIONS.search(linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)))
    return isinstance(error, (RuntimeError, ValueError, IndexError)) and bool(OF_SHAPES.search(in_one_line(error)))
