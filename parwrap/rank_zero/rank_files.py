"""What the interceptors of rank 0's files and of a replica's have in common.

``writer_files.py`` and ``replica_files.py`` decide what happens to a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.rank_zero.path_rules import PathRules

__all__ = ["RankFiles"]


class RankFiles(Interceptor):
    """Intercepts files of one rank.

    Args:
        rules: which paths are concerned.
        finish: called with the key of each file that was written and has been closed.
    """

    def __init__(self, rules: PathRules, finish: Callable[[str], None]) -> None:
        self._rules, self._when_closed = rules, finish
        self._descriptors: dict[int, str] = {}

    @intercepts
    def load(self, location: Any, read: Callable[[Any], Any]) -> Any:
        """``torch.load``, which opens its file with ``open``; the weights go to this rank's own device."""
        return read(_on_own_gpu(location))

    @intercepts
    def close_descriptor(self, original: Callable, descriptor: int) -> None:
        """``os.close``."""
        key = self._descriptors.pop(descriptor, None)
        original(descriptor)
        if key is not None:
            self._finish(key)

    @intercepts
    def temporary_name(self, name: str) -> str:
        """The random part of a temporary file's name."""
        return self._rules.temporary_name(name)

    def _finish(self, key: str) -> None:
        if self._rules.open and self._rules.in_process():
            self._when_closed(key)


def _on_own_gpu(location: Any) -> Any:
    """The ``map_location`` that loads onto this rank's GPU, whichever GPU ``location`` names or the file was saved on."""
    if not torch.cuda.is_available():
        return location
    if location is None:
        return lambda storage, saved_from: storage.cuda() if saved_from.startswith("cuda") else storage
    return "cuda" if str(location).startswith("cuda") else location
