"""The device and the backend of this rank: one visible GPU and nccl, or the CPU and gloo.

A process that sees a single GPU can run ``.cuda()``, ``"cuda:0"`` and ``if torch.cuda.device_count() > 1`` unchanged. So each rank's GPU is
chosen with ``CUDA_VISIBLE_DEVICES``, before CUDA starts: by parwrap's launcher, or by ranks that another launcher has started. If CUDA has
started already, torch's current device is set instead. So it is for other accelerators, which torch names with their backends.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from parwrap.errors import LaunchError, counted
from parwrap.places import warn
from parwrap.ranks.platform import FORKS
from parwrap.ranks.world import World
from parwrap.torch_private.cuda import count_without_driver, driver_device_count, is_in_bad_fork

__all__ = [
    "BACKEND",
    "accelerator",
    "choose_backend",
    "choose_device",
    "cores",
    "cuda_count",
    "cuda_devices",
    "cuda_has_started",
    "current_device",
    "current_stream",
    "drawing_module",
    "gpu_count",
    "has_bf16",
    "most_allocated",
    "nccl_version",
    "of_sharing",
    "on_device",
    "on_stream",
    "processor",
    "see_only",
    "to_host",
    "torch_backend",
    "uses_nccl",
    "visible_gpu",
    "visible_gpus",
]

BACKEND = "PARWRAP_BACKEND"
"""The variable with the backend of ranks that name none themselves. A launcher on one node sets it to gloo where ranks share GPUs."""

VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if torch.version.hip else ("CUDA_VISIBLE_DEVICES",)
"""The variables that name visible GPUs; the first one that is set counts. ``ROCR_VISIBLE_DEVICES`` stays: they count what it leaves."""

_given: str | None = None
"""The GPU that parwrap's launcher has given this rank."""


def of_sharing(ranks: int, gpus: int, option: str) -> str:
    """The message for ``ranks`` that share ``gpus`` although the user has not given the ``option`` for that.

    Raises:
        LaunchError: they are accelerators that ranks cannot share.
    """
    if kind := _other_accelerator():
        raise LaunchError(
            f"{ranks} ranks are more than the {counted(gpus, f'{kind} device')} of this node, and ranks cannot share them. Start at most "
            f"{counted(gpus, 'rank')} per node."
        )
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
    value = next((os.environ[name] for name in VISIBLE if name in os.environ), "")
    return [name.strip() for name in value.split(",") if name.strip()]


def _in_parts(names: list[str]) -> bool:
    """Whether ``names`` are instances of GPUs (MIG). CUDA shows a process only the first instance, and torch starts CUDA to count them."""
    return bool(names) and names[0].startswith("MIG-")


def gpu_count() -> int:
    """How many GPUs, instances of GPUs, or other accelerators ranks can have here.

    This does not start the driver here, as ``torch.cuda.is_available()`` does: the driver reads ``CUDA_VISIBLE_DEVICES`` only once.
    """
    if kind := _other_accelerator():
        return torch.get_device_module(kind).device_count()
    if cuda_has_started() or not torch.backends.cuda.is_built():
        return torch.cuda.device_count()
    names = _named()
    if _in_parts(names):
        return len(names)
    count = count_without_driver()
    return _count_by_driver() if count is None else count


def cuda_has_started() -> bool:
    """Whether torch has initialized CUDA in this process. The driver alone may have started before."""
    return torch.cuda.is_initialized()


def cuda_count() -> int:
    """How many GPUs torch sees in this process."""
    return torch.cuda.device_count()


def cuda_devices() -> tuple[list[tuple[str, int]], list[tuple[int, int]]]:
    """Start CUDA; the name and memory of each GPU, and the pairs that cannot read each other's memory."""
    torch.cuda.init()
    numbers = range(cuda_count())
    properties = [torch.cuda.get_device_properties(number) for number in numbers]
    apart = [(one, other) for one, other in combinations(numbers, 2) if not torch.cuda.can_device_access_peer(one, other)]
    return [(each.name, each.total_memory) for each in properties], apart


def nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread computes on ``device``."""
    return torch.get_device_module(device).current_stream(device)


def on_stream(device: torch.device, stream: Any) -> AbstractContextManager:
    """Compute on ``stream`` of ``device`` inside the block."""
    return torch.get_device_module(device).stream(stream)


def on_device(device: torch.device) -> AbstractContextManager:
    """Make an accelerator torch's current device inside the block; nothing for the CPU."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def drawing_module() -> Any:
    """Torch's module of the accelerator that has started in this process, if it has a random stream; otherwise ``None``."""
    if torch.cuda.is_initialized():
        return torch.cuda
    if (kind := _other_accelerator()) is None:
        return None
    module = torch.get_device_module(kind)
    draws = hasattr(module, "get_rng_state") and getattr(module, "is_initialized", lambda: True)()
    return module if draws else None


def accelerator() -> str | None:
    """The type of the accelerators that torch can use in this process, such as cuda or xpu; ``None`` without one."""
    return "cuda" if torch.cuda.is_available() else _other_accelerator()


def current_device() -> torch.device:
    """Torch's current accelerator, or the CPU without one: what a process computes on whose device parwrap has not chosen."""
    kind = accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind, torch.get_device_module(kind).current_device())


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
    """A copy of ``values`` on the host that is still on its way from an accelerator, and an event after which it is there."""
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.Event(values.device)
    event.record()
    return copied, event


def processor(device: torch.device) -> str:
    """What computes on ``device``: two kinds of it may round in two ways."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return name(device) if name else device.type


def has_bf16(kind: str) -> bool:
    """Whether devices of that ``kind`` compute in bfloat16 themselves, as far as torch says."""
    supported = getattr(torch.get_device_module(kind), "is_bf16_supported", None)
    return supported is None or supported(including_emulation=False)


def most_allocated(device: torch.device) -> int:
    """The most bytes that tensors have had on ``device``; 0 on the CPU, and where torch does not count them."""
    counts = None if device.type == "cpu" else getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return counts(device) if counts else 0


def _other_accelerator() -> str | None:
    """The type of the accelerators that torch can use here, such as xpu, hpu or npu, if it is not built for CUDA.

    Not mps: a machine has one, and gloo, the only backend there, cannot send what is on it. So several ranks train on the CPU.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type in ("cuda", "mps") or not torch.get_device_module(kind).is_available():
        return None
    return kind.type


def _other_device(kind: str, world: World) -> torch.device:
    """The accelerator of this rank, as torch's current device.

    Raises:
        LaunchError: the node has fewer than ranks.
    """
    count = gpu_count()
    # where a launcher shows each rank one device, that is its own
    mine = 0 if count == 1 and world.launcher != "torchrun" else world.local_rank
    if mine >= count:
        raise LaunchError(
            f"local rank {world.local_rank} has no {kind} device: this node has {count}, and ranks cannot share them. Start at most "
            f"{counted(count, 'rank')} per node."
        )
    torch.get_device_module(kind).set_device(mine)
    return torch.device(kind, mine)


def _count_by_driver() -> int:
    """How many GPUs the driver counts. It starts in a forked process only, unless it has started here."""
    if FORKS:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)  # the child only calls the driver
            child = os.fork()
        if not child:
            count = STARTED
            try:
                count = STARTED if is_in_bad_fork() else driver_device_count()
            finally:
                os._exit(count)
        count = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if 0 <= count < STARTED:
            return count
    return driver_device_count()


STARTED = 255
"""The exit code of a forked process that cannot use the driver, because it has started before the fork."""


def visible_gpus() -> list[str]:
    """The GPUs that ranks can have here, as ``CUDA_VISIBLE_DEVICES`` names them: by number, UUID, or instance of a GPU."""
    gpus = 0 if _other_accelerator() else gpu_count()
    return (_named() or [str(index) for index in range(gpus)])[:gpus]


def see_only(gpu: str) -> None:
    """Hide all GPUs but ``gpu`` from this rank, which parwrap's launcher has started, before anything starts CUDA here."""
    global _given
    _given = gpu
    _show(gpu)


def _show(gpus: str) -> None:
    os.environ.update(dict.fromkeys(VISIBLE, gpus))


def choose_device(world: World, backend: str | None) -> torch.device:
    """Choose the device that this rank trains on. Hide all other GPUs, unless CUDA or its driver has started already.

    If there are fewer GPUs than ranks, ranks share them. Ranks that torchrun or ``parwrap run`` starts do so only with the backend
    ``"gloo"``, because nccl does not support this.

    Raises:
        LaunchError: there are more ranks than GPUs, and the ranks cannot share them.
    """
    if _given is not None and _named() == [_given]:
        return torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")
    visible = visible_gpus()
    if not visible:
        other = _other_accelerator()
        return _other_device(other, world) if other else torch.device("cpu")
    # torchrun's ranks see all GPUs of the node; other launchers may show each rank its own (srun --gpus-per-task), and it takes one of them
    alone = world.launcher == "torchrun" and (backend or os.environ.get(BACKEND)) != "gloo"
    mine = world.local_rank if alone else world.local_rank % len(visible)
    gpu = visible_gpu(mine, visible)
    if not cuda_has_started():
        _show(gpu)
        if _in_parts(visible) and torch.cuda.device_count() == 0:
            _show(",".join(visible))
            return torch.device("cpu")
        if len(visible) == 1 or driver_device_count() == 1:  # not torch's count: the driver reads the variable only once
            return torch.device("cuda", 0)
        _show(",".join(visible))
    if len(visible) > 1:
        torch.cuda.set_device(mine)
        warn(
            "parwrap: CUDA was initialized before each rank chose its GPU, so 'cuda:0' in the script means the same GPU on every rank. "
            "Use CUDA only inside the decorated function (torch.cuda.is_available() initializes it too), or run with `parwrap run`."
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_backend(backend: str | None, device: torch.device) -> str:
    """``backend`` if given, or as the launcher says, otherwise torch's for the device: nccl for a GPU, gloo for the CPU, xccl for an XPU.

    >>> choose_backend(None, torch.device("cpu"))
    'gloo'
    """
    return backend or os.environ.get(BACKEND) or dist.Backend.default_device_backend_map.get(device.type, "gloo")


def torch_backend(backend: str) -> str:
    """Torch's name for ``backend``. nccl does not support CPU tensors, such as a model that was left on the CPU, so gloo handles these.

    >>> torch_backend("nccl"), torch_backend("xccl"), torch_backend("gloo")
    ('cpu:gloo,cuda:nccl', 'cpu:gloo,xpu:xccl', 'gloo')
    """
    kinds = [kind for kind, name in dist.Backend.default_device_backend_map.items() if name == backend != "gloo"]
    return ",".join(["cpu:gloo", *(f"{kind}:{backend}" for kind in kinds)]) if kinds else backend


def uses_nccl(process_group: dist.ProcessGroup | None = None) -> bool:
    """Whether nccl handles GPU tensors in ``process_group``; by default the group of all ranks."""
    return "cuda:nccl" in dist.get_backend_config(process_group)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
