"""The text: what ranks share is said once, what differs is said with whose it is."""

from dataclasses import replace

from parwrap.doctor.facts import Clock, Cores, Examination, Facts, Gpu, Gpus, Launch, Limits, Memory, Network, Row, SelfTest, Versions
from parwrap.doctor.findings import find
from parwrap.doctor.report import report

GB = 2**30
FACTS = Facts(
    host="node7",
    launch=Launch(0, 4, 0, 2, 0, "torchrun", "env://", variables={"RANK": "0", "WORLD_SIZE": "4", "ROLE_NAME": "default"}, secret=True),
    versions=Versions("3.11.7", "0.1.0", "2.13.0", "12.8", "2.27.3", "2.4.6", "2.5.2", {"torchdata": "0.11.0", "datasets": None}),
    cores=Cores(64, 16, quota=32.0, threads=4),
    memory=Memory(512 * GB, 500 * GB, 64 * GB, 256 * GB, 255 * GB),
    limits=Limits(65536, 65536, None),
    gpus=Gpus([Gpu("NVIDIA H100", 80 * GB)] * 2, True, "570.86.15", apart=[(0, 1)], topology="        GPU0    GPU1\nGPU0     X      SYS"),
    network=Network(["10.0.0.7"], {"eth1": ["10.0.0.7"]}, ["mlx5_0"], nccl="eth1", address="10.0.0.7", interface="eth1"),
    backend="nccl",
    device="cuda",
)
ROWS = [Row(1024, 2e-5, 5.12e7, 7.68e7, True), Row(2**26, 3e-3, 2.24e10, 3.36e10, True)]

EXPECTED = """\
parwrap    ranks 0-2: 0.1.0, python 3.11.7, torch 2.13.0 built for CUDA 12.8, NCCL 2.27.3, numpy 2.4.6, wrapt 2.5.2
parwrap    rank 3: 0.1.0, python 3.11.7, torch 2.12.0 built for CUDA 12.8, NCCL 2.27.3, numpy 2.4.6, wrapt 2.5.2
extras     torchdata 0.11.0; not here: datasets
host       node7 (ranks 0-1); memory 512 GB, limited to 64 GB; /dev/shm 256 GB, 255 GB free; open files 65536
host       node8 (ranks 2-3); memory 512 GB, limited to 64 GB; /dev/shm 64 MB, 64 MB free; open files 65536
cores      16 usable of 64, limited to 32 cores' time; torch computes with 4 threads; num_workers=16 on each of 2 ranks is one for each core
GPUs       0: NVIDIA H100, 80 GB; 1: NVIDIA H100, 80 GB; no peer access between 0-1; NVIDIA driver 570.86.15
                   GPU0    GPU1
           GPU0     X      SYS
network    gloo listens at eth1 (10.0.0.7), where the host name resolves to; NCCL_SOCKET_IFNAME=eth1; InfiniBand mlx5_0
launch     torchrun: 4 ranks; rank 0 has RANK=0 WORLD_SIZE=4
chosen     nccl on cuda
self test  4 launched ranks, nccl on cuda: all sums right
           all-reduce        time   algorithm         bus
                 1 KB       20 us   0.05 GB/s   0.08 GB/s
                64 MB     3000 us  22.40 GB/s  33.60 GB/s
clocks     at most 4000.0 ms from rank 0's (rank 2), measured to within 0.2 ms
problem    ranks 2-3 on node8: /dev/shm has 64 MB free of 64 MB: """


def ranks():
    launches = [
        Launch(rank, 4, rank % 2, 2, rank // 2, "torchrun", "env://", variables=FACTS.launch.variables, secret=True) for rank in range(4)
    ]
    first, second, third, fourth = (replace(FACTS, launch=launch) for launch in launches)
    other = {"host": "node8", "memory": replace(FACTS.memory, shared=2**26, shared_free=2**26), "gpus": replace(FACTS.gpus, topology=None)}
    return [first, second, replace(third, **other), replace(fourth, **other, versions=replace(FACTS.versions, torch="2.12.0"))]


def test_ranks_of_two_machines():
    test = SelfTest("launched", 4, "nccl", "cuda", ROWS, [Clock(1, 0.0, 0.0001), Clock(2, -4.0, 0.0002), Clock(3, 0.5, 0.0002)])
    outcome = Examination(ranks(), test)
    lines = report(outcome, find(outcome)).splitlines()

    assert EXPECTED.splitlines()[:-1] == lines[:17]
    assert lines[17].startswith(EXPECTED.splitlines()[-1])
    assert ["problem"] * 3 == [line.split()[0] for line in lines[17:]]
    assert "ranks have different versions of torch: 2.13.0 on ranks 0-2; 2.12.0 on rank 3. Remedy: install" in lines[18]
    assert "rank 2 on node8: the clock of rank 2 is 4.0 s behind" in lines[19]


def test_a_failed_self_test_of_one_process_without_gpus():
    alone = replace(FACTS, launch=Launch(), gpus=Gpus(), versions=replace(FACTS.versions, cuda=None), backend="gloo", device="cpu")
    outcome = Examination([alone], SelfTest("forked", 2, "gloo", "cpu", failure="not finished after 60 s"))
    text = report(outcome, find(outcome))

    assert (
        "\n"
        "launch     started directly: one rank\n"
        "chosen     gloo on cpu\n"
        "self test  2 forked ranks, gloo on cpu: failed\n"
        "problem    the self" in text
    )
    assert "\nGPUs       none that torch can use\n" in text
    assert "problems" not in text


def test_no_problem_is_said():
    alone = replace(FACTS, launch=Launch())
    assert report(Examination([alone], SelfTest("forked", 2, "nccl", "cuda", ROWS)), []).endswith("\nproblems   none")


def test_the_cores_of_a_machine_are_divided_among_the_ranks_that_its_gpus_get():
    alone = replace(FACTS, launch=Launch(), cores=Cores(64, 64, threads=1))
    assert "; num_workers=32 on each of 2 ranks" in report(Examination([alone], SelfTest("forked", 2, "nccl", "cuda", ROWS)), [])
