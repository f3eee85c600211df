"""Formats an examination for reading: facts that all ranks share appear once, other facts with their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parwrap.doctor.facts import Examination, Facts, Network, Row, SelfTest, Versions
from parwrap.doctor.findings import Finding
from parwrap.doctor.units import human_size, ranks
from parwrap.errors import counted

__all__ = ["report", "table"]


def report(examination: Examination, findings: Sequence[Finding]) -> str:
    """The text of the whole report."""
    all_facts, test = examination.ranks, examination.self_test
    owner = {facts.launch.rank: facts.host for facts in all_facts}
    hosts = list({facts.host: facts for facts in reversed(all_facts)}.values())[::-1]  # the first rank of each
    lines: list[tuple[str, str]] = []
    lines += _of_ranks("parwrap", [(facts, _versions(facts.versions)) for facts in all_facts])
    lines += _of_ranks("extras", [(facts, _extras(facts.versions)) for facts in all_facts])
    lines += [("host", _host(facts, [rank for rank in owner if owner[rank] == facts.host])) for facts in hosts]
    lines += _of_ranks("cores", [(facts, _cores(facts)) for facts in all_facts])
    lines += _of_ranks("GPUs", [(facts, _gpus(facts)) for facts in all_facts])
    for facts in hosts:
        lines += [("", line) for line in (facts.gpus.topology or "").splitlines()]
    lines += _of_ranks("network", [(facts, _network(facts.network)) for facts in hosts])
    lines += [("launch", _launch(all_facts[0]))]
    lines += _of_ranks("chosen", [(facts, f"{facts.backend} on {facts.device}") for facts in all_facts])
    lines += [("self test", _self_test(test))]
    lines += [("", line) for line in table(test.rows)]
    lines += [("clocks", text) for text in _clocks(test)]
    lines += [("problem" if each.serious else "note", _finding(each, owner)) for each in findings]
    if not any(each.serious for each in findings):
        lines += [("problems", "none")]
    return "\n".join(f"{name:<10} {text}".rstrip() for name, text in lines)


def table(rows: Iterable[Row]) -> list[str]:
    """The lines of a table of all-reduces; none if none was measured.

    >>> print("\\n".join(table([Row(1024, 0.0001, 1.024e7, 1.024e7, True), Row(2**26, 0.05, 1.342e9, 1.342e9, False)])))
    all-reduce        time   algorithm         bus
          1 KB      100 us   0.01 GB/s   0.01 GB/s
         64 MB    50000 us   1.34 GB/s   1.34 GB/s   wrong sums
    """
    lines = []
    for row in rows:
        bandwidths = f"{row.algorithm_bandwidth / 1e9:6.2f} GB/s {row.bus_bandwidth / 1e9:6.2f} GB/s"
        lines.append(f"{human_size(row.bytes):>10} {row.seconds * 1e6:8.0f} us {bandwidths}" + ("" if row.right else "   wrong sums"))
    return [f"{'all-reduce':>10} {'time':>11} {'algorithm':>11} {'bus':>11}", *lines] if lines else []


def _of_ranks(name: str, texts: Sequence[tuple[Facts, str]]) -> list[tuple[str, str]]:
    """One line per different text, with its ranks if there are several texts."""
    whose: dict[str, list[Facts]] = {}
    for facts, text in texts:
        whose.setdefault(text, []).append(facts)
    if len(whose) == 1:
        return [(name, text) for text in whose]
    return [(name, f"{ranks(facts.launch.rank for facts in who)}: {text}") for text, who in whose.items()]


def _versions(versions: Versions) -> str:
    nccl = f", NCCL {versions.nccl}" if versions.nccl else ""
    return (
        f"{versions.parwrap}, python {versions.python}, torch {versions.torch} built for {versions.built_for}{nccl}, "
        f"numpy {versions.numpy}, wrapt {versions.wrapt}"
    )


def _extras(versions: Versions) -> str:
    here = [f"{name} {version}" for name, version in versions.extras.items() if version]
    absent = [name for name, version in versions.extras.items() if not version]
    return "; ".join(part for part in (", ".join(here), f"not here: {', '.join(absent)}" if absent else "") if part)


def _host(facts: Facts, here: list[int]) -> str:
    memory, limits = facts.memory, facts.limits
    parts = [facts.host + (f" ({ranks(here)})" if facts.launch.size > 1 else "")]
    if memory.total is not None:
        parts.append(f"memory {human_size(memory.total)}" + (f", limited to {human_size(memory.limit)}" if memory.limit else ""))
    if memory.shared is not None:
        parts.append(f"/dev/shm {human_size(memory.shared)}, {human_size(memory.shared_free or 0)} free")
    parts.append(f"open files {'unlimited' if limits.open_files is None else limits.open_files}")
    return "; ".join(parts)


def _cores(facts: Facts) -> str:
    cores = facts.cores
    quota = f", limited to {cores.quota:g} cores' time" if cores.quota else ""
    here = max(facts.launch.local_size, len(facts.gpus.seen))
    each = cores.usable // here if cores.usable == cores.present else cores.usable  # a launcher has bound the rank to its own
    workers = f"; num_workers={max(1, each)} on each of {here} ranks is one for each core" if here > 1 else ""
    return f"{cores.usable} usable of {cores.present}{quota}; torch computes with {counted(cores.threads, 'thread')}{workers}"


def _gpus(facts: Facts) -> str:
    gpus = facts.gpus
    if not gpus.seen:
        return "none that torch can use" + (f" (NVIDIA driver {gpus.driver})" if gpus.driver else "")
    seen = [f"{number}: {gpu.name}, {human_size(gpu.memory)}" for number, gpu in enumerate(gpus.seen)]
    apart = ", ".join(f"{one}-{other}" for one, other in gpus.apart)
    peers = f"; no peer access between {apart}" if apart else "; peer access between all" if len(seen) > 1 else ""
    return "; ".join(seen) + peers + (f"; NVIDIA driver {gpus.driver}" if gpus.driver else "")


def _network(network: Network) -> str:
    why = "by GLOO_SOCKET_IFNAME" if network.gloo else "where the host name resolves to"
    if network.address is None:
        return (
            f"GLOO_SOCKET_IFNAME={network.gloo}: no address"
            if network.gloo
            else "the host name does not resolve to an address of this machine"
        )
    nccl = f"; NCCL_SOCKET_IFNAME={network.nccl}" if network.nccl else ""
    infiniband = f"; InfiniBand {', '.join(network.infiniband)}" if network.infiniband else ""
    return f"gloo listens at {network.interface or 'an unknown interface'} ({network.address}), {why}{nccl}{infiniband}"


def _launch(facts: Facts) -> str:
    launch = facts.launch
    shown = {name: value for name, value in launch.variables.items() if not name.startswith(("ROLE_", "TORCHELASTIC_"))}
    variables = " ".join(f"{name}={value}" for name, value in shown.items())
    if launch.launcher is None:
        return "started directly: one rank" + (f", although the environment has {variables}" if variables else "")
    rendezvous = "" if launch.init_method == "env://" else f", to meet at {launch.init_method or 'an unknown place'}"
    return f"{launch.launcher}: {launch.size} rank{'s'[: launch.size != 1]}{rendezvous}; rank {launch.rank} has {variables}"


def _self_test(test: SelfTest) -> str:
    who = f"{test.ranks} {test.by} ranks, {test.backend} on {test.device}"
    if test.skipped:
        return f"not run: {test.skipped}"
    if test.failure:
        return f"{who}: failed"
    return f"{who}: {'all sums right' if all(row.right for row in test.rows) else 'wrong sums'}"


def _clocks(test: SelfTest) -> list[str]:
    if not test.clocks:
        return []
    most = max(test.clocks, key=lambda clock: abs(clock.ahead))
    uncertainty = max(clock.uncertainty for clock in test.clocks)
    return [f"at most {abs(most.ahead) * 1e3:.1f} ms from rank 0's ({ranks([most.rank])}), measured to within {uncertainty * 1e3:.1f} ms"]


def _finding(finding: Finding, owner: dict[int, str]) -> str:
    hosts = list(dict.fromkeys(owner[rank] for rank in finding.ranks if rank in owner))
    everyone = not finding.ranks or set(finding.ranks) >= set(owner)
    whose = "" if everyone else f"{ranks(finding.ranks)} on {', '.join(hosts)}: " if hosts else f"{ranks(finding.ranks)}: "
    return f"{whose}{finding.problem}. Remedy: {finding.remedy}"
