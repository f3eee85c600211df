"""Saves a checkpoint completely or not at all, and chooses the device for ``torch.load``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from parwrap.rank_zero.file_versions import PART

__all__ = ["on_own_gpu", "write_atomically"]


def write_atomically(path: str, write: Callable[[Any], Any]) -> Any:
    """Call ``write`` with a temporary path of the same name, whose stem torch puts into the archive, and rename the file to ``path``."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        return write(path)  # a device or a pipe cannot be replaced by a rename
    folder, name = os.path.split(path)
    temporary = None
    with suppress(OSError):
        temporary = tempfile.mkdtemp(prefix=PART, dir=folder)
    if temporary is None:
        return write(path)  # a writable file may be in a read-only folder; otherwise torch reports the error
    try:
        result = write(os.path.join(temporary, name))
        os.replace(os.path.join(temporary, name), path)
        return result
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def on_own_gpu(location: Any) -> Any:
    """The ``map_location`` that loads onto this rank's GPU, whichever GPU ``location`` names or the file was saved on."""
    if not torch.cuda.is_available():
        return location
    if location is None:
        return lambda storage, saved_from: storage.cuda() if saved_from.startswith("cuda") else storage
    return "cuda" if str(location).startswith("cuda") else location
