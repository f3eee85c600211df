"""The device and the backend of this rank: one visible GPU each and nccl, or the CPU and gloo.

A process that sees a single GPU can run ``.cuda()``, ``"cuda:0"`` and ``if torch.cuda.device_count() > 1`` unchanged, so
the choice is made through ``CUDA_VISIBLE_DEVICES``, before CUDA starts.
"""

from __future__ import annotations

import os
import warnings

import torch

from parwrap.errors import LaunchError
from parwrap.world import World

__all__ = ["choose_backend", "choose_device", "cores", "visible_gpu"]


def visible_gpu(local_rank: int, visible: list[str]) -> str:
    """Which of the ``visible`` GPUs a rank may see.

    Raises:
        LaunchError: the node has more ranks than GPUs.

    >>> visible_gpu(1, ["0", "3"])
    '3'
    """
    if local_rank >= len(visible):
        raise LaunchError(
            f"local rank {local_rank} has no GPU of its own: {len(visible)} visible ({', '.join(visible)}). "
            f"Start at most {len(visible)} ranks a node, or pass backend='gloo' to train on the CPU or to share GPUs."
        )
    return visible[local_rank]


def choose_device(world: World, backend: str | None) -> torch.device:
    """The device that this rank trains on; leaves it one visible GPU where there are any.

    A backend asked for as ``"gloo"`` may share GPUs, so nothing is hidden then.
    """
    gpus = torch.cuda.device_count()  # not is_available(), which starts the driver: it would not look at the variable again
    if gpus == 0:
        return torch.device("cpu")
    if backend == "gloo":
        return torch.device("cuda", world.local_rank % gpus)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(index) for index in range(gpus)]
    # torchrun's ranks see all GPUs of the node; other launchers may have given each its own (srun --gpus-per-task), of which it takes one
    mine = world.local_rank if world.launcher == "torchrun" else world.local_rank % len(visible)
    gpu = visible_gpu(mine, visible)
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        return torch.device("cuda", 0)
    if len(visible) > 1:
        torch.cuda.set_device(mine)
        warnings.warn(
            "parwrap: CUDA had started before the ranks were told apart, so 'cuda:0' written in the script means the same GPU "
            "on every rank. Start CUDA inside the decorated function, or run with `python -m parwrap.run`.",
            stacklevel=2,
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_backend(backend: str | None, device: torch.device) -> str:
    """``backend`` if it is given, else nccl for a GPU and gloo for the CPU.

    >>> choose_backend(None, torch.device("cpu"))
    'gloo'
    """
    return backend or ("nccl" if device.type == "cuda" else "gloo")


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
