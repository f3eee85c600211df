"""How a node waits for the other nodes of its job, and what it prints: how many joined, which are missing, and the command to run there.

Only the first node prints this. ``routes.py`` has what the other nodes print while they look for the first.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from parwrap.errors import LaunchError
from parwrap.launching.failures import node_name
from parwrap.launching.plan import LaunchPlan
from parwrap.launching.routes import PORTS, endpoint, rendezvous_timeout
from parwrap.ranks.background import in_background
from parwrap.ranks.network import way_to
from parwrap.ranks.store import SignedStore
from parwrap.torch_private.elastic import arrived_nodes, this_node

__all__ = ["command_there", "reporting_wait"]

REPORT_AFTER = 5.0
"""Seconds before the first message."""

AGAIN = 600.0
"""Seconds between two messages."""

POLLING = 0.05
"""Seconds between two checks for nodes that have joined."""

RENDEZVOUS_OPTIONS = ("nnodes", "node-rank", "master-addr", "master-port", "local-addr", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
"""The options with which nodes find each other; the command for another node repeats them."""

COME = "come"
"""The prefix of the keys of nodes that have joined."""

MOST = 4
"""The number of missing nodes to list."""


@contextmanager
def reporting_wait(plan: LaunchPlan, handler: Any) -> Iterator[None]:
    """Around the rendezvous, report which nodes have not joined, if they take long.

    Nodes with fixed numbers have all joined before the block begins.

    Args:
        plan: the plan of this node.
        handler: torch's rendezvous handler, which waits for nodes.

    Raises:
        RendezvousTimeoutError: the nodes did not join in time.
        LaunchError: another kind of server listens at the address.
    """
    missing = {"static": _missing_by_number, "c10d": _missing_by_arrival}.get(plan.torchrun.rdzv_backend)
    if missing is None or plan.nodes[-1] == 1:
        yield
        return
    with in_background(lambda stopped: _report(plan, handler, missing, stopped), "parwrap waiting"):
        store = _all_numbers_come(plan) if plan.torchrun.rdzv_backend == "static" else None
        yield
        del store  # torch's client connects to it during the rendezvous


def command_there(plan: LaunchPlan, node: int | None) -> str:
    """The command line for another node, made from this node's.

    Args:
        plan: the plan of this node.
        node: the other node's number; ``None`` if nodes are numbered in the order in which they join.
    """
    torchrun = plan.torchrun
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in RENDEZVOUS_OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    of_script = len(plan.script.args) + 1
    _, options = parser.parse_known_args(plan.argv[:-of_script])
    place = {"nnodes": torchrun.nnodes}
    if node is not None:
        place["node-rank"] = str(node)
    if torchrun.rdzv_endpoint:
        backend = {} if torchrun.rdzv_backend == "c10d" else {"rdzv-backend": torchrun.rdzv_backend}
        place |= {**backend, "rdzv-endpoint": torchrun.rdzv_endpoint}
    else:
        port = {} if torchrun.master_port == PORTS["static"] else {"master-port": str(torchrun.master_port)}
        place |= {"master-addr": torchrun.master_addr, **port}
    if torchrun.rdzv_id != "none":
        place["rdzv-id"] = torchrun.rdzv_id
    rendezvous = [word for name, value in place.items() for word in (f"--{name}", value)]
    return shlex.join(["parwrap", "run", *rendezvous, *options, *plan.argv[-of_script:]])


def _report(plan: LaunchPlan, handler: Any, missing: Callable[[LaunchPlan, Any], str], stopped: threading.Event) -> None:
    pause = REPORT_AFTER
    while not stopped.wait(pause):
        with suppress(DistError, OSError):  # the rendezvous cannot be reached, which is reported elsewhere
            if text := missing(plan, handler):
                pause = AGAIN
                print(f"parwrap: {text}", file=sys.stderr)


def _all_numbers_come(plan: LaunchPlan) -> TCPStore:
    """Wait for all numbered nodes as torch would, but leave signals alone. Returns the store of the rendezvous."""
    host, port = endpoint(plan.torchrun)
    number = plan.torchrun.node_rank
    until = time.monotonic() + rendezvous_timeout(plan)
    if number == 0:
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    else:
        store = _connected(host, port, until)
    come = SignedStore(store, COME)
    come.set(str(number), True)
    while not come.has(*map(str, range(plan.nodes[0]))):
        if time.monotonic() > until:
            raise RendezvousTimeoutError
        time.sleep(POLLING)
    return store


def _connected(host: str, port: int, until: float) -> TCPStore:
    """Connect to the ``TCPStore`` at ``host`` and ``port``.

    Connect in a thread, because torch would wait forever if another kind of server listens there.
    """
    outcome: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            outcome.set_result(TCPStore(host, port, wait_for_workers=False, multi_tenant=True))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=connect, name="parwrap connecting", daemon=True).start()
    while not outcome.done():
        if time.monotonic() > until:
            raise LaunchError(
                f"the server at {host} port {port} does not answer like the first node of a job: check that --master-addr and "
                "--master-port are the address and port of --node-rank 0, and that no other server uses this port."
            )
        time.sleep(POLLING)
    return outcome.result()


def _missing_by_number(plan: LaunchPlan, handler: Any) -> str:
    """A message that names the missing ones of the numbered nodes; empty if none is missing, or if another node reports this."""
    if plan.torchrun.node_rank:
        return ""
    host, port = endpoint(plan.torchrun)
    store = TCPStore("localhost", port, wait_for_workers=False, timeout=timedelta(seconds=REPORT_AFTER))
    come = SignedStore(store, COME)
    missing = [str(node) for node in range(1, plan.nodes[0]) if not come.has(str(node))]
    if not missing:
        return ""
    more = [f"{len(missing) - MOST} more"] if len(missing) > MOST else []
    *listed, last = [*missing[:MOST], *more]
    who = f"nodes {', '.join(listed)} and {last}" if listed else f"node {last}"
    elsewhere = "" if way_to(host, port).own else f"{host} is not an address of this machine, but must be an address of --node-rank 0. "
    return (
        f"{node_name(0, socket.gethostname())} waits at {host} port {port} for {who}; {plan.nodes[0] - len(missing)} of {plan.nodes[0]} "
        f"nodes have joined. {elsewhere}Run this on node {missing[0]}: {command_there(plan, int(missing[0]))}"
    )


def _missing_by_arrival(plan: LaunchPlan, handler: Any) -> str:
    """A message about how many nodes are missing, if nodes join in any order; empty if enough have joined, or if another node was first."""
    come = arrived_nodes(handler)
    if not come or come[0] != this_node(handler) or len(come) >= plan.nodes[0]:
        return ""
    host, port = endpoint(plan.torchrun)
    return (
        f"{socket.gethostname()} waits at {host} port {port} for {plan.nodes[0] - len(come)} more; {len(come)} of {plan.nodes[0]} nodes "
        f"have joined. Run this on each missing node: {command_there(plan, None)}"
    )
