"""What the doctor knows: facts of each rank, the outcome of the self test. Their names are the keys of ``--json``.

Nothing is looked up here (``gather.py``, ``exam.py``) and nothing judged (``findings.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from parwrap.world.world import World

__all__ = ["Clock", "Cores", "Examination", "Facts", "Gpu", "Gpus", "Launch", "Limits", "Memory", "Network", "Row", "SelfTest", "Versions"]


@dataclass(frozen=True)
class Launch(World):
    """How this process was started, beside its place.

    Attributes:
        variables: the launch variables that are set.
        error: why the ranks cannot be told apart, if they cannot.
    """

    variables: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Versions:
    """Versions; ``None`` for what torch was built without, or is installed under no name.

    Attributes:
        cuda: what torch was built for, as ``"12.8"``, or ``"rocm 6.4"``.
        extras: of the optional packages that parwrap works with; ``None`` for one that is not here.
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
        """The same as ``cuda``, for people to read.

        >>> Versions("3.11.7", "0.1.0", "2.13.0", "rocm 6.4", None, "2.4.6", "2.5.2").built_for
        'ROCm 6.4'
        """
        return "the CPU" if self.cuda is None else f"CUDA {self.cuda}".replace("CUDA rocm", "ROCm")


@dataclass(frozen=True)
class Cores:
    """CPU cores.

    Attributes:
        present: in the machine.
        usable: by this process.
        quota: how many cores' worth of time its cgroup may take; ``None`` without a limit.
        threads: that torch computes with.
    """

    present: int
    usable: int
    quota: float | None = None
    threads: int = 1


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; ``None`` where it is not known, or there is no limit or no ``/dev/shm``.

    Attributes:
        limit: of the cgroup.
        shared: the size of ``/dev/shm``.
        shared_free: what is free of it.
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
        open_files: how many.
        open_files_most: what ``ulimit -n`` may raise that to.
        locked_memory: bytes that may be kept from being swapped, as InfiniBand needs.
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
        seen: by torch.
        present: whether the machine has an NVIDIA GPU, whoever may use it.
        driver: version of the NVIDIA driver that is loaded.
        visible: ``CUDA_VISIBLE_DEVICES``.
        error: what torch says if it cannot use them.
        apart: pairs that cannot read each other's memory.
        topology: what ``nvidia-smi topo -m`` prints, for two or more.
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
    """Where gloo would listen.

    Attributes:
        addresses: that the host's name leads to.
        interfaces: names of the network interfaces, with their addresses.
        infiniband: devices for it.
        gloo: the value of ``GLOO_SOCKET_IFNAME``.
        nccl: the value of ``NCCL_SOCKET_IFNAME``.
        address: where gloo listens; ``None`` if the host's name leads to no address of this machine.
        interface: that has this address.
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
    """All that one rank knows of itself.

    Attributes:
        host: the name of its machine.
        backend: that would be chosen.
        device: the same, ``"cpu"`` or ``"cuda"``.
        device_error: why this rank has no device, if it has none.
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


@dataclass(frozen=True)
class Row:
    """All-reduces of one size.

    Attributes:
        bytes: on each rank.
        seconds: of one, on average, on the slowest rank.
        algorithm_bandwidth: ``bytes / seconds``.
        bus_bandwidth: that, times ``2 (n - 1) / n`` for n ranks: comparable with what the links can do, whatever n is.
        right: whether every rank had the right sums.
    """

    bytes: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    right: bool


@dataclass(frozen=True)
class Clock:
    """How far the clock of a rank is ahead of rank 0's, in seconds, and how far that may be from the truth."""

    rank: int
    ahead: float
    uncertainty: float


@dataclass(frozen=True)
class SelfTest:
    """What ranks did together.

    Attributes:
        by: ``"launched"`` ranks, or ``"forked"``: two or more that the doctor has started for it.
        ranks: how many.
        backend, device: that they used.
        rows: the sizes that were reached.
        clocks: of launched ranks.
        skipped: why it was not run.
        failure: why it did not come to its end.
        stages: after a failure, where each rank is, as far as it has told.
        missing: after a failure, ranks that did not come.
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
    """All of it: the facts of the ranks that told them, and the self test."""

    ranks: list[Facts]
    self_test: SelfTest
