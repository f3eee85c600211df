"""Collects facts about this process and its machine, without judging them. CUDA is initialized only in a child process.

Unknown or missing facts are ``None`` or empty.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch

from parwrap import __version__
from parwrap.doctor.facts import Cores, Facts, Gpu, Gpus, Launch, Limits, Memory, Network, Versions
from parwrap.errors import LaunchError
from parwrap.ranks.device import choose_backend, cores, cuda_devices, nccl_version, visible_gpu
from parwrap.ranks.network import interface_of, interfaces
from parwrap.ranks.platform import FORKS
from parwrap.ranks.store import SECRET
from parwrap.ranks.world import World, detect, launch_variables

__all__ = ["find_gpus", "find_network", "gather", "place"]

EXTRAS = ("torchdata", "torchmetrics", "pytest", "PyYAML", "ray")
"""Optional packages that parwrap works with."""


DRIVER_TIMEOUT = 30
"""Seconds to wait for an answer of the GPU driver."""


def place(environ: Mapping[str, str]) -> tuple[World, str | None]:
    """The :class:`World` of this process and ``None``; if the ranks cannot be identified, a default and the reason."""
    try:
        return detect(environ), None
    except LaunchError as error:
        return World(), str(error)


def gather(environ: Mapping[str, str], backend: str | None = None) -> Facts:
    """Collect the facts about this process and its machine.

    Args:
        environ: the environment variables.
        backend: the requested backend, if any.
    """
    world, error = place(environ)
    names = launch_variables()
    gpus = find_gpus(environ)
    device, device_error = "cuda" if gpus.seen else "cpu", None
    if gpus.seen and backend != "gloo" and world.launcher == "torchrun":  # other launchers may give each rank separate GPUs
        try:
            visible_gpu(world.local_rank, [str(number) for number in range(len(gpus.seen))])
        except LaunchError as missing:
            device_error = str(missing)
    if world.launcher == "torchrun" and multiprocessing.parent_process():
        world = replace(world, launcher="parwrap run")  # the variables are the same, but torchrun names the launcher
    return Facts(
        host=socket.gethostname(),
        launch=Launch(
            **asdict(world),
            variables={name: environ[name] for name in names if name in environ},
            error=error,
            secret=bool(environ.get(SECRET)),
        ),
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
        nccl = nccl_version()
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
    matches = [re.fullmatch(r"(\d+) (\d+)", limit) for limit in [*limits, *_cgroups("cpu", "cpu.max")]]  # versions 1 and 2 of cgroups
    return min((int(limit[1]) / int(limit[2]) for limit in matches if limit), default=None)


def _memory() -> Memory:
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE))
    total, available = (int(sizes[name]) * 1024 if name in sizes else None for name in ("MemTotal", "MemAvailable"))
    limits = [*_cgroups("memory", "memory.max"), *_cgroups("memory", "memory.limit_in_bytes")]
    limit = min((int(limit) for limit in limits if limit.isdecimal()), default=None)
    limited = limit is not None and (total is None or limit < total)
    shared = shared_free = None
    with suppress(OSError, AttributeError):  # not Linux
        system = os.statvfs("/dev/shm")
        shared, shared_free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return Memory(total, available, limit if limited else None, shared, shared_free)


def _cgroups(controller: str, name: str) -> list[str]:
    """The text of the file ``name`` of this process's cgroup and of each cgroup above it; empty where the file is missing.

    Each of these cgroups limits this process. In a container, they are the container's cgroups.
    """
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
    try:
        import resource
    except ImportError:  # Windows
        return Limits()

    def limit(which: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(which)
        return tuple(None if value == resource.RLIM_INFINITY else value for value in (soft, hard))  # type: ignore[return-value]

    return Limits(*limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_MEMLOCK)[0])


def find_gpus(environ: Mapping[str, str]) -> Gpus:
    """The GPUs that torch would see in this process; ``environ`` only says which value of ``CUDA_VISIBLE_DEVICES`` to report.

    A separate process asks torch. CUDA may hang, and it must not be initialized in a process that will fork or hide GPUs.
    """
    answer: dict[str, Any] = {}
    if torch.version.cuda or getattr(torch.version, "hip", None):
        answer = _ask_torch()
    return Gpus(
        **answer,
        present=_is_present(),
        driver=_driver(),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        topology=_topology() if len(answer.get("seen", [])) > 1 else None,
    )


def _ask_torch() -> dict[str, Any]:
    """What torch says of the GPUs, asked in a child process: the fields ``seen`` and ``apart`` of :class:`Gpus`, or ``error``."""
    context: Any = multiprocessing.get_context("fork" if FORKS else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs,), daemon=True)
    with theirs:
        process.start()
    try:
        if not ours.poll(DRIVER_TIMEOUT):
            return {"error": f"the driver did not answer within {DRIVER_TIMEOUT} s"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"error": f"the process that started CUDA ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join(1)
        ours.close()


def _answer(connection: Connection) -> None:
    try:
        seen, apart = cuda_devices()
        connection.send({"seen": [Gpu(*each) for each in seen], "apart": apart})
    except Exception as error:
        connection.send({"error": str(error).strip().partition("\n")[0]})


def _is_present() -> bool:
    """Whether an NVIDIA display controller is on the bus."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            if (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return True
    return False


def _driver() -> str | None:
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else "of an unknown version"
    return None


def _topology() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=DRIVER_TIMEOUT, check=True)
        return re.sub(r"\x1b\[\d*m", "", shown.stdout).partition("\n\nLegend")[0].strip("\n")  # underlined in a terminal
    return None


def find_network(environ: Mapping[str, str]) -> Network:
    """The network, with ``environ`` for the environment variables.

    gloo listens on the interface that ``GLOO_SOCKET_IFNAME`` names. Otherwise, it listens on the first address that the host's own name
    resolves to and that this machine can bind; otherwise on the loopback interface, which other machines cannot reach (see torch's
    ``ProcessGroupGloo.cpp``).
    """
    known = interfaces()
    addresses = _addresses(socket.gethostname())
    gloo = environ.get("GLOO_SOCKET_IFNAME")
    interface: str | None
    if gloo:
        interface = gloo.split(",")[0]
        address = next(iter(known.get(interface, [])), None)
    else:
        address = next((address for address in addresses if _can_bind(address)), None)
        interface = interface_of(address) if address else None
    return Network(
        addresses=addresses,
        interfaces=known,
        infiniband=sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        gloo=gloo,
        nccl=environ.get("NCCL_SOCKET_IFNAME"),
        address=address,
        interface=interface,
    )


def _addresses(host: str) -> list[str]:
    with suppress(OSError, UnicodeError):  # the latter for a name that no name server could have
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))
    return []


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        return True
    return False
