"""Private names of ``torch.cuda``: how many GPUs the driver gives this process, and whether a fork has made CUDA unusable in it."""

from __future__ import annotations

import torch

__all__ = ["driver_device_count", "is_in_bad_fork"]


def driver_device_count() -> int:
    """How many GPUs the driver gives this process. The public ``torch.cuda.device_count()`` may ask NVML, which may count other GPUs."""
    return torch._C._cuda_getDeviceCount()


def is_in_bad_fork() -> bool:
    """Whether this process was forked after CUDA has started, and cannot use it. Publicly, only the first use raises an error."""
    return torch.cuda._is_in_bad_fork()
