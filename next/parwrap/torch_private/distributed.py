"""Private names of process groups, device meshes and ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "abort_process_groups",
    "check_reducer_finalized",
    "collective_count",
    "forget_process_groups",
    "has_rebuilt_buckets",
    "set_default_group",
]

collective_count: Callable[[dist.ProcessGroup | None], int] = methodcaller("_get_sequence_number_for_group")
"""The number of collectives that this rank has begun in a process group. Nothing public counts them."""

abort_process_groups: Callable[[], None] = dist.distributed_c10d._abort_process_group
"""Ends all process groups without waiting for running collectives. Publicly, NCCL waits for ranks that may never come."""

set_default_group: Callable[[dist.ProcessGroup | None], None] = dist.distributed_c10d._update_default_pg
"""Sets the process group that collectives run in by default. Publicly, that is always the group of all ranks."""

has_rebuilt_buckets: Callable[[DistributedDataParallel], bool] = attrgetter("_has_rebuilt_buckets")
"""Whether DDP has put its buckets into the order of the first backward; after that, its forward only arms the reducer. Not public."""

check_reducer_finalized: Callable[[Any], None] = methodcaller("_check_reducer_finalized")
"""Raises ``RuntimeError`` if a parameter of a DDP's ``reducer`` took no part in the last backward. DDP checks only in the next forward."""


def forget_process_groups(mesh: Any) -> None:
    """Drop the process groups that a mesh and its root hold, which torch caches forever. Publicly, a mesh cannot be closed."""
    mesh._get_root_mesh()._pg_registry.clear()
    mesh._pg_registry.clear()
