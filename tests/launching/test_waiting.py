"""A node that waits for others says so: how many have come, and what is to be run for those that have not."""

import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from parwrap.launching.waiting import command_there, reporting_wait
from planning import plan

pytestmark = pytest.mark.usefixtures("scripts")

WITHIN = 10
"""Seconds, far above what any of these takes."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("parwrap.launching.waiting.REPORT_AFTER", 0.05)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu3")


@pytest.fixture
def server():
    """Where nodes meet: the first has one of its own on this port, which within a process is this one."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


@pytest.fixture
def place(server):
    return ("--master-addr", "127.0.0.1", "--master-port", str(server.port))


def wait(where, handler=None) -> None:
    """Wait until nodes have met, but not for long, ``where`` a plan says."""
    with suppress(RendezvousTimeoutError), reporting_wait(where, handler):
        if handler:
            handler.next_rendezvous()


@contextmanager
def come(server, *nodes):
    """While this is held, these nodes have come, and wait."""
    threads = [threading.Thread(target=wait, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    server.wait([f"parwrap/come/{node.torchrun.node_rank}" for node in nodes])
    yield
    for thread in threads:
        thread.join(WITHIN)


def test_the_first_node_says_which_numbers_are_missing(server, place, capsys):
    options = ("--nnodes", "4", *place, "--timeout", "0.6")
    with come(server, plan(*options, "--node-rank=2", "train.py")):
        wait(plan(*options, "--nproc-per-node", "8", "train.py", "--name", "a b"))
    *_, text = capsys.readouterr().err.splitlines()

    assert text == (
        f"parwrap: node 0 (gpu3) waits at 127.0.0.1 port {place[-1]} for nodes 1 and 3; 2 of 4 nodes have joined. Run this on node 1: "
        f"parwrap run --nnodes 4 --node-rank 1 --master-addr 127.0.0.1 --master-port {place[-1]} --timeout 0.6 "
        "--nproc-per-node 8 train.py --name 'a b'"
    )


def test_of_many_nodes_the_first_missing_are_listed(place, capsys):
    wait(plan("--nnodes", "9", *place, "--timeout", "0.4", "train.py"))

    assert " for nodes 1, 2, 3, 4 and 4 more; 1 of 9 nodes have joined. " in capsys.readouterr().err


def test_a_first_node_with_anothers_address_says_so(place, capsys):
    """It meets nobody, for the others go to that address."""
    wait(plan("--nnodes", "2", "--master-addr", "192.0.2.1", *place[2:], "--timeout", "0.4", "train.py"))

    assert (
        "1 of 2 nodes have joined. 192.0.2.1 is not an address of this machine, but must be an address of --node-rank 0. Run this on "
        "node 1: "
    ) in (capsys.readouterr().err)


def test_nothing_is_said_by_other_nodes_or_when_all_have_come(server, place, capsys):
    options = ("--nnodes", "3", *place)
    nodes = [plan(*options, "--node-rank", str(number), "train.py") for number in range(3)]
    with come(server, *nodes[1:]):
        time.sleep(0.2)
        wait(nodes[0])

    assert "" == capsys.readouterr().err


@pytest.mark.slow
def test_where_nodes_are_numbered_as_they_come_it_is_said_how_many_are_missing(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    asked = RendezvousParameters("c10d", place, "1", 2, 2, is_host=1, join_timeout=1)
    backend, store = create_backend(asked)
    handler = create_handler(store, backend, asked)
    wait(plan("--nnodes", "2:3", "--rdzv-endpoint", place, "--rdzv-id=1", "--local-addr", "gpu3", "train.py"), handler)

    assert capsys.readouterr().err == (
        f"parwrap: gpu3 waits at {place.replace(':', ' port ')} for 1 more; 1 of 2 nodes have joined. Run this on each missing node: "
        f"parwrap run --nnodes 2:3 --rdzv-endpoint {place} --rdzv-id 1 train.py\n"
    )


@pytest.mark.parametrize(
    ("argv", "environ", "command"),
    [
        (
            ["--nnodes=2", "--node_rank", "0", "--master_addr=there", "--seed", "3", "-m", "recipes.digits", "--node-rank", "9"],
            {},
            "--nnodes 2 --node-rank 1 --master-addr there --seed 3 -m recipes.digits --node-rank 9",
        ),
        (
            ["train.py"],
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "7"},
            "--nnodes 2 --node-rank 1 --master-addr job-0 --master-port 7 train.py",
        ),
        (
            ["--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", "there:7", "train.py"],
            {},
            "--nnodes 2 --node-rank 1 --rdzv-backend static --rdzv-endpoint there:7 train.py",
        ),
    ],
)
def test_the_command_for_another_node(argv, environ, command):
    assert f"parwrap run {command}" == command_there(plan(*argv, **environ), 1)
