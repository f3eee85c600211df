"""From facts to problems, each with its remedy; without side effects."""

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
"""The usual default limit of open files."""

CLOCKS_APART = 1.0
"""Seconds of difference between clocks from which times in files and logs mislead."""

VIRTUAL = ("lo", "docker", "veth", "virbr", "br-", "cni", "flannel", "tun", "ifb", "dummy")
"""Prefixes of interfaces that lead to no other machine."""


@dataclass(frozen=True)
class Finding:
    """A problem and what to do.

    Attributes:
        problem: what is wrong.
        remedy: what to do about it.
        serious: whether it is an error rather than a hint.
        ranks: the ranks that have it.
    """

    problem: str
    remedy: str
    serious: bool = True
    ranks: tuple[int, ...] = ()


def find(examination: Examination) -> list[Finding]:
    """All problems; a problem of several ranks comes once, and serious ones come first."""
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
    note(self_test(examination.self_test, several), [])
    findings = [Finding(*what, tuple(sorted(whose))) for what, whose in found.items()]
    return sorted(findings, key=lambda finding: not finding.serious)


def launch(facts: Facts) -> Iterator[Finding]:
    """The launch variables are inconsistent."""
    if facts.launch.error:
        # parwrap's errors state the problem, then the remedy
        problem, *advice = re.split(r"\. |: (?=start |set |unset )", facts.launch.error.rstrip("."), maxsplit=1)
        yield Finding(problem, advice[0] if advice else "start with `python -m parwrap.run`, or unset these variables to run on one rank")


def gpu_of_its_own(facts: Facts) -> Iterator[Finding]:
    """The rank has no GPU."""
    if facts.device_error:
        problem, _, remedy = facts.device_error.rstrip(".").partition(". ")
        yield Finding(problem, remedy)


def bound(facts: Facts) -> Iterator[Finding]:
    """A launcher has bound the rank to a single core."""
    if facts.launch.size > 1 and facts.cores.usable == 1 and facts.cores.present >= 2 * facts.launch.local_size:
        yield Finding(
            f"the launcher lets each rank use 1 core of {facts.cores.present}, which it shares with its DataLoader workers",
            "ask for more: `srun --cpus-per-task=N`, `mpirun --bind-to none`",
        )


def threads(facts: Facts) -> Iterator[Finding]:
    """More threads would compute than there are cores."""
    cores, here = facts.cores, facts.launch.local_size
    least = min(cores.present, cores.quota or cores.present)
    if (cores.threads > 1 and cores.threads * here > max(1, least)) or cores.threads > cores.usable:
        why = f"its cgroup's limit is {cores.quota:g} cores" if least < cores.present else f"the machine has {cores.present} cores"
        if cores.threads > cores.usable:
            why = f"{'each' if here > 1 else 'it'} may use {cores.usable} of {cores.present} cores"
        who = "1 rank computes" if here == 1 else f"{here} ranks compute"
        yield Finding(
            f"{who} with {cores.threads} threads{'' if here == 1 else ' each'}, and {why}: they wait for each other",
            f"export OMP_NUM_THREADS={max(1, min(int(least // here), cores.usable))}",
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """/dev/shm is too small for the batches of DataLoader workers."""
    free = facts.memory.shared_free
    if free is not None and free < LEAST_SHARED:
        yield Finding(
            f"/dev/shm has {human_size(free)} free of {human_size(facts.memory.shared or 0)}: batches of DataLoader workers, and NCCL's "
            "buffers, go through it, and end in a bus error when it is full",
            "in docker `--ipc=host` or `--shm-size=8g`, in Kubernetes a memory-backed emptyDir at /dev/shm; else num_workers=0",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    """The limit of open files is too low."""
    limits = facts.limits
    if limits.open_files is not None and limits.open_files < LEAST_FILES:
        most = limits.open_files_most
        raised = most is None or most >= LEAST_FILES
        yield Finding(
            f"only {limits.open_files} files may be open; each rank, each DataLoader worker and each tensor in their queues takes some",
            f"`ulimit -n {most or 65536}` before the start" if raised else f"have the hard limit, {most}, raised by an administrator",
        )


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """InfiniBand could not register its memory."""
    limit = facts.limits.locked_memory
    if facts.network.infiniband and limit is not None:
        yield Finding(
            f"there is InfiniBand ({', '.join(facts.network.infiniband)}), and only {human_size(limit)} of memory may be locked for it",
            "`ulimit -l unlimited` where the ranks start, for Slurm in the unit of slurmd; in docker `--ulimit memlock=-1`",
        )


def gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that torch does not use."""
    gpus, cuda, built_for = facts.gpus, facts.versions.cuda, facts.versions.built_for
    if gpus.seen:
        return
    if gpus.visible is not None and gpus.visible.strip() in ("", "-1"):
        if gpus.driver:
            yield Finding(f"CUDA_VISIBLE_DEVICES={gpus.visible!r} hides the GPUs", "unset it to train on them", serious=False)
    elif gpus.present and not gpus.driver:
        yield Finding(
            "there is an NVIDIA GPU and no driver is loaded, so ranks train on the CPU",
            "install the driver, until `nvidia-smi` lists the GPU; start a container with `--gpus all`",
        )
    elif gpus.driver and not cuda:
        yield Finding(
            f"NVIDIA's driver {gpus.driver} is loaded, and torch {facts.versions.torch} was built without CUDA",
            "install the build of torch for CUDA that https://pytorch.org/get-started names",
        )
    elif gpus.driver:
        yield Finding(
            f"torch, built for {built_for}, can use no GPU under NVIDIA's driver {gpus.driver}: {gpus.error or 'it finds none'}",
            "ask the scheduler for GPUs (`--gpus`), a container too; if the driver is older than that CUDA, update it or install "
            "a torch built for an older one",
        )
    elif cuda:
        yield Finding(
            f"torch was built for {built_for} and there is no GPU driver, so ranks train on the CPU",
            "nothing, unless there should be a GPU: then install its driver, or start the container with `--gpus all`",
            serious=False,
        )


def interfaces(facts: Facts) -> Iterator[Finding]:
    """A variable names an interface that does not exist."""
    network = facts.network
    here = ", ".join(network.interfaces)
    missing = [name for name in (network.gloo or "").split(",") if name and name not in network.interfaces]
    if missing:
        yield Finding(f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, and this machine has {here}", _export("GLOO", facts))
    nccl = network.nccl or ""
    exact = nccl.startswith("=")
    wanted = [] if nccl.startswith("^") else nccl.removeprefix("=").split(",") if nccl else []
    if wanted and not any(name == each if exact else name.startswith(each) for name in network.interfaces for each in wanted):
        yield Finding(f"NCCL_SOCKET_IFNAME={nccl} fits none of this machine's interfaces: {here}", _export("NCCL", facts))


def name_of_host(facts: Facts, several: bool) -> Iterator[Finding]:
    """Gloo would listen where the others do not find it.

    Args:
        facts: the facts of a rank.
        several: whether other machines have ranks.
    """
    network = facts.network
    if network.gloo is None and network.address is None:
        leads = f"leads to {', '.join(network.addresses)}, which is not this machine" if network.addresses else "leads to no address"
        yield Finding(
            f"the name of this machine, {facts.host}, {leads}, so gloo listens where no other machine reaches it, and hangs",
            f"{_export('GLOO', facts)}, or give {facts.host} an address of this machine in /etc/hosts",
        )
    elif network.interface in ("lo", "lo0") and (several or not network.gloo):
        why = "GLOO_SOCKET_IFNAME says so" if network.gloo else f"its name, {facts.host}, leads to {network.address}"
        yield Finding(
            f"gloo listens at the loopback of this machine ({why}), where ranks on other machines cannot reach it",
            f"{_export('GLOO', facts)} on every machine" if several else f"nothing on one machine; for several {_export('GLOO', facts)}",
            serious=several,
        )


def differences(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Facts that must be the same on all ranks and are not."""
    yield from _different(all_facts, "backends", lambda facts: facts.backend, "pass `--backend gloo`, or see why some ranks have no GPU")
    for what, of in {
        "versions of torch": lambda facts: facts.versions.torch,
        "versions of parwrap": lambda facts: facts.versions.parwrap,
        "versions of NCCL": lambda facts: facts.versions.nccl,
    }.items():
        yield from _different(all_facts, what, of, "install the same on every machine")


def _different(all_facts: Sequence[Facts], what: str, of: Callable[[Facts], str | None], remedy: str) -> Iterator[Finding]:
    who: dict[str | None, list[int]] = {}
    for facts in all_facts:
        who.setdefault(of(facts), []).append(facts.launch.rank)
    if len(who) > 1:
        values = "; ".join(f"{value or 'none'} on {ranks(whose)}" for value, whose in who.items())
        yield Finding(f"ranks have different {what}: {values}", remedy, ranks=tuple(facts.launch.rank for facts in all_facts))


def self_test(test: SelfTest, several: bool) -> Iterator[Finding]:
    """Failures between ranks.

    Args:
        test: the result of the self test.
        several: whether the ranks are on several machines.
    """
    wrong = [human_size(row.bytes) for row in test.rows if not row.right]
    if wrong:
        yield Finding(
            f"all-reduces over {test.backend} give wrong sums, for {', '.join(wrong)}",
            "NCCL_P2P_DISABLE=1 if that helps: the IOMMU or PCI's ACS is in the way of GPUs that read each other's memory"
            if test.backend == "nccl"
            else "see whether the memory and the network of these machines are sound",
        )
    if test.failure:
        at: dict[str, list[int]] = {}
        for rank, stage in test.stages.items():
            at.setdefault(stage, []).append(rank)
        where = "".join(f"; {ranks(whose)} at: {stage}" for stage, whose in at.items())
        missing = f"; {ranks(test.missing)} did not come" if test.missing else ""
        yield Finding(f"the self test over {test.backend} failed: {test.failure}{missing}{where}", _after_failure(test, several))
    for clock in test.clocks:
        if abs(clock.ahead) - clock.uncertainty > CLOCKS_APART:
            way = "ahead of" if clock.ahead > 0 else "behind"
            yield Finding(
                f"the clock of rank {clock.rank} is {abs(clock.ahead):.1f} s {way} rank 0's, so times in logs and of files mislead",
                "have every machine set its clock by NTP (chronyd or systemd-timesyncd; `timedatectl`)",
                ranks=(clock.rank,),
            )


def _after_failure(test: SelfTest, several: bool) -> str:
    if test.failure and "Unable to find address for" in test.failure:  # gloo's message
        return "give that network interface an address; lo has one after `ip link set lo up`, which a sandbox without a network may lack"
    if test.missing or not (test.rows or any("all-reduce" in stage for stage in test.stages.values())):
        return (
            "see that all ranks were started, and that each machine reaches the address and port where they meet (MASTER_ADDR, "
            "MASTER_PORT); if they only came late, give `--timeout` more seconds"
            if test.by == "launched"
            else "see what the ranks have printed above; TORCH_DISTRIBUTED_DEBUG=DETAIL tells more"
        )
    if test.failure and ("reset by peer" in test.failure or "closed by peer" in test.failure):
        return "see why a rank has ended: what it has printed, and whether the kernel has killed it for want of memory (`dmesg`)"
    if test.backend == "nccl":
        return "NCCL_DEBUG=INFO tells which link it takes; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 finds out which is at fault"
    if several:
        return "set GLOO_SOCKET_IFNAME to an interface that all machines share, and open the firewall between them; slow: `--timeout`"
    return "if it was only slow, give `--timeout` more seconds; TORCH_DISTRIBUTED_DEBUG=DETAIL tells more"


def _export(library: str, facts: Facts) -> str:
    real = [name for name, addresses in facts.network.interfaces.items() if addresses and not name.startswith(VIRTUAL)]
    return f"export {library}_SOCKET_IFNAME={real[0] if real else 'INTERFACE'}"


RANK_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (launch, gpu_of_its_own, bound)
HOST_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    threads,
    shared_memory,
    open_files,
    locked_memory,
    gpus,
    interfaces,
)
