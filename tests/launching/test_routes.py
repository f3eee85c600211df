"""Which way leads to the other nodes, and what is said when none does. Between two hosts it is tried out in ``test_node_monitor.py``."""

import errno
import os
import re
import socket
import threading
import time

import psutil
import pytest

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.plan import LaunchPlan, plan_launch
from parwrap.launching.routes import (
    await_rendezvous,
    check_interfaces,
    endpoint,
    interface_variables,
    unreachable,
    with_way,
)
from parwrap.ranks.network import OF_GLOO, interface_of, way_to


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def plan(*argv: str) -> LaunchPlan:
    return plan_launch(["--nproc-per-node", "2", *argv, "train.py"], {}, 0, 8)


def addresses() -> list[tuple[str, str]]:
    """The addresses of this machine, each with the name of its interface, by another library."""
    internet = (socket.AF_INET, socket.AF_INET6)
    return [
        (each.address.partition("%")[0], name) for name, all in psutil.net_if_addrs().items() for each in all if each.family in internet
    ]


def outer_address() -> str:
    """An address of this machine that is not its loopback's."""
    found = [address for address, name in addresses() if name != "lo" and ":" not in address]
    return found[0] if found else pytest.skip("this machine has no network interface but its loopback")


@pytest.mark.parametrize(("address", "name"), addresses())
def test_the_interface_of_an_address(address, name):
    assert name == interface_of(address)


def test_the_interface_of_an_address_elsewhere_is_not_known():
    assert interface_of("192.0.2.1") is None


def test_the_way_to_this_machine_itself():
    outer = outer_address()
    way = way_to(outer, 29500)

    assert (outer, True) == (way.here, way.own)
    assert "lo" == way_to("localhost", 29500).interface


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--master-addr", "there"], ("there", 29500)),
        (["--master-addr", "fd00::1", "--master-port", "29501"], ("fd00::1", 29501)),
        (["--rdzv-endpoint", "there"], ("there", 29400)),
        (["--nnodes", "1", "--rdzv-backend", "c10d"], ("localhost", 29400)),
        (["--rdzv-endpoint", "[fd00::1]:29401"], ("fd00::1", 29401)),
    ],
)
def test_where_a_job_meets(options, place):
    assert place == endpoint(plan("--nnodes", "2", *options).torchrun)


def test_a_place_that_cannot_be_read_is_refused():
    with pytest.raises(UsageError, match="'there:port' must be an integer between 0 and 65536"):
        endpoint(plan("--nnodes", "2", "--rdzv-endpoint", "there:port").torchrun)


def test_what_follows_from_the_way_is_added_to_the_plan():
    here, interface = next(each for each in addresses() if each[0] == outer_address())
    with socket.create_server((here, 0)) as taken:
        port = taken.getsockname()[1]
        guest = with_way(plan("--nnodes", "2", "--rdzv-endpoint", f"{here}:{port}"), {})
    host = with_way(plan("--nnodes", "2", "--rdzv-endpoint", f"{here}:{port}", "--rdzv-conf", "join_timeout=9"), {})

    assert (host.torchrun.local_addr, host.torchrun.rdzv_conf) == (here, "join_timeout=9,is_host=1")
    assert [interface, None, interface] == [host.variables.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL", "TP")]
    assert "is_host=0" == guest.torchrun.rdzv_conf  # another node on this machine is the host


def test_what_the_user_has_said_stays():
    here = outer_address()
    said = with_way(
        plan("--nnodes", "2", "--rdzv-endpoint", here, "--rdzv-conf", "is_host=0", "--local-addr", "me"), {"GLOO_SOCKET_IFNAME": "eth7"}
    )

    assert ("me", "is_host=0") == (said.torchrun.local_addr, said.torchrun.rdzv_conf)
    assert "GLOO_SOCKET_IFNAME" not in said.variables
    assert "TP_SOCKET_IFNAME" in said.variables


def test_the_own_name_of_a_machine_may_lead_to_its_loopback(monkeypatch):
    """As on Debian; the name stands for an address on the other machines alone."""
    found = socket.getaddrinfo
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **more: found("127.0.0.1" if host == "gpu1" else host, *rest, **more))
    named = with_way(plan("--nnodes", "2", "--master-addr", "gpu1"), {})
    local = with_way(plan("--nnodes", "2", "--master-addr", "localhost"), {})

    assert ("gpu1", False) == (named.torchrun.local_addr, "GLOO_SOCKET_IFNAME" in named.variables)
    assert ("127.0.0.1", "lo") == (local.torchrun.local_addr, local.variables["GLOO_SOCKET_IFNAME"])


def test_then_the_addresses_of_the_others_tell():
    try:
        name = way_to("192.0.2.1", 0).interface
    except OSError:
        pytest.skip("this machine has no way to anywhere")

    assert dict.fromkeys(OF_GLOO, name) == interface_variables(["gpu1.invalid", "127.0.0.1", "192.0.2.1"], {})
    assert {"TP_SOCKET_IFNAME"} == interface_variables(["192.0.2.1"], {"GLOO_SOCKET_IFNAME": "eth7"}).keys()
    assert {} == interface_variables(["localhost"], {})


def test_nothing_is_known_of_the_way_to_a_name_that_is_not():
    asked = plan("--nnodes", "2", "--master-addr", "no-such-host.invalid")

    assert asked == with_way(asked, {})


def test_the_first_node_is_waited_for(listener, capsys, monkeypatch):
    monkeypatch.setattr("parwrap.launching.routes.REPORT_AFTER", 0.1)
    host, port = listener.getsockname()
    listener.close()
    asked = plan("--nnodes", "2", "--node-rank", "1", "--master-addr", host, "--master-port", str(port), "--timeout", "60")
    late = []
    thread = threading.Timer(0.5, lambda: late.append(socket.create_server((host, port))))
    thread.start()
    began = time.monotonic()
    found = await_rendezvous(asked, os.environ)
    thread.join()
    late[0].close()

    assert time.monotonic() - began >= 0.5
    assert "timeout=60,join_timeout=60" == found.torchrun.rdzv_conf
    assert f"parwrap: waiting for the first node, at 127.0.0.1 port {port}\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--master-addr", "127.0.0.1", "--timeout", "0.3"],
            "cannot reach the first node at 127.0.0.1 port {port}, after trying for 0.3 s: the machine answers, but nothing listens on "
            "that port. Check that the node with --node-rank 0 was started with the same port.",
        ),
        (
            ["--master-addr", "no-such-host.invalid", "--timeout", "0.1"],
            "cannot reach the first node at no-such-host.invalid port {port}, after trying for 0.1 s: this machine cannot look up that "
            "name. Check that --master-addr is the host name of the first node, spelled correctly.",
        ),
    ],
)
def test_a_first_node_that_does_not_answer_is_told_of(listener, options, text):
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(LaunchError, match=f"^{re.escape(text.format(port=port))}$"):
        await_rendezvous(plan("--nnodes", "2", "--node-rank", "1", "--master-port", str(port), *options), os.environ)


def test_no_answer_at_all():
    told = unreachable("10.0.0.1", 29400, 900, OSError(errno.EHOSTUNREACH, "No route to host"), static=False)

    assert told == (
        "cannot reach the first node at 10.0.0.1 port 29400, after trying for 900 s: no answer (No route to host). Check that "
        "--rdzv-endpoint is an address that `ping 10.0.0.1` reaches from here, and that no firewall blocks TCP port 29400."
    )


def test_an_interface_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr("parwrap.launching.routes.interfaces", lambda: {"lo": [], "eth0": []})
    for fine in ({}, {"GLOO_SOCKET_IFNAME": ""}, {"GLOO_SOCKET_IFNAME": "eth0,lo"}):
        check_interfaces(fine)
    with pytest.raises(LaunchError) as refusal:
        check_interfaces({"GLOO_SOCKET_IFNAME": "lo,eth7"})

    assert str(refusal.value) == (
        "GLOO_SOCKET_IFNAME names eth7, which this machine does not have. It has lo, eth0: correct the variable, or unset it."
    )
