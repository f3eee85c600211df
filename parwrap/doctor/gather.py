"""Collects facts of this process and its machine, without judging them. CUDA is started only in a child process.

Unknown or missing facts are ``None`` or empty.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import numpy
import torch

from parwrap import __version__
from parwrap.doctor.facts import Cores, Facts, Launch, Limits, Memory, Versions
from parwrap.doctor.gpus import find_gpus
from parwrap.doctor.network import find_network
from parwrap.errors import LaunchError
from parwrap.group.device import choose_backend, cores, visible_gpu
from parwrap.world.world import World, detect, launch_variables

__all__ = ["gather", "place"]

EXTRAS = ("cloudpickle", "datasets", "torchdata", "nvidia-dali-cuda120", "PyYAML", "ray")
"""Optional packages that parwrap works with."""


def place(environ: Mapping[str, str]) -> tuple[World, str | None]:
    """This process's place, or why it cannot be determined."""
    try:
        return detect(environ), None
    except LaunchError as error:
        return World(), str(error)


def gather(environ: Mapping[str, str], backend: str | None = None) -> Facts:
    """The facts.

    Args:
        environ: the environment variables.
        backend: the requested backend, if any.
    """
    world, error = place(environ)
    told = [*launch_variables(), "MASTER_ADDR", "MASTER_PORT"]
    gpus = find_gpus(environ)
    device, device_error = "cuda" if gpus.seen else "cpu", None
    if gpus.seen and backend != "gloo" and world.launcher == "torchrun":  # other launchers may give each rank separate GPUs
        try:
            visible_gpu(world.local_rank, [str(number) for number in range(len(gpus.seen))])
        except LaunchError as missing:
            device_error = str(missing)
    if world.launcher == "torchrun" and multiprocessing.parent_process():
        world = replace(world, launcher="parwrap.run")  # the variables are the same, but torchrun names the launcher
    return Facts(
        host=socket.gethostname(),
        launch=Launch(**asdict(world), variables={name: environ[name] for name in told if name in environ}, error=error),
        versions=_versions(),
        cores=_cores(),
        memory=_memory(),
        limits=_limits(),
        gpus=gpus,
        network=find_network(environ),
        backend=choose_backend(backend, torch.device(device)),
        device=device,
        device_error=device_error,
    )


def _versions() -> Versions:
    hip = getattr(torch.version, "hip", None)
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Versions(
        python=platform.python_version(),
        parwrap=__version__,
        torch=torch.__version__,
        cuda=f"rocm {hip}" if hip else torch.version.cuda,
        nccl=nccl,
        numpy=numpy.__version__,
        wrapt=_installed("wrapt"),
        extras={name: _installed(name) for name in EXTRAS},
    )


def _installed(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _cores() -> Cores:
    return Cores(os.cpu_count() or 1, cores(), _quota(), torch.get_num_threads())


def _quota() -> float | None:
    limits = [" ".join(both) for both in zip(_cgroups("cpu", "cpu.cfs_quota_us"), _cgroups("cpu", "cpu.cfs_period_us"), strict=False)]
    told = [re.fullmatch(r"(\d+) (\d+)", limit) for limit in [*limits, *_cgroups("cpu", "cpu.max")]]  # versions 1 and 2 of cgroups
    return min((int(limit[1]) / int(limit[2]) for limit in told if limit), default=None)


def _memory() -> Memory:
    told = dict(re.findall(r"^(\w+): +(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE))
    total, available = (int(told[name]) * 1024 if name in told else None for name in ("MemTotal", "MemAvailable"))
    limits = [*_cgroups("memory", "memory.max"), *_cgroups("memory", "memory.limit_in_bytes")]
    limit = min((int(limit) for limit in limits if limit.isdecimal()), default=None)
    limited = limit is not None and (total is None or limit < total)
    shared = shared_free = None
    with suppress(OSError):
        system = os.statvfs("/dev/shm")
        shared, shared_free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return Memory(total, available, limit if limited else None, shared, shared_free)


def _cgroups(controller: str, name: str) -> list[str]:
    """The files ``name`` of this process's cgroup and its parents, each of which limits it; in a container, of the container."""
    texts = []
    for controllers, path in re.findall(r"^\d+:(.*?):/(.*)", _read(Path("/proc/self/cgroup")), re.MULTILINE):
        if controllers == "" or controller in controllers.split(","):
            for root in (Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")):
                folders = [root.joinpath(*Path(path).parts[:depth]) for depth in range(len(Path(path).parts) + 1)]
                texts += [_read(folder / name) for folder in folders]
    return texts


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _limits() -> Limits:
    def limit(which: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(which)
        return tuple(None if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]

    return Limits(*limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_MEMLOCK)[0])
