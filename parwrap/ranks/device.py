"""The device and the backend of this rank: one visible GPU and nccl, or the CPU and gloo.

A process that sees a single GPU can run ``.cuda()``, ``"cuda:0"`` and ``if torch.cuda.device_count() > 1`` unchanged, so each rank's GPU is
chosen with ``CUDA_VISIBLE_DEVICES``, before CUDA is initialized. If CUDA is already initialized, torch's current device is set instead.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from parwrap.errors import LaunchError, counted
from parwrap.places import warn
from parwrap.ranks.world import World
from parwrap.torch_private.cuda import driver_device_count

__all__ = ["BACKEND", "choose_backend", "choose_device", "cores", "gpu_count", "of_sharing", "torch_backend", "uses_nccl", "visible_gpu"]

BACKEND = "PARWRAP_BACKEND"
"""The variable with the backend of ranks that name none themselves. A launcher on one node sets it to gloo where ranks share GPUs."""


def of_sharing(ranks: int, gpus: int, option: str) -> str:
    """The message for ``ranks`` that share ``gpus`` although the user has not given the ``option`` for that."""
    return (
        f"{ranks} ranks share {counted(gpus, 'GPU')} over gloo, because nccl needs a GPU for each. This shows what {ranks} ranks "
        f"train, but is no faster than {counted(gpus, 'rank')}. Add {option} to hide this message."
    )


def visible_gpu(local_rank: int, visible: list[str]) -> str:
    """Which of the ``visible`` GPUs the rank with the number ``local_rank`` on its node may see.

    Raises:
        LaunchError: the node has more ranks than GPUs.

    >>> visible_gpu(1, ["0", "3"])
    '3'
    """
    if local_rank >= len(visible):
        raise LaunchError(
            f"local rank {local_rank} has no GPU: the ranks of this node see only {counted(len(visible), 'GPU')} ({', '.join(visible)}). "
            f"Start at most {counted(len(visible), 'rank')} per node, or pass backend='gloo' (--backend gloo) to share GPUs."
        )
    return visible[local_rank]


def _named() -> list[str]:
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def _in_parts(names: list[str]) -> bool:
    """Whether ``names`` are instances of GPUs (MIG). CUDA shows a process only the first instance, and torch starts CUDA to count them."""
    return bool(names) and names[0].startswith("MIG-")


def gpu_count() -> int:
    """How many GPUs, or instances of GPUs, ranks can have here.

    This does not call ``torch.cuda.is_available()``, which starts the driver: the driver reads ``CUDA_VISIBLE_DEVICES`` only once.
    """
    names = _named()
    return len(names) if _in_parts(names) and torch.backends.cuda.is_built() else torch.cuda.device_count()


def choose_device(world: World, backend: str | None) -> torch.device:
    """Choose the device that this rank trains on. Hide all other GPUs, unless CUDA or its driver has started already.

    If there are fewer GPUs than ranks, ranks share them. Ranks that torchrun or ``parwrap.run`` starts do so only with the backend
    ``"gloo"``, because nccl does not support this.

    Raises:
        LaunchError: there are more ranks than GPUs, and the ranks cannot share them.
    """
    gpus, names = gpu_count(), _named()
    if gpus == 0:
        return torch.device("cpu")
    visible = (names or [str(index) for index in range(gpus)])[:gpus]
    # torchrun's ranks see all GPUs of the node; other launchers may show each rank its own (srun --gpus-per-task), and it takes one of them
    alone = world.launcher == "torchrun" and (backend or os.environ.get(BACKEND)) != "gloo"
    mine = world.local_rank if alone else world.local_rank % len(visible)
    gpu = visible_gpu(mine, visible)
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        if _in_parts(names) and torch.cuda.device_count() == 0:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            return torch.device("cpu")
        if len(visible) == 1 or driver_device_count() == 1:  # not torch's count: the driver reads the variable only once
            return torch.device("cuda", 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    if len(visible) > 1:
        torch.cuda.set_device(mine)
        warn(
            "parwrap: CUDA was initialized before each rank chose its GPU, so 'cuda:0' in the script means the same GPU on every rank. "
            "Use CUDA only inside the decorated function (torch.cuda.is_available() initializes it too), or run with `python -m "
            "parwrap.run`."
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_backend(backend: str | None, device: torch.device) -> str:
    """``backend`` if given, or as the launcher says, otherwise nccl for a GPU and gloo for the CPU.

    >>> choose_backend(None, torch.device("cpu"))
    'gloo'
    """
    return backend or os.environ.get(BACKEND) or ("nccl" if device.type == "cuda" else "gloo")


def torch_backend(backend: str) -> str:
    """Torch's name for ``backend``. nccl does not support CPU tensors, such as a model that was left on the CPU, so gloo handles these.

    >>> torch_backend("nccl")
    'cpu:gloo,cuda:nccl'
    """
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def uses_nccl(process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether nccl handles GPU tensors in ``process_group``; by default the group of all ranks."""
    return "cuda:nccl" in dist.get_backend_config(process_group)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
