"""``@distributed``: run a plain training function on every rank of the launch. (Skeleton: opens the process group only.)"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parwrap.options import Options
from parwrap.ranks import group as groups
from parwrap.ranks.world import detect

__all__ = ["script_scope"]


@contextmanager
def script_scope(**options: Any) -> Iterator[None]:
    """The scope for a whole plain script; see :class:`distributed` for the options."""
    chosen = Options(**options)
    with groups.opened(detect(os.environ), chosen.backend, chosen.patience):
        yield
