"""A script that distributes itself: call ``Interceptor.foreign`` before its ``init_process_group`` or ``DistributedDataParallel`` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def init_process_group(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.foreign(wrapped.__name__, None)
        wrapped(*args, **kwargs)

    def init(wrapped: Callable, instance: DistributedDataParallel, args: tuple, kwargs: dict) -> None:
        interceptor.foreign("DistributedDataParallel", instance)
        wrapped(*args, **kwargs)

    return [Patch(dist, "init_process_group", init_process_group), Patch(DistributedDataParallel, "__init__", init)]
