"""Private names of ``torch.cuda``: what the driver says before CUDA starts."""

from __future__ import annotations

import torch

__all__ = ["driver_device_count", "is_in_bad_fork"]


def driver_device_count() -> int:
    """How many GPUs the driver gives this process. The public ``torch.cuda.device_count()`` may ask NVML, which knows of others."""
    return torch._C._cuda_getDeviceCount()


def is_in_bad_fork() -> bool:
    """Whether this process was forked after CUDA has started, and cannot use it. Publicly that is an error at the first use."""
    return torch.cuda._is_in_bad_fork()
