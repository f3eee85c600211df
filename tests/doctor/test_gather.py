"""Facts of this machine, against what other tools say of it."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata

import psutil
import pytest
import torch

from parwrap.doctor import gather as gathering
from parwrap.doctor.facts import Facts, Gpu, Gpus
from parwrap.doctor.gather import find_gpus, find_network, gather


def test_this_machine():
    facts = gather({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "HOME": "/"}, backend="gloo")

    assert (socket.gethostname(), "gloo") == (facts.host, facts.backend)
    assert (3, 4, 1, 2, None) == tuple(getattr(facts.launch, name) for name in ("rank", "size", "local_rank", "local_size", "error"))
    assert {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} == facts.launch.variables
    assert ".".join(map(str, sys.version_info[:3])) == facts.versions.python
    assert (torch.__version__, metadata.version("wrapt")) == (facts.versions.torch, facts.versions.wrapt)
    assert (psutil.cpu_count(), torch.get_num_threads()) == (facts.cores.present, facts.cores.threads)
    assert facts.limits.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and /dev/shm")
def test_memory():
    memory = gather({}).memory

    assert psutil.virtual_memory().total == memory.total
    assert shutil.disk_usage("/dev/shm").total == memory.shared >= memory.shared_free
    assert memory.limit is None or memory.limit < memory.total


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "250000 100000", "/sys/fs/cgroup/memory.max": "1073741824"}, 2.5, 2**30),
        (
            {"/proc/self/cgroup": "0::/job/7", "/sys/fs/cgroup/job/7/cpu.max": "max 100"},
            None,
            None,
        ),
        (
            {
                "/proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n0::/",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096",
            },
            4.0,
            4096,
        ),
        (
            {
                "/proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1",  # paths of the host, seen in the container
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "/proc/meminfo": "MemTotal:       1024 kB",
            },
            None,
            None,
        ),
        (  # SLURM limits the job and the step, not the task in it
            {
                "/proc/self/cgroup": "0::/slurmstepd.scope/job_7/step_0/user/task_0",
                "/sys/fs/cgroup/slurmstepd.scope/job_7/memory.max": "8192",
                "/sys/fs/cgroup/slurmstepd.scope/job_7/step_0/memory.max": "4096",
                "/sys/fs/cgroup/slurmstepd.scope/job_7/step_0/cpu.max": "200000 100000",
                "/sys/fs/cgroup/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max",
                "/sys/fs/cgroup/slurmstepd.scope/job_7/step_0/user/task_0/cpu.max": "max 100000",
            },
            2.0,
            4096,
        ),
        ({"/proc/self/cgroup": "of another system"}, None, None),
        ({}, None, None),
    ],
)
def test_limits_of_cgroups_of_both_versions(monkeypatch, files, quota, limit):
    # this machine has one version only
    monkeypatch.setattr(gathering, "_read", lambda path: files.get(str(path), ""))

    assert (quota, limit) == (gathering._quota(), gathering._memory().limit)


def test_facts_come_back_from_json_as_they_were():
    facts = replace(gather({"RANK": "1"}), gpus=Gpus([Gpu("H100", 80)], True))

    assert facts == replace(Facts.of_json(json.loads(json.dumps(asdict(facts)))), launch=facts.launch)


def test_half_set_variables_are_a_fact_and_no_exception():
    facts = gather({"RANK": "1"})

    assert "RANK is set but" in facts.launch.error
    assert ({"RANK": "1"}, 1) == (facts.launch.variables, facts.launch.size)


def test_interfaces_are_psutils():
    families = (socket.AF_INET, socket.AF_INET6)
    expected = {
        name: {address.address.partition("%")[0] for address in addresses if address.family in families}
        for name, addresses in psutil.net_if_addrs().items()
    }

    found = {name: set(addresses) for name, addresses in find_network({}).interfaces.items()}
    assert {name: addresses for name, addresses in expected.items() if addresses} == {
        name: addresses for name, addresses in found.items() if addresses
    }


def test_a_machine_without_ipv4_a_resolver_or_a_list_of_interfaces_is_no_exception(monkeypatch):
    """Made up, since this one has all of them."""

    def refused(*args, **options):
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "if_nameindex", refused)
    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 64)  # of which getaddrinfo raises a UnicodeError

    assert ([], None) == (find_network({}).addresses, find_network({}).address)
    assert "127.0.0.1" not in str(find_network({}).interfaces)


def test_the_versions_of_optional_packages():
    extras = gather({}).versions.extras

    assert ["torchdata", "torchmetrics", "pytest", "PyYAML", "ray"] == list(extras)
    assert metadata.version("PyYAML") == extras["PyYAML"]


def test_gloo_listens_where_the_variable_says():
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    found = find_network({"GLOO_SOCKET_IFNAME": f"{loopback},eth9", "NCCL_SOCKET_IFNAME": "eth"})

    assert (loopback, "127.0.0.1", "eth") == (found.interface, found.address, found.nccl)
    assert find_network({"GLOO_SOCKET_IFNAME": "no-such"}).address is None


@pytest.mark.parametrize(
    ("leads_to", "address", "interface"),
    [
        (["127.0.0.1"], "127.0.0.1", "lo"),
        (["127.0.1.1"], "127.0.1.1", "lo"),  # Debian's /etc/hosts
        (["203.0.113.5", "127.0.0.1"], "127.0.0.1", "lo"),
        (["203.0.113.5"], None, None),  # of a net that is for examples
        ([], None, None),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have 127.0.0.1 alone")
def test_gloo_listens_where_the_name_of_the_host_leads_if_that_is_here(monkeypatch, leads_to, address, interface):
    def getaddrinfo(host, port, type):
        if not leads_to:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", (each, 0)) for each in leads_to]

    monkeypatch.setattr(gathering.socket, "getaddrinfo", getaddrinfo)
    found = find_network({})

    assert (leads_to, address, interface) == (found.addresses, address, interface)
    assert (address, interface) == (found.address, found.interface)


def test_why_torch_has_no_gpu_is_asked_in_another_process(monkeypatch):
    # torch as if it were built for CUDA: what it answers is its own text
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = find_gpus({"CUDA_VISIBLE_DEVICES": "0"})

    assert [] == found.seen
    assert "CUDA" in found.error or "NVIDIA" in found.error
    assert "0" == found.visible
    assert not torch.cuda.is_initialized()


def test_a_driver_that_hangs_or_kills_is_reported(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(gathering, "DRIVER_TIMEOUT", 0.2)
    monkeypatch.setattr(gathering, "_answer", lambda answer: __import__("time").sleep(60))
    assert "the driver did not answer within 0.2 s" == find_gpus({}).error

    monkeypatch.setattr(gathering, "DRIVER_TIMEOUT", 30)
    monkeypatch.setattr(gathering, "_answer", lambda answer: os._exit(7))
    assert "the process that started CUDA ended with exit code 7" == find_gpus({}).error


def test_the_topology_is_nvidias_without_its_legend(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"  # the real one needs a GPU
    tool.write_text("#!/bin/sh\nprintf '\\t\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0\\t X \\tSYS\\n\\nLegend:\\n\\n  X = Self\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "\tGPU0\tGPU1\nGPU0\t X \tSYS" == gathering._topology()

    tool.write_text("#!/bin/sh\nexit 9\n")
    assert subprocess.run(["nvidia-smi"]).returncode == 9
    assert gathering._topology() is None
