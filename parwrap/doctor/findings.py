"""Turns facts into problems, each with its remedy, without side effects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parwrap.doctor.facts import Examination, Facts, SelfTest
from parwrap.doctor.units import human_size, ranks

__all__ = ["Finding", "find"]

LEAST_SHARED = 2**30
"""Bytes of ``/dev/shm`` below which batches of DataLoader workers may not fit. Docker's default is 64 MB."""

LEAST_FILES = 1024
"""A lower limit of open files is a problem. This is the usual default."""

CLOCKS_APART = 1.0
"""If clocks differ by more than this number of seconds, timestamps of files and logs are misleading."""

VIRTUAL = ("lo", "docker", "veth", "virbr", "br-", "cni", "flannel", "tun", "ifb", "dummy")
"""Prefixes of interfaces that do not reach other machines."""


@dataclass(frozen=True)
class Finding:
    """A problem and what to do.

    Attributes:
        problem: what is wrong.
        remedy: what to do about it.
        serious: whether it is an error rather than a hint.
        ranks: the ranks that have the problem.
    """

    problem: str
    remedy: str
    serious: bool = True
    ranks: tuple[int, ...] = ()


def find(examination: Examination) -> list[Finding]:
    """All problems, serious ones first. A problem of several ranks is listed once."""
    on = Counter(facts.host for facts in examination.ranks)
    # not every launcher sets the number of ranks on a machine
    all_facts = [
        replace(facts, launch=replace(facts.launch, local_size=facts.launch.local_size or on[facts.host])) for facts in examination.ranks
    ]
    several = len(on) > 1
    found: dict[tuple[str, str, bool], list[int]] = {}

    def note(findings: Iterator[Finding], whose: Sequence[int]) -> None:
        for each in findings:
            found.setdefault((each.problem, each.remedy, each.serious), []).extend(each.ranks or whose)

    hosts: dict[str, Facts] = {}
    for facts in all_facts:
        hosts.setdefault(facts.host, facts)
        for check in RANK_CHECKS:
            note(check(facts), [facts.launch.rank])
    for facts in hosts.values():
        whose = [other.launch.rank for other in all_facts if other.host == facts.host]
        for check in HOST_CHECKS:
            note(check(facts), whose)
        note(name_of_host(facts, several), whose)
    note(differences(all_facts), [])
    note(secret(all_facts), [])
    note(self_test(examination.self_test, several), [])
    findings = [Finding(*what, tuple(sorted(whose))) for what, whose in found.items()]
    return sorted(findings, key=lambda finding: not finding.serious)


def launch(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if the launch variables do not tell which rank this is."""
    if facts.launch.error:
        # parwrap's errors state the problem, then the remedy
        problem, *advice = re.split(r"\. |: (?=start |set |unset )", facts.launch.error.rstrip("."), maxsplit=1)
        yield Finding(problem, advice[0] if advice else "start with `parwrap run`, or unset these variables to run on one rank")


def gpu_of_its_own(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if this machine has GPUs, but none for this rank."""
    if facts.device_error:
        problem, _, remedy = facts.device_error.rstrip(".").partition(". ")
        yield Finding(problem, remedy)


def bound(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if a launcher has bound the rank to a single core, although there are at least two for each rank."""
    if facts.launch.size > 1 and facts.cores.usable == 1 and facts.cores.present >= 2 * facts.launch.local_size:
        yield Finding(
            f"the launcher lets each rank use 1 core of {facts.cores.present}, which it shares with its DataLoader workers",
            "use `srun --cpus-per-task=N` or `mpirun --bind-to none`",
        )


def threads(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if ranks that each use several compute threads use more than there are cores, or than they may use."""
    cores, here = facts.cores, facts.launch.local_size
    least = min(cores.present, cores.quota or cores.present)
    if (cores.threads > 1 and cores.threads * here > max(1, least)) or cores.threads > cores.usable:
        why = f"the cgroup's limit is {cores.quota:g} cores" if least < cores.present else f"the machine has {cores.present} cores"
        if cores.threads > cores.usable:
            why = f"{'each' if here > 1 else 'it'} may use {cores.usable} of {cores.present} cores"
        who = "1 rank computes" if here == 1 else f"{here} ranks compute"
        yield Finding(
            f"{who} with {cores.threads} threads{'' if here == 1 else ' each'}, and {why}: the threads wait for each other",
            f"export OMP_NUM_THREADS={max(1, min(int(least // here), cores.usable))}",
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if ``/dev/shm`` has too little space for the batches of DataLoader workers."""
    free = facts.memory.shared_free
    if free is not None and free < LEAST_SHARED:
        yield Finding(
            f"/dev/shm has {human_size(free)} free of {human_size(facts.memory.shared or 0)}: DataLoader workers and NCCL use it, and "
            "crash with a bus error when it is full",
            "in docker, pass `--ipc=host` or `--shm-size=8g`; in Kubernetes, mount a memory-backed emptyDir at /dev/shm; otherwise, set "
            "num_workers=0",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if the limit of open files is too low."""
    limits = facts.limits
    if limits.open_files is not None and limits.open_files < LEAST_FILES:
        most = limits.open_files_most
        raised = most is None or most >= LEAST_FILES
        yield Finding(
            f"only {limits.open_files} files may be open, but each rank, each DataLoader worker and each tensor in their queues needs some",
            f"run `ulimit -n {most or 65536}` before you start the ranks"
            if raised
            else f"ask an administrator to raise the hard limit, {most}",
        )


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if locked memory is limited on a machine with InfiniBand, which locks the memory that it sends."""
    limit = facts.limits.locked_memory
    if facts.network.infiniband and limit is not None:
        yield Finding(
            f"there is InfiniBand ({', '.join(facts.network.infiniband)}), but only {human_size(limit)} of memory may be locked for it",
            "run `ulimit -l unlimited` before the ranks start; under Slurm, set LimitMEMLOCK=infinity in the systemd unit of slurmd; in "
            "docker, pass `--ulimit memlock=-1`",
        )


def gpus(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if torch sees no GPU although the machine, its driver or the build of torch suggests one."""
    gpus, cuda, built_for = facts.gpus, facts.versions.cuda, facts.versions.built_for
    if gpus.seen:
        return
    if gpus.visible is not None and gpus.visible.strip() in ("", "-1"):
        if gpus.driver:
            yield Finding(f"CUDA_VISIBLE_DEVICES={gpus.visible!r} hides the GPUs", "unset it to train on them", serious=False)
    elif gpus.present and not gpus.driver:
        yield Finding(
            "there is an NVIDIA GPU, but no driver is loaded, so ranks train on the CPU",
            "install the NVIDIA driver and check that `nvidia-smi` lists the GPU; start a container with `--gpus all`",
        )
    elif gpus.driver and not cuda:
        yield Finding(
            f"NVIDIA driver {gpus.driver} is loaded, but torch {facts.versions.torch} was built without CUDA",
            "install a CUDA build of torch: see https://pytorch.org/get-started",
        )
    elif gpus.driver:
        yield Finding(
            f"torch, built for {built_for}, cannot use a GPU with NVIDIA driver {gpus.driver}: {gpus.error or 'it finds none'}",
            "request GPUs from the scheduler or the container (`--gpus`); if the driver is too old for this CUDA version, update it, or "
            "install a torch built for an older CUDA",
        )
    elif cuda:
        yield Finding(
            f"torch was built for {built_for} and there is no GPU driver, so ranks train on the CPU",
            "none needed, unless there should be a GPU: then install its driver, or start the container with `--gpus all`",
            serious=False,
        )


def interfaces(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each variable that names a network interface which this machine does not have."""
    network = facts.network
    here = ", ".join(network.interfaces)
    missing = [name for name in (network.gloo or "").split(",") if name and name not in network.interfaces]
    if missing:
        yield Finding(f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, but this machine has {here}", _export("GLOO", facts))
    nccl = network.nccl or ""
    exact = nccl.startswith("=")
    wanted = [] if nccl.startswith("^") else nccl.removeprefix("=").split(",") if nccl else []
    if wanted and not any(name == each if exact else name.startswith(each) for name in network.interfaces for each in wanted):
        yield Finding(f"NCCL_SOCKET_IFNAME={nccl} does not match any of this machine's interfaces: {here}", _export("NCCL", facts))


def name_of_host(facts: Facts, several: bool) -> Iterator[Finding]:
    """Yield a finding if there are other machines, and gloo would listen where ranks there cannot reach it.

    Args:
        facts: the facts of a rank.
        several: whether the ranks are on several machines.
    """
    network = facts.network
    by_route = network.gloo is None and any(network.interfaces.values())  # as on Linux, where parwrap finds the interface of an address
    if by_route or not several:
        return
    if network.gloo is None and network.address is None:
        leads = (
            f"resolves to {', '.join(network.addresses)}, which is not an address of this machine"
            if network.addresses
            else "does not resolve to an address"
        )
        problem = f"this machine's host name, {facts.host}, {leads}, so gloo listens where no other machine can reach it"
    elif network.interface in ("lo", "lo0"):
        why = "GLOO_SOCKET_IFNAME says so" if network.gloo else f"its host name, {facts.host}, resolves to {network.address}"
        problem = f"gloo listens on the loopback interface of this machine ({why}), where ranks on other machines cannot reach it"
    else:
        return
    yield Finding(problem, f"{_export('GLOO', facts)} on every machine, or map {facts.host} to an address of this machine in /etc/hosts")


def secret(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Yield a finding if ranks are on several machines, and one of them has no secret to sign what it sends."""
    if len({facts.host for facts in all_facts}) > 1 and not all(facts.launch.secret for facts in all_facts):
        yield Finding(
            "PARWRAP_SECRET is not set, so whoever reaches the port of the rendezvous can write there what parwrap reads",
            "use a network that you trust, and set PARWRAP_SECRET to the same random text on all machines",
            serious=False,
        )


def differences(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Yield a finding for each fact that must be the same on all ranks and is not."""
    yield from _different(
        all_facts, "backends", lambda facts: facts.backend, "pass `--backend gloo`, or find out why some ranks have no GPU"
    )
    for what, of in {
        "versions of torch": lambda facts: facts.versions.torch,
        "versions of parwrap": lambda facts: facts.versions.parwrap,
        "versions of NCCL": lambda facts: facts.versions.nccl,
    }.items():
        yield from _different(all_facts, what, of, "install the same version on every machine")


def _different(all_facts: Sequence[Facts], what: str, of: Callable[[Facts], str | None], remedy: str) -> Iterator[Finding]:
    who: dict[str | None, list[int]] = {}
    for facts in all_facts:
        who.setdefault(of(facts), []).append(facts.launch.rank)
    if len(who) > 1:
        values = "; ".join(f"{value or 'none'} on {ranks(whose)}" for value, whose in who.items())
        yield Finding(f"ranks have different {what}: {values}", remedy, ranks=tuple(facts.launch.rank for facts in all_facts))


def self_test(test: SelfTest, several: bool) -> Iterator[Finding]:
    """Yield the findings of the self test: wrong sums, a failure, clocks that differ.

    Args:
        test: the result of the self test.
        several: whether the ranks are on several machines.
    """
    wrong = [human_size(row.bytes) for row in test.rows if not row.right]
    if wrong:
        yield Finding(
            f"all-reduces with {test.backend} return wrong sums for {', '.join(wrong)}",
            "try NCCL_P2P_DISABLE=1: if it helps, the IOMMU or PCI ACS breaks direct copies between GPUs"
            if test.backend == "nccl"
            else "check the memory and network of these machines for faults",
        )
    if test.failure:
        at: dict[str, list[int]] = {}
        for rank, stage in test.stages.items():
            at.setdefault(stage, []).append(rank)
        where = "".join(f"; {ranks(whose)} at: {stage}" for stage, whose in at.items())
        missing = f"; {ranks(test.missing)} did not join" if test.missing else ""
        yield Finding(f"the self test with {test.backend} failed: {test.failure}{missing}{where}", _after_failure(test, several))
    for clock in test.clocks:
        if abs(clock.ahead) - clock.uncertainty > CLOCKS_APART:
            way = "ahead of" if clock.ahead > 0 else "behind"
            yield Finding(
                f"the clock of rank {clock.rank} is {abs(clock.ahead):.1f} s {way} rank 0's, so timestamps of files and log lines are "
                "misleading",
                "synchronize the clock of every machine with NTP (chronyd or systemd-timesyncd; check with `timedatectl`)",
                ranks=(clock.rank,),
            )


def _after_failure(test: SelfTest, several: bool) -> str:
    if test.failure and "Unable to find address for" in test.failure:  # gloo's message
        return (
            "give that network interface an address; if it is lo, run `ip link set lo up`, which may be needed in a sandbox without a "
            "network"
        )
    if test.missing or not (test.rows or any("all-reduce" in stage for stage in test.stages.values())):
        return (
            "check that all ranks were started, and that each machine can reach the rendezvous (MASTER_ADDR, MASTER_PORT); if ranks only "
            "started late, raise `--timeout`"
            if test.by == "launched"
            else "check what the ranks printed above; for details, set TORCH_DISTRIBUTED_DEBUG=DETAIL"
        )
    if test.failure and ("reset by peer" in test.failure or "closed by peer" in test.failure):
        return "find out why a rank ended: check its output, and whether the kernel killed it for lack of memory (`dmesg`)"
    if test.backend == "nccl":
        return "set NCCL_DEBUG=INFO to see which links NCCL uses; try NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to find the faulty one"
    if several:
        return (
            "set GLOO_SOCKET_IFNAME to an interface on a network that connects all machines, and open the firewall between them; if it "
            "was only slow, raise `--timeout`"
        )
    return "if it was only slow, raise `--timeout`; for details, set TORCH_DISTRIBUTED_DEBUG=DETAIL"


def _export(library: str, facts: Facts) -> str:
    real = [name for name, addresses in facts.network.interfaces.items() if addresses and not name.startswith(VIRTUAL)]
    return f"export {library}_SOCKET_IFNAME={real[0] if real else 'INTERFACE'}"


RANK_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (launch, gpu_of_its_own, bound)
"""The checks of the facts of each rank."""

HOST_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    threads,
    shared_memory,
    open_files,
    locked_memory,
    gpus,
    interfaces,
)
"""The checks of the facts of one rank on each machine."""
