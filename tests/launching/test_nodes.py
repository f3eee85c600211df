"""Jobs on two hosts: network namespaces with names, addresses and disks of their own. A run takes seconds, so it says much."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from torch.distributed import HashStore

from launched import ended_with_the_test
from parwrap.launching.failures import Failure
from parwrap.launching.nodes import Nodes
from parwrap.ranks.store import SignedStore

ROOT = Path(__file__).parents[2]
WITHIN = 120
"""Seconds, far above what any of these takes."""
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOGLEVEL")} | {"PYTHONPATH": str(ROOT)}
COMMAND = (sys.executable, "-m", "parwrap.run", "--nproc-per-node")


class Host:
    """A network namespace. By its own name, as on Debian, a host knows no address of its own but one of the loopback."""

    def __init__(self, name: str, known: Path) -> None:
        self.name, self._known, self._processes = name, known, []

    def start(self, directory: Path, *command: str, own_disk: bool = False) -> subprocess.Popen:
        """Start a command in ``directory``; if the host has its ``own_disk``, that is a copy."""
        copied = 'cp -r . "$0.disk" && mount --bind "$0.disk" . && cd "$PWD" && ' if own_disk else ""
        inside = f'hostname {self.name} && mount --bind {self._known} /etc/hosts && {copied}exec "$@"'
        command = ("unshare", "-um", "sh", "-c", inside, f"{directory}/../{self.name}", *command)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=directory,
            env=ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        ending = threading.Timer(WITHIN, process.kill)  # or a line that never comes would be waited for
        ending.daemon = True
        ending.start()
        return process

    def remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        ip("netns", "del", self.name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path_factory):
    """Two hosts at 10.77.0.1 and 10.77.0.2, and at fd77::1 and fd77::2."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("no iproute2 or util-linux here")
    made = []
    try:
        for number in (1, 2):
            known = tmp_path_factory.mktemp("etc") / "hosts"
            host = Host(f"pw{os.getpid()}-{number}", known)
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(host)
        first, second = (host.name for host in made)
        for mine, (other, address) in ((0, (second, "10.77.0.2")), (1, (first, "10.77.0.1"))):
            made[mine]._known.write_text(f"127.0.0.1 localhost\n127.0.1.1 {made[mine].name}\n{address} {other}\n")
        ip("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for number, host in enumerate(made, 1):
            ip("-n", host.name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", host.name, "addr", "add", f"fd77::{number}/64", "dev", "wire", "nodad")
            for link in ("wire", "lo"):
                ip("-n", host.name, "link", "set", link, "up")
        yield made
    finally:
        for host in made:
            host.remove()


def ended(*processes: subprocess.Popen) -> list[tuple[int, str, str]]:
    """The exit codes, stdouts and stderrs of ``processes``, which end."""
    said = [process.communicate(timeout=WITHIN) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


TRAINING = """
import json, os, socket, sys, parwrap
from parwrap.ranks.group import current
world, folder = current().world, current().folder
sees = [world.node_rank, world.local_rank, world.local_size, os.environ["GLOO_SOCKET_IFNAME"], oct(folder.stat().st_mode)]
everywhere = parwrap.gather([[*sees, parwrap.reduce_sum(1.0)], str(folder)])
if parwrap.rank() == 0:
    with open("seen.json", "w") as file:
        json.dump(everywhere, file)
    print("trained")
"""


def test_two_nodes_meet_on_the_interface_between_them(tmp_path, hosts):
    (tmp_path / "train.py").write_text(TRAINING)
    options = ("--nnodes", "2", "--master-addr", hosts[0].name, "--log-dir", str(tmp_path / "logs"))
    processes = [
        host.start(tmp_path, *COMMAND, str(2 - rank), *options, "--node-rank", str(rank), "train.py") for rank, host in enumerate(hosts)
    ]
    first, second = ended(*processes)
    seen = json.loads((tmp_path / "seen.json").read_text())

    assert [(0, "trained\n", ""), (0, "", "")] == [first, second]
    assert [[node, local, 2 - node, "wire", "0o40700", 3.0] for node, local in ((0, 0), (0, 1), (1, 0))] == [sees for sees, _ in seen]
    assert 2 == len({folder for _, folder in seen})
    assert ["trained\n", "", ""] == [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in range(3)]


BY_ANOTHER_LAUNCHER = """
import os, parwrap

@parwrap.distributed(timeout=60)
def train():
    print(parwrap.rank(), parwrap.reduce_sum(1.0), *(os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "TP", "NCCL")))

train()
print(os.environ.get("GLOO_SOCKET_IFNAME"))
"""


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_of_other_launchers_find_the_interface_too(tmp_path, hosts, launcher):
    """Each host's own name leads to its loopback, so plain gloo would listen where the other cannot reach it."""
    (tmp_path / "train.py").write_text(BY_ANOTHER_LAUNCHER)
    given = {
        "torchrun": "RANK={0} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK={0} TORCHELASTIC_RUN_ID=1 "
        f"MASTER_ADDR={hosts[0].name} MASTER_PORT=29481",
        "srun": "SLURM_PROCID={0} SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID={0} SLURM_NNODES=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 "
        f"SLURM_STEP_NODELIST={hosts[0].name},{hosts[1].name}",
    }[launcher]
    commands = [("env", *given.format(rank).split(), sys.executable, "train.py") for rank in range(2)]
    first, second = ended(*(host.start(tmp_path, *command) for host, command in zip(hosts, commands, strict=True)))

    assert (0, "0 2.0 wire wire None\nNone\n") == first[:2], first
    assert (0, "None\n") == second[:2], second  # inside, only rank 0 speaks


@pytest.mark.slow
def test_nodes_with_different_secrets_refuse_each_other(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")
    with ended_with_the_test() as start:
        nodes = [
            start(*COMMAND, "1", *options, "train.py", cwd=tmp_path, env={**ENVIRON, "PARWRAP_SECRET": secret}) for secret in ("one", "two")
        ]
        for status, _, told in ended(*nodes):
            assert 2 == status
            assert "in the store of the job has a wrong signature: another job or program writes into this store" in told, told


FAILING = """
import time, parwrap
if parwrap.rank() == 1:
    parwrap.barrier()
    time.sleep(1)
    raise ValueError("rank one is unhappy")
parwrap.barrier()
print("waiting", flush=True)
parwrap.barrier()
"""


def test_a_failure_on_one_node_ends_the_other_and_is_told_on_both(tmp_path, hosts):
    (tmp_path / "train.py").write_text(FAILING)
    options = ("--nnodes", "2", "--rdzv-endpoint", "[fd77::1]:29477")
    first, second = ended(*(host.start(tmp_path, *COMMAND, "1", *options, "train.py") for host in hosts))

    assert [(1, "waiting\n"), (1, "")] == [first[:2], second[:2]]
    for _, _, stderr in (first, second):
        told = f"rank 1 of 2 on node 1 ({hosts[1].name}) failed:\nTraceback (most recent call last):\n  File "
        assert told in stderr
        assert stderr.endswith("\nValueError: rank one is unhappy\n")


WAITING = """
import sys, time, torch
print("up", flush=True)
time.sleep(99)
"""


@pytest.mark.slow
def test_a_node_that_is_lost_is_given_up(tmp_path, hosts):
    (tmp_path / "train.py").write_text(WAITING)
    options = ("--nnodes", "2", "--master-addr", "10.77.0.1", "--all-ranks", "--timeout", "4")
    processes = [host.start(tmp_path, *COMMAND, "1", *options, "--node-rank", str(rank), "train.py") for rank, host in enumerate(hosts)]
    up = [process.stdout.readline() for process in processes]
    processes[1].send_signal(signal.SIGKILL)
    (status, _, stderr), _ = ended(*processes)

    assert ["[rank 0] up\n", "[rank 1] up\n"] == up
    assert 1 == status
    assert f"parwrap: no heartbeat from node 1 ({hosts[1].name}) for 4 s\n" == stderr


ELASTIC = """
import os, time, parwrap
print("ranks:", parwrap.world_size(), flush=True)
while not parwrap.any_rank(os.path.exists("enough")):
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_nodes_come_and_go(tmp_path, hosts):
    (tmp_path / "train.py").write_text(ELASTIC)
    options = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-endpoint", "10.77.0.1:29478")
    quickly = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1")
    first, *others = [host.start(tmp_path, *COMMAND, "1", *options, *quickly, "train.py") for host in hosts[:1]]
    sizes = [first.stdout.readline()]
    for goes in (True, False):
        other = hosts[1].start(tmp_path, *COMMAND, "1", *options, *quickly, "train.py")
        others.append(other)
        sizes.append(first.stdout.readline())
        if goes:
            other.send_signal(signal.SIGTERM)
            sizes.append(first.stdout.readline())
    (tmp_path / "enough").touch()
    (status, _, stderr), left, back = ended(first, *others)

    assert ["ranks: 1\n", "ranks: 2\n", "ranks: 1\n", "ranks: 2\n"] == sizes
    assert [0, 128 + signal.SIGTERM, 0] == [status, left[0], back[0]]
    here, there = (f"node {number} ({host.name})" for number, host in enumerate(hosts))
    assert [line for line in stderr.splitlines() if line.startswith("parwrap: ")] == [
        f"parwrap: the ranks start again, on {here}, {there}",
        f"parwrap: {there} was stopped by SIGTERM",
        f"parwrap: the ranks start again, on {here}",
        f"parwrap: the ranks start again, on {here}, {there}",
    ]


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def alone(directory: Path, *options: str) -> tuple[int, str]:
    """A node that no other joins."""
    (directory / "train.py").touch()
    command = [*COMMAND, "1", "--nnodes", "2", "--timeout", "1", *options, "train.py"]
    run = subprocess.run(command, cwd=directory, env=ENVIRON, capture_output=True, text=True, timeout=WITHIN)
    return run.returncode, run.stderr


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_missing_nodes_are_reported(tmp_path, backend):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = ("--master-addr", "127.0.0.1", "--master-port", str(port)) if backend == "static" else ("--rdzv-endpoint", f"127.0.0.1:{port}")

    assert alone(tmp_path, *place) == (
        2,
        f"parwrap run: fewer than 2 nodes joined at 127.0.0.1 port {port} in time: check that all nodes were started with the same "
        "--nnodes and --rdzv-id, and that the first node has that address.\n",
    )


def test_a_port_in_use_is_reported(tmp_path, port):
    assert alone(tmp_path, "--master-addr", "127.0.0.1", "--master-port", str(port)) == (
        2,
        f"parwrap run: port {port} of this machine is in use, by another job or by a node with the same --node-rank: choose another "
        "port, the same on all nodes.\n",
    )


MEETING = """
import torch
print("up", flush=True)
while True:
    torch.distributed.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_another_kind_of_server_at_the_port_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()
        place = ("--master-addr", address, "--master-port", str(port), "--node-rank", "1")

        assert alone(tmp_path, *place) == (
            2,
            f"parwrap run: the server at {address} port {port} does not answer like the first node of a job: check that --master-addr "
            "and --master-port are the address and port of --node-rank 0, and that no other server uses this port.\n",
        )


@contextmanager
def two_nodes_up(directory: Path, script: str) -> Iterator[list[subprocess.Popen]]:
    """Two nodes of a rank each, on this machine, that have come as far as the line in which ``script`` says that it is up."""
    (directory / "train.py").write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--all-ranks")
    with ended_with_the_test() as start:
        nodes = [start(*COMMAND, "1", *options, "--node-rank", str(rank), "train.py", cwd=directory, env=ENVIRON) for rank in (0, 1)]
        assert ["[rank 0] up\n", "[rank 1] up\n"] == [node.stdout.readline() for node in nodes]
        yield nodes


@pytest.mark.slow
def test_a_node_that_is_killed_is_named_where_its_ranks_are_missed(tmp_path):
    with two_nodes_up(tmp_path, MEETING) as nodes:
        nodes[1].kill()
        status, _, told = ended(nodes[0])[0]

    assert 1 == status
    assert told.startswith(
        f"parwrap: no answer from node 1 ({socket.gethostname()}): look there first, because "
        "ranks here lose their connection to a node that stops\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "number"),
    [
        (WAITING, signal.SIGTERM),
        (MEETING, signal.SIGINT),
    ],
)
def test_the_other_nodes_report_that_the_first_was_stopped(tmp_path, script, number):
    """It keeps the store by which they hear of it. What their ranks miss then is a line each, and no traceback."""
    with two_nodes_up(tmp_path, script) as nodes:
        nodes[0].send_signal(number)
        first, (status, _, told) = ended(*nodes)
        lost, *later = told.splitlines()

    assert (128 + number, 1) == (first[0], status)
    assert f"parwrap: node 0 ({socket.gethostname()}) was stopped by {number.name}" == lost
    assert all(line.startswith(f"rank 1 of 2 on node 1 ({socket.gethostname()}) failed later at train.py:5: ") for line in later), told
    assert len(later) <= (0 if script == WAITING else 1)  # if it is not stopped first


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "parwrap run: interrupted\n"), pytest.param(signal.SIGTERM, "", marks=pytest.mark.slow)]
)
def test_a_node_that_waits_for_others_can_be_stopped(tmp_path, number, said):
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with ended_with_the_test() as start:
        options = ("--nnodes", "2", "--master-addr", address[0], "--master-port", str(address[1]))
        node = start(*COMMAND, "2", *options, "train.py", cwd=tmp_path, env=ENVIRON)
        while socket.socket().connect_ex(address):
            time.sleep(0.01)
        node.send_signal(number)

        assert [(128 + number, "", said)] == ended(node)


@pytest.mark.parametrize(
    ("exception", "said"),
    [
        ("LockstepError: the connection to another rank has closed", "parwrap: node 0 (a) was stopped by SIGTERM\n"),
        ("ValueError: mine", ""),
    ],
)
def test_ranks_that_are_lost_before_a_node_can_say_that_it_is_stopped_wait_for_its_word(tmp_path, exception, said, capsys):
    """Its own ranks are lost before it can say so. A failure that has another cause is not explained by it."""
    store, nodes = HashStore(), []
    for mine in (0, 1):
        (tmp_path / str(mine)).mkdir()
        node = Nodes(tmp_path / str(mine), {}, 60, nullcontext)
        node._mine, node._names, node._answered = mine, ["node 0 (a)", "node 1 (b)"], time.monotonic()
        node._store = SignedStore(store, "start 0")
        nodes.append(node)
    failure = Failure(rank=1, size=2, attempt=0, time=1.0, ending="raised", status=1, exception=exception)
    failure.write(tmp_path / "1")
    exchange = threading.Thread(target=nodes[1].exchange)
    exchange.start()
    while exchange.is_alive() and not nodes[1]._store.has("failed"):
        time.sleep(0.01)  # the store has no wait for a signed value
    nodes[0].leave(signal.SIGTERM)
    exchange.join()

    assert (said, bool(said)) == (capsys.readouterr().err, nodes[1].lost)
