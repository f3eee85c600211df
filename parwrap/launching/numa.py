"""Which cores are near the GPU of each rank, by what Linux says of the machine.

Nothing here starts CUDA. Torch's ``--numa-binding`` asks CUDA for the GPUs' places, in ranks that have not hidden the other GPUs yet. The
modes are torch's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["MODES", "bind", "cores_near", "has_several_nodes"]

ROOT = Path("/")
"""Where the system's files are."""

NODES, CORES = "sys/devices/system/node", "sys/devices/system/cpu"


def has_several_nodes() -> bool:
    """Whether this machine has several NUMA nodes, as machines with two sockets do."""
    with suppress(OSError):  # not Linux
        return len(_numbers(ROOT / NODES / "online")) > 1
    return False


def cores_near(gpus: Sequence[str], mode: str) -> list[set[int]]:
    """The cores for the rank on each of ``gpus``, among those that this process may use.

    Args:
        gpus: the GPUs as ``CUDA_VISIBLE_DEVICES`` names them.
        mode: one of :data:`MODES`.

    Raises:
        OSError: the system does not say where they are.
        LookupError: a GPU cannot be found, or no core near it may be used.
    """
    nodes = [_node_of(address) for address in _addresses(gpus)]
    allowed = os.sched_getaffinity(0)
    found = []
    for index, node in enumerate(nodes):
        peers = [number for number, other in enumerate(nodes) if other == node]
        cores = MODES[mode](_numbers(ROOT / NODES / f"node{node}/cpulist"), allowed, peers.index(index), len(peers))
        if not cores:
            raise LookupError(f"this process may use no core of NUMA node {node}, where GPU {gpus[index]} is")
        found.append(cores)
    return found


def bind(cores: set[int]) -> None:
    """Let all threads of this process run on ``cores`` only, as far as the system allows it; threads that start later do too."""
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            os.sched_setaffinity(thread, cores)
        except OSError:  # the thread has ended, or the system has taken cores away
            continue


def _node(node: set[int], allowed: set[int], index: int, gpus: int) -> set[int]:
    return node & allowed


def _socket(node: set[int], allowed: set[int], index: int, gpus: int) -> set[int]:
    """The cores of all NUMA nodes of the socket."""

    def socket_of(core: int) -> str:
        return (ROOT / CORES / f"cpu{core}/topology/physical_package_id").read_text()

    mine = socket_of(min(node))
    return {core for core in allowed if socket_of(core) == mine}


def _exclusive(node: set[int], allowed: set[int], index: int, gpus: int) -> set[int]:
    """A part of the node's physical cores for each of its GPUs; the first GPUs get those that are left over."""
    physical = _grouped(node & allowed, lambda core: ROOT / CORES / f"cpu{core}/topology/thread_siblings_list")
    each, more = divmod(len(physical), gpus)
    begin, end = (number * each + min(number, more) for number in (index, index + 1))
    return set().union(*physical[begin:end])


def _core_complex(node: set[int], allowed: set[int], index: int, gpus: int) -> set[int]:
    """The cores that share one cache of the last level; the largest such groups first."""

    def last_cache(core: int) -> Path:
        caches = (ROOT / CORES / f"cpu{core}/cache").glob("index[0-9]*")
        return max(caches, key=lambda cache: int((cache / "level").read_text())) / "shared_cpu_list"

    complexes = sorted(_grouped(node & allowed, last_cache), key=len, reverse=True)
    return complexes[index % len(complexes)] if complexes else set()


MODES: dict[str, Callable[[set[int], set[int], int, int], set[int]]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}
"""The modes of ``--numa-binding``. Each is called with the cores of a NUMA node, those that this process may use, and which of how many
GPUs there it chooses for."""


def _addresses(gpus: Sequence[str]) -> list[str]:
    """The PCI addresses of ``gpus``, by what NVIDIA's driver says of all GPUs."""
    known = {path.name: (path / "information").read_text() for path in sorted((ROOT / "proc/driver/nvidia/gpus").glob("*"))}
    uuids = {address: match[0] for address, text in known.items() if (match := re.search(r"GPU-[-0-9a-f]+", text))}
    models = {match[1] for text in known.values() if (match := re.search(r"Model:\s*(.*)", text))}
    # CUDA numbers GPUs of one model by their addresses, and others by their speed
    numbered = list(known) if len(models) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else []
    found = []
    for gpu in gpus:
        by_uuid = [address for address, uuid in uuids.items() if uuid.startswith(gpu)]
        matches = by_uuid or (numbered[int(gpu) : int(gpu) + 1] if gpu.isdecimal() else [])
        if len(matches) != 1:
            raise LookupError(f"NVIDIA's driver does not say where GPU {gpu} is")
        found += matches
    return found


def _node_of(address: str) -> int:
    node = int((ROOT / f"sys/bus/pci/devices/{address.lower()}/numa_node").read_text())
    if node < 0:
        raise LookupError(f"the system does not say which NUMA node the GPU at {address} is attached to")
    return node


def _grouped(cores: set[int], sharing: Callable[[int], Path]) -> list[set[int]]:
    """The ``cores`` in groups of those whose file, which lists a core's peers, says the same."""
    groups: dict[int, set[int]] = {}
    for core in sorted(cores):
        groups.setdefault(min(_numbers(sharing(core))), set()).add(core)
    return list(groups.values())


def _numbers(path: Path) -> set[int]:
    """The numbers in a file such as ``0-3,8-11``."""
    ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
