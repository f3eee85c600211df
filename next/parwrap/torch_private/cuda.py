"""Private names of ``torch.cuda``: what the driver reports before CUDA starts."""

from __future__ import annotations

import torch

__all__ = ["driver_device_count"]


def driver_device_count() -> int:
    """How many GPUs the driver gives this process. The public ``torch.cuda.device_count()`` may ask NVML, which may count other GPUs."""
    return torch._C._cuda_getDeviceCount()
