"""The doctor's data: facts of each rank, and the result of the self test. The field names are the keys of ``--json``.

``gather.py`` and ``exam.py`` collect it, ``findings.py`` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parwrap.ranks.world import World

__all__ = ["Clock", "Cores", "Examination", "Facts", "Gpu", "Gpus", "Launch", "Limits", "Memory", "Network", "Row", "SelfTest", "Versions"]


@dataclass(frozen=True)
class Launch(World):
    """This process's place among the ranks, and how it was started.

    Attributes:
        variables: the launch variables that are set.
        error: why the ranks cannot be identified, if so.
        secret: whether a secret signs what parwrap puts into the store of several machines.
    """

    variables: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    secret: bool = False


@dataclass(frozen=True)
class Versions:
    """Versions; ``None`` for libraries that torch was built without, or that have no version.

    Attributes:
        cuda: what torch was built for, such as ``"12.8"`` or ``"rocm 6.4"``.
        extras: versions of optional packages; ``None`` for one that is not installed.
    """

    python: str
    parwrap: str
    torch: str
    cuda: str | None
    nccl: str | None
    numpy: str
    wrapt: str | None
    extras: dict[str, str | None] = field(default_factory=dict)

    @property
    def built_for(self) -> str:
        """``cuda`` in readable form.

        >>> Versions("3.11.7", "0.1.0", "2.13.0", "rocm 6.4", None, "2.4.6", "2.5.2").built_for
        'ROCm 6.4'
        """
        return "the CPU" if self.cuda is None else f"CUDA {self.cuda}".replace("CUDA rocm", "ROCm")


@dataclass(frozen=True)
class Cores:
    """CPU cores.

    Attributes:
        present: in the machine.
        usable: usable by this process.
        quota: the CPU time that its cgroup may use, in cores; ``None`` without a limit.
        threads: the number of torch's compute threads.
    """

    present: int
    usable: int
    quota: float | None = None
    threads: int = 1


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; ``None`` if unknown, unlimited or without ``/dev/shm``.

    Attributes:
        total, available: the memory of the machine, and its free part.
        limit: the limit of the cgroup.
        shared: the size of ``/dev/shm``.
        shared_free: its free part.
    """

    total: int | None = None
    available: int | None = None
    limit: int | None = None
    shared: int | None = None
    shared_free: int | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of this process; ``None`` for none.

    Attributes:
        open_files: the number of open files allowed.
        open_files_most: the most that ``ulimit -n`` may allow.
        locked_memory: bytes that may be locked in memory, as InfiniBand needs.
    """

    open_files: int | None = None
    open_files_most: int | None = None
    locked_memory: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process sees; ``memory`` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class Gpus:
    """The GPUs.

    Attributes:
        seen: the GPUs that torch sees.
        present: whether the machine has an NVIDIA GPU, usable here or not.
        driver: version of the loaded NVIDIA driver.
        visible: the value of ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set.
        error: torch's error if it cannot use them.
        apart: pairs of GPUs that cannot read each other's memory, by their numbers.
        topology: the output of ``nvidia-smi topo -m``, with two GPUs or more.
    """

    seen: list[Gpu] = field(default_factory=list)
    present: bool = False
    driver: str | None = None
    visible: str | None = None
    error: str | None = None
    apart: list[tuple[int, int]] = field(default_factory=list)
    topology: str | None = None


@dataclass(frozen=True)
class Network:
    """The network of the machine, and where gloo would listen.

    Attributes:
        addresses: the addresses that the host's name resolves to.
        interfaces: names of the network interfaces, with their addresses.
        infiniband: InfiniBand devices.
        gloo: the value of ``GLOO_SOCKET_IFNAME``.
        nccl: the value of ``NCCL_SOCKET_IFNAME``.
        address: where gloo listens; ``None`` if the interface in ``gloo`` has no address, or without one the host's name resolves to none
            of this machine.
        interface: the first interface in ``gloo``, or the one with this address.
    """

    addresses: list[str] = field(default_factory=list)
    interfaces: dict[str, list[str]] = field(default_factory=dict)
    infiniband: list[str] = field(default_factory=list)
    gloo: str | None = None
    nccl: str | None = None
    address: str | None = None
    interface: str | None = None


@dataclass(frozen=True)
class Facts:
    """The facts of one rank.

    Attributes:
        host: the name of its machine.
        backend: the backend that would be chosen.
        device: the device that would be chosen, ``"cpu"`` or ``"cuda"``.
        device_error: why there is no GPU for this rank on a machine with GPUs; ``None`` otherwise.
    """

    host: str
    launch: Launch
    versions: Versions
    cores: Cores
    memory: Memory
    limits: Limits
    gpus: Gpus
    network: Network
    backend: str
    device: str
    device_error: str | None = None

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Facts:
        """Rebuild the facts from the dicts of ``dataclasses.asdict``."""
        parts = {"launch": Launch, "versions": Versions, "cores": Cores, "memory": Memory, "limits": Limits, "network": Network}
        gpus = Gpus(**{**values["gpus"], "seen": [Gpu(**gpu) for gpu in values["gpus"]["seen"]]})
        return cls(**{**values, **{name: part(**values[name]) for name, part in parts.items()}, "gpus": gpus})


@dataclass(frozen=True)
class Row:
    """All-reduces of one size.

    Attributes:
        bytes: the size on each rank.
        seconds: the average time of one all-reduce, on the slowest rank.
        algorithm_bandwidth: ``bytes / seconds``.
        bus_bandwidth: the algorithm bandwidth times ``2 (n - 1) / n`` for n ranks, which is comparable with the speed of the links for any
            n.
        right: whether every rank had the right sums.
    """

    bytes: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    right: bool


@dataclass(frozen=True)
class Clock:
    """How far a rank's clock is ahead of rank 0's, in seconds, and the uncertainty of this."""

    rank: int
    ahead: float
    uncertainty: float


@dataclass(frozen=True)
class SelfTest:
    """The result of the ranks' self test.

    Attributes:
        by: ``"launched"`` ranks, or ``"forked"`` or ``"spawned"``: two or more ranks that the doctor started for the test.
        ranks: the number of ranks.
        backend, device: the backend and device in use.
        rows: what was measured, one for each size.
        clocks: the clocks of launched ranks.
        skipped: why it was skipped; ``None`` if it was not.
        failure: why it failed; ``None`` if it did not.
        stages: after a failure, the last reported stage of each rank.
        missing: after a failure, the ranks that did not join, if some did.
    """

    by: str
    ranks: int
    backend: str
    device: str
    rows: list[Row] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    skipped: str | None = None
    failure: str | None = None
    stages: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Examination:
    """The whole result: the ranks' facts as received, and the self test."""

    ranks: list[Facts]
    self_test: SelfTest
