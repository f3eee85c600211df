"""``nn.DataParallel(module, device_ids, output_device)``: let ``Interceptor.data_parallel`` choose the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def init(wrapped: Callable, instance: nn.DataParallel, args: tuple, kwargs: dict) -> None:
        def with_devices(module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
            interceptor.data_parallel(instance, module, lambda devices: wrapped(module, device_ids=devices, dim=dim))

        with_devices(*args, **kwargs)

    return [Patch(nn.DataParallel, "__init__", init)]
