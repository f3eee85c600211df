"""Private names of ``torch.cuda``: how many GPUs there are, and whether a fork has made CUDA unusable in this process."""

from __future__ import annotations

import torch

from parwrap.torch_private.versions import private

__all__ = ["count_without_driver", "driver_device_count", "is_in_bad_fork"]


def count_without_driver() -> int | None:
    """How many GPUs NVML, or AMD SMI, gives this process, without starting CUDA's driver; ``None`` if it cannot say.

    The public ``torch.cuda.device_count()`` starts the driver then, as in containers without NVML.
    """
    library = "amdsmi" if torch.version.hip else "nvml"
    count = private(f"torch.cuda._device_count_{library}")()
    return None if count < 0 else count


def driver_device_count() -> int:
    """How many GPUs the driver gives this process. The public ``torch.cuda.device_count()`` may ask NVML, which may count other GPUs."""
    return torch._C._cuda_getDeviceCount()


def is_in_bad_fork() -> bool:
    """Whether this process was forked after CUDA has started, and cannot use it. Publicly, only the first use raises an error."""
    return torch.cuda._is_in_bad_fork()
