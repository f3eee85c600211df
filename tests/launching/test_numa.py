"""The cores near the GPU of each rank, on a machine that is a folder: two sockets, each with a NUMA node of 8 cores and two GPUs."""

import os
import re
import shutil
from pathlib import Path

import pytest
from torch.numa import binding

from launched import WITHIN
from parwrap.launching import numa
from parwrap.launching.agent import _cores_of_ranks
from parwrap.launching.numa import cores_near, has_several_nodes

UUID = "GPU-0000000{}-aaaa-bbbb-cccc-dddddddddddd"
NEAR, FAR = {0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root, nodes=(0, 0, 1, 1), models=("H100",) * 4):
    """GPU 0 is at the highest address but one, as names are not in the order of NUMA nodes."""
    for index, (node, model) in enumerate(zip(nodes, models, strict=True)):
        address = f"0000:{0x1A + 16 * index:02x}:00.0"
        write(root / f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t {model}\nGPU UUID: \t {UUID.format(index)}")
        write(root / f"sys/bus/pci/devices/{address}/numa_node", node)
    write(root / "sys/devices/system/node/online", "0-1" if max(nodes) else "0")
    for node in range(2):
        write(root / f"sys/devices/system/node/node{node}/cpulist", f"{8 * node}-{8 * node + 7}")
    for core in range(16):
        cpu = root / f"sys/devices/system/cpu/cpu{core}"
        write(cpu / "topology/physical_package_id", core // 8)
        write(cpu / "topology/thread_siblings_list", f"{core // 2 * 2}-{core // 2 * 2 + 1}")
        for level in (1, 2, 3):
            size = min(2**level, 4)
            write(cpu / f"cache/index{level}/level", level)
            write(cpu / f"cache/index{level}/shared_cpu_list", f"{core // size * size}-{core // size * size + size - 1}")


@pytest.fixture
def root(tmp_path, monkeypatch):
    machine(tmp_path / "root")
    monkeypatch.setattr(numa, "ROOT", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(16)})
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["0", "1", "2", "3"], [NEAR, NEAR, FAR, FAR]),
        (["3", "0"], [FAR, NEAR]),
        ([UUID.format(2), UUID.format(1)], [FAR, NEAR]),
        (["GPU-00000003"], [FAR]),
    ],
)
def test_a_rank_runs_on_the_cores_of_the_node_of_its_gpu(root, gpus, expected):
    assert expected == cores_near(gpus, "node")


def test_other_modes_are_those_of_torch(root):
    gpus = ["0", "1", "2", "3"]

    assert [NEAR, NEAR, FAR, FAR] == cores_near(gpus, "socket")
    assert [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}] == cores_near(gpus, "exclusive")
    assert [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}] == cores_near(gpus, "core-complex")


@pytest.mark.skipif(not Path("/sys/devices/system/cpu/cpu0/cache/index0").exists(), reason="the system does not say which caches it has")
@pytest.mark.parametrize("mode", numa.MODES)
def test_on_this_machine_the_cores_are_those_that_torch_chooses(root, monkeypatch, mode):
    monkeypatch.undo()
    shutil.rmtree(root / "sys/devices")
    (root / "sys/devices").symlink_to("/sys/devices")
    for node in root.glob("sys/bus/pci/devices/*/numa_node"):
        write(node, 0)
    monkeypatch.setattr(numa, "ROOT", root)
    device = "device" if hasattr(binding, "_get_device_count") else "gpu"  # before torch 2.15
    monkeypatch.setattr(binding, f"_get_numa_node_index_for_{device}_index", lambda **index: 0)
    monkeypatch.setattr(binding, f"_get_{device}_count", lambda: 2)
    options = binding.NumaOptions(binding.AffinityMode(mode))
    try:
        by_torch = [binding._get_logical_cpus_to_bind_to(**{f"{device}_index": index}, numa_options=options) for index in range(2)]
    except RuntimeError as error:
        pytest.skip(f"torch cannot: {error}")  # as where a GPU would get no core

    assert by_torch == cores_near(["0", "1"], mode)


def test_only_cores_that_this_process_may_use(root, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 4, 9})

    assert [{1, 2, 3, 4}, {9}] == cores_near(["0", "2"], "node")
    assert [{1, 2, 3}, {4}] == cores_near(["0", "1"], "core-complex")
    assert [{1, 2, 3}, {4}] == cores_near(["0", "1"], "exclusive")  # cores 2 and 3 are one physical core
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1})
    with pytest.raises(LookupError, match="may use no core of NUMA node 1, where GPU 2 is"):
        cores_near(["2"], "node")


def test_gpus_of_several_models_are_numbered_by_speed_which_only_cuda_knows(root, monkeypatch):
    machine(root, models=("A100", "A100", "H100", "H100"))
    with pytest.raises(LookupError, match="NVIDIA's driver does not say where GPU 2 is"):
        cores_near(["2"], "node")

    assert [FAR] == cores_near([UUID.format(2)], "node")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [FAR] == cores_near(["2"], "node")


@pytest.mark.parametrize("asked", [None, "node"])
def test_ranks_are_bound_where_there_are_several_nodes_unless_the_option_says_none(root, asked, capsys):
    assert [NEAR, FAR] == _cores_of_ranks(asked, ["0", "2"])
    assert [] == _cores_of_ranks("none", ["0", "2"])
    machine(root, nodes=(0, 0, 0, 0))

    assert [NEAR, NEAR] * bool(asked) == _cores_of_ranks(asked, ["0", "2"])
    assert not has_several_nodes()
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "gpus", "why"), [(None, ["MIG-ab"], "does not say where GPU MIG-ab is"), ("exclusive", [], "torch can use no GPU here")]
)
def test_a_binding_that_fails_ends_nothing_and_is_said(root, asked, gpus, why, capsys):
    assert [] == _cores_of_ranks(asked, gpus)
    assert re.fullmatch(rf"parwrap run: ranks are not bound to the cores near their GPUs: .*{why}\. .*\n", capsys.readouterr().err)


def test_a_system_that_says_nothing_of_nodes_is_left_alone(root, monkeypatch, capsys):
    monkeypatch.setattr(numa, "ROOT", root / "other system")

    assert [] == _cores_of_ranks(None, ["0", "2"])
    assert "" == capsys.readouterr().err


LAUNCHER = """
import os, sys
from pathlib import Path
from parwrap.launching import numa
from parwrap.ranks import device
from parwrap.run import main
if __name__ == "__main__":
    device.gpu_count = lambda: 4
    numa.ROOT = Path("root")
    sys.exit(main(sys.argv[1:]))
"""
TRAINING = """
import os, sys, torch, parwrap
threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
assert all(each == threads[0] for each in threads)
sys.stdout.write(f"{parwrap.rank()} on {sorted(threads[0])} with {os.environ['CUDA_VISIBLE_DEVICES']}, {torch.get_num_threads()}\\n")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_ranks_run_there_from_their_start(started, script, tmp_path, start_method):
    one, other = sorted(os.sched_getaffinity(0))[:2]
    machine(tmp_path / "root")
    write(tmp_path / "root/sys/devices/system/node/node0/cpulist", one)
    write(tmp_path / "root/sys/devices/system/node/node1/cpulist", other)
    options = ["--nproc-per-node", "2", "--all-ranks", "--start-method", start_method]
    stdout, stderr = started(script(LAUNCHER, "launcher.py"), *options, script(TRAINING)).communicate(timeout=WITHIN)

    on = sorted(re.findall(r"\d on .*", stdout))
    assert [f"0 on [{one}] with 0, 1", f"1 on [{one}] with 1, 1"] == on, stderr
