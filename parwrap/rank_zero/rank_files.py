"""The base class of the interceptors of rank 0's files and of a replica's files.

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
    """Intercepts the file access of one rank.

    Args:
        rules: the rules for which paths are intercepted.
        finish: a function, called with the key of each written file when it is closed.
    """

    def __init__(self, rules: PathRules, finish: Callable[[str], None]) -> None:
        self._rules, self._when_closed = rules, finish
        self._descriptors: dict[int, str] = {}

    @intercepts
    def load(self, location: Any, read: Callable[[Any], Any]) -> Any:
        """``torch.load``: loads GPU tensors onto this rank's own GPU; the file itself is intercepted by ``open``."""
        return read(_on_own_gpu(location))

    @intercepts
    def close_descriptor(self, original: Callable, descriptor: int) -> None:
        """``os.close``: reports a file that was written."""
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
