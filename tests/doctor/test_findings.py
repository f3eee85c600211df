"""Problems are found in facts that are made up, each with its remedy; a sound machine has none."""

from dataclasses import replace

import pytest

from parwrap.doctor.facts import (
    Clock,
    Cores,
    Examination,
    Facts,
    Gpu,
    Gpus,
    Launch,
    Limits,
    Memory,
    Network,
    Row,
    SelfTest,
    Versions,
)
from parwrap.doctor.findings import find
from parwrap.errors import LaunchError
from parwrap.ranks.world import detect

GB = 2**30
INTERFACES = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth1": ["10.0.0.7"]}
NAMES = {"lo": [], "eth1": []}
"""The interfaces of a system that does not say which addresses they have."""
SOUND = Facts(
    host="node7",
    launch=Launch(),
    versions=Versions("3.11.7", "0.1.0", "2.13.0", "12.8", "2.27.3", "2.4.6", "2.5.2"),
    cores=Cores(present=64, usable=64, threads=64),
    memory=Memory(total=512 * GB, available=500 * GB, shared=256 * GB, shared_free=256 * GB),
    limits=Limits(open_files=1024, open_files_most=524288, locked_memory=8 * 2**20),
    gpus=Gpus([Gpu("NVIDIA H100", 80 * GB)] * 2, present=True, driver="570.86.15"),
    network=Network(["10.0.0.7"], INTERFACES, address="10.0.0.7", interface="eth1"),
    backend="nccl",
    device="cuda",
)
TESTED = SelfTest("forked", 2, "nccl", "cuda", [Row(1024, 1e-5, 1e8, 1e8, True)])


def changed(**parts):
    """Sound facts with some fields of some parts changed."""
    return replace(
        SOUND, **{name: replace(getattr(SOUND, name), **part) if isinstance(part, dict) else part for name, part in parts.items()}
    )


def found(*facts, test=TESTED):
    return find(Examination(list(facts) or [SOUND], test))


def launched(*hosts, **parts):
    """The facts of one rank on each of ``hosts``."""
    ranks = [Launch(rank, len(hosts), 0, 1, rank, "torchrun", secret=True) for rank in range(len(hosts))]
    return [replace(changed(launch=launch, cores={"threads": 1}, **parts), host=host) for launch, host in zip(ranks, hosts, strict=True)]


def test_a_sound_machine_has_no_problem():
    assert [] == found()
    assert [] == found(*launched("node7", "node8"), test=replace(TESTED, by="launched"))


@pytest.mark.parametrize(
    ("parts", "problem", "remedy"),
    [
        ({"memory": {"shared": 64 * 2**20, "shared_free": 63 * 2**20}}, "/dev/shm has 63 MB free of 64 MB", "--shm-size=8g"),
        ({"limits": {"open_files": 256}}, "only 256 files may be open", "ulimit -n 524288"),
        ({"limits": {"open_files": 256, "open_files_most": 512}}, "only 256 files", "raise the hard limit, 512"),
        ({"network": {"infiniband": ["mlx5_0"]}}, "InfiniBand (mlx5_0), but only 8 MB of memory may be locked", "ulimit -l unlimited"),
        ({"network": {"gloo": "ib0", "address": None}}, "GLOO_SOCKET_IFNAME names ib0, but this machine has lo, docker0, eth1", "=eth1"),
        ({"network": {"nccl": "ib,mlx"}}, "NCCL_SOCKET_IFNAME=ib,mlx does not match any", "export NCCL_SOCKET_IFNAME=eth1"),
        ({"network": {"nccl": "=eth"}}, "NCCL_SOCKET_IFNAME==eth does not match any", "export NCCL_SOCKET_IFNAME=eth1"),
        ({"cores": {"quota": 4.0}}, "1 rank computes with 64 threads, and the cgroup's limit is 4 cores", "OMP_NUM_THREADS=4"),
        (
            {"launch": Launch(0, 8, 0, 8, launcher="mpi")},
            "8 ranks compute with 64 threads each, and the machine has 64 cores",
            "OMP_NUM_THREADS=8",
        ),
        ({"cores": {"usable": 4}}, "1 rank computes with 64 threads, and it may use 4 of 64 cores: the threads wait", "OMP_NUM_THREADS=4"),
        (
            {"launch": Launch(0, 4, 0, 4, launcher="mpi"), "cores": {"usable": 4, "threads": 8}},
            "each, and each may use 4 of 64",
            "OMP_NUM_THREADS=4",
        ),
        (
            {"launch": Launch(0, 4, 0, 4, launcher="mpi"), "cores": {"usable": 1, "threads": 1}},
            "each rank use 1 core of 64",
            "--cpus-per-task",
        ),
        (
            {"device_error": "local rank 2 has no GPU: the ranks of this node see only 2 GPUs (0, 1). Start fewer."},
            "local rank 2 has no GPU",
            "Start fewer",
        ),
        ({"gpus": Gpus(present=True)}, "an NVIDIA GPU, but no driver is loaded", "check that `nvidia-smi` lists"),
        ({"gpus": Gpus(driver="550.1"), "versions": {"cuda": None}}, "torch 2.13.0 was built without CUDA", "pytorch.org"),
        ({"gpus": Gpus(driver="470.1", error="driver too old")}, "built for CUDA 12.8, cannot use a GPU", "update it"),
    ],
)
def test_one_thing_is_wrong(parts, problem, remedy):
    (finding,) = found(changed(**parts))

    assert problem in finding.problem
    assert remedy in finding.remedy
    assert finding.serious
    assert (0,) == finding.ranks


@pytest.mark.parametrize(
    "parts",
    [
        {"memory": {"shared": None, "shared_free": None}},
        {"limits": {"open_files": None, "open_files_most": None, "locked_memory": None}, "network": {"infiniband": ["mlx5_0"]}},
        {"network": {"nccl": "^docker"}},
        {"network": {"nccl": "eth"}},
        {"network": {"nccl": "=eth1"}},
        {"network": {"gloo": "eth1,lo"}},
        {"network": {"gloo": "lo", "interface": "lo", "address": "127.0.0.1"}},
        {"network": {"address": "127.0.1.1", "interface": "lo"}},
        {"network": {"address": None, "addresses": []}},
        {"cores": {"quota": 4.0, "threads": 4}},
        {"launch": Launch(0, 8, 0, 8, launcher="mpi"), "cores": {"threads": 8}},
        {"launch": Launch(0, 64, 0, 64, launcher="mpi"), "cores": {"usable": 1, "threads": 1}},
        {"gpus": Gpus(), "versions": {"cuda": None}, "backend": "gloo"},
    ],
)
def test_nothing_is_wrong(parts):
    assert [] == found(changed(**parts))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"gpus": Gpus()}, "built for CUDA 12.8 and there is no GPU driver, so ranks train on the CPU"),
        ({"gpus": Gpus(), "versions": {"cuda": "rocm 6.4"}}, "torch was built for ROCm 6.4 and there is no GPU driver"),
        ({"gpus": Gpus(driver="570.1", visible="")}, "CUDA_VISIBLE_DEVICES='' hides the GPUs"),
    ],
)
def test_a_note_is_no_error(parts, problem):
    (finding,) = found(changed(**parts))

    assert problem in finding.problem
    assert not finding.serious


@pytest.mark.parametrize(
    ("variables", "problem", "remedy"),
    [
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE and LOCAL_RANK are not, so", "unset RANK: the process then runs as one rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 and WORLD_SIZE=2 number the nodes of a job", "start the ranks of this node with"),
    ],
)
def test_half_set_launch_variables_are_a_problem_with_the_text_of_the_error(variables, problem, remedy):
    with pytest.raises(LaunchError) as raised:
        detect(variables)
    (finding,) = found(changed(launch={"error": str(raised.value), "variables": variables}))

    assert finding.problem.startswith(problem)
    assert remedy in finding.remedy
    assert finding.problem in str(raised.value)
    assert finding.remedy in str(raised.value)


def test_an_error_without_advice_gets_some():
    (finding,) = found(changed(launch={"error": "RANK=4 does not fit WORLD_SIZE=2: ranks start at 0."}))

    assert "parwrap run" in finding.remedy


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        ({"gloo": "lo", "address": "127.0.0.1", "interface": "lo"}, "gloo listens on the loopback interface of this machine (GLOO_SOCKET_"),
        ({"interfaces": NAMES, "address": "127.0.1.1", "interface": "lo"}, "gloo listens on the loopback"),
        ({"interfaces": NAMES, "address": None, "addresses": []}, "this machine's host name, {host}, does not resolve"),
        (
            {"interfaces": NAMES, "address": None, "addresses": ["10.9.9.9"]},
            "this machine's host name, {host}, resolves to 10.9.9.9, which is not an address of this machine",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_on_several_machines_unless_the_route_is_known(network, problem):
    findings = found(*launched("node7", "node8", network=network), test=replace(TESTED, by="launched"))
    name = "INTERFACE" if "interfaces" in network else "eth1"
    remedy = f"export GLOO_SOCKET_IFNAME={name} on every machine, or map {{host}} to an address of this machine in /etc/hosts"
    known = {**network, "interfaces": INTERFACES, "gloo": None}

    assert [] == found(*launched("node7", "node8", network=known), test=replace(TESTED, by="launched"))
    assert [remedy.format(host=host) for host in ("node7", "node8")] == [finding.remedy for finding in findings]
    assert all(f.serious and f.problem.startswith(problem.format(host=h)) for f, h in zip(findings, ("node7", "node8"), strict=True))


def test_several_machines_without_a_secret():
    ranks = launched("node7", "node8")
    (note,) = found(ranks[0], replace(ranks[1], launch=replace(ranks[1].launch, secret=False)))

    assert note.problem.startswith("PARWRAP_SECRET is not set")
    assert not note.serious
    assert [] == found(*(replace(rank, host="node7", launch=replace(rank.launch, secret=False)) for rank in ranks))


def test_a_problem_of_several_machines_is_said_once_and_one_of_a_machine_not_for_each_of_its_ranks():
    small = {"memory": {"shared": 64 * 2**20, "shared_free": 64 * 2**20}}
    (both,) = found(*launched("node7", "node8", **small))
    (shared,) = found(*launched("node7", "node7", **small))

    assert (0, 1) == both.ranks == shared.ranks


def test_ranks_of_a_machine_are_counted_where_the_launcher_does_not_tell():
    ranks = [changed(launch=Launch(rank, 2, rank, 0, launcher="mpi")) for rank in range(2)]
    (finding,) = found(*ranks)

    assert "2 ranks compute with 64 threads each, and the machine has 64 cores: the threads wait for each other" == finding.problem
    assert "export OMP_NUM_THREADS=32" == finding.remedy


def test_what_differs_between_ranks_is_named_with_its_ranks():
    first, second, third = launched("node7", "node8", "node9")
    other = replace(third, backend="gloo", versions=replace(third.versions, torch="2.12.0"))
    backends, versions = found(first, second, other)

    assert "ranks have different backends: nccl on ranks 0-1; gloo on rank 2" == backends.problem
    assert "ranks have different versions of torch: 2.13.0 on ranks 0-1; 2.12.0 on rank 2" == versions.problem


def test_wrong_sums():
    (finding,) = found(test=replace(TESTED, rows=[*TESTED.rows, Row(2**22, 1e-3, 1e9, 1e9, False)]))

    assert "all-reduces with nccl return wrong sums for 4 MB" == finding.problem
    assert "NCCL_P2P_DISABLE=1" in finding.remedy


def test_clocks():
    clocks = [Clock(1, 0.9, 0.001), Clock(2, 1.2, 0.5), Clock(3, -7.25, 0.001), Clock(4, 61.0, 0.001)]
    behind, ahead = found(test=replace(TESTED, by="launched", clocks=clocks))

    assert behind.problem.startswith("the clock of rank 3 is 7.2 s behind rank 0's")
    assert ahead.problem.startswith("the clock of rank 4 is 61.0 s ahead of rank 0's")
    assert (3,) == behind.ranks
    assert "NTP" in ahead.remedy


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"rows": [], "missing": [3], "stages": {0: "sending rank 0 its facts"}}, "check that all ranks were started"),
        ({"stages": {0: "all-reduce of 1 KB"}}, "NCCL_DEBUG=INFO"),
        ({"failure": "not finished after 60 s: Connection reset by peer"}, "find out why a rank ended"),
        ({"backend": "gloo"}, "GLOO_SOCKET_IFNAME"),
        ({"failure": "not finished after 60 s: Unable to find address for: lo", "rows": []}, "ip link set lo up"),
        ({"by": "forked", "rows": []}, "what the ranks printed above"),
    ],
)
def test_a_failure_says_where_the_ranks_are(changes, remedy):
    test = replace(TESTED, **{"by": "launched", "failure": "not finished after 60 s", **changes})
    (finding,) = found(*launched("node7", "node8"), test=test)

    assert f"the self test with {test.backend} failed: not finished after 60 s" in finding.problem
    assert remedy in finding.remedy
    assert all(f"rank {rank} at: {stage}" in finding.problem for rank, stage in test.stages.items())
    assert all(f"rank {rank} did not join" in finding.problem for rank in test.missing)
