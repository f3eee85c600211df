"""How a checkpoint is written whole or not at all, and where ``torch.load`` puts it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from parwrap.rank_zero.file_versions import PART

__all__ = ["on_own_gpu", "write_beside"]


def write_beside(path: str, write: Callable[[Any], Any]) -> Any:
    """Have ``write`` write a file of the same name, whose stem torch puts into the archive, and rename that to ``path``."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        return write(path)  # a device or a pipe cannot be renamed over
    folder, name = os.path.split(path)
    beside = None
    with suppress(OSError):
        beside = tempfile.mkdtemp(prefix=PART, dir=folder)
    if beside is None:
        return write(path)  # a folder in which nothing can be made may have a file that can be written, and else torch says what is wrong
    try:
        result = write(os.path.join(beside, name))
        os.replace(os.path.join(beside, name), path)
        return result
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def on_own_gpu(location: Any) -> Any:
    """``map_location`` for a rank that sees one GPU, whichever ``location`` names or the file was saved from."""
    if not torch.cuda.is_available():
        return location
    if location is None:
        return lambda storage, saved_from: storage.cuda() if saved_from.startswith("cuda") else storage
    return "cuda" if str(location).startswith("cuda") else location
