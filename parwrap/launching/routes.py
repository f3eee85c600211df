"""How this machine reaches the rendezvous: with which of its addresses and interfaces, and whether anything answers there.

Torch's agents find each other if every machine's name resolves to the address that others see. Otherwise gloo connects to 127.0.0.1, or no
node recognizes the rendezvous address as its own. This file derives the right addresses from the route. ``nodes.py`` handles messages
between nodes, and ``ranks/network.py`` looks up routes and interfaces.
"""

from __future__ import annotations

import argparse
import errno
import math
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.plan import LaunchPlan
from parwrap.ranks.network import interfaces, is_loopback, variables_for, way_to
from parwrap.ranks.platform import WINDOWS

__all__ = [
    "await_rendezvous",
    "check_interfaces",
    "endpoint",
    "interface_variables",
    "listener",
    "rendezvous_timeout",
    "unreachable",
    "with_way",
]

PORTS = {"static": 29500, "c10d": 29400}
"""Default ports of the rendezvous backends."""

DEFAULT_TIMEOUT = 900.0
"""Seconds that a node waits for the others unless ``--timeout`` or ``--rdzv-conf`` is given, as in torch."""

REPORT_AFTER = 10.0
"""Seconds after which a node that waits for the first one says so."""


def endpoint(torchrun: argparse.Namespace) -> tuple[str, int]:
    """Host and port of the rendezvous that torchrun's options name.

    Raises:
        UsageError: the endpoint is not ``HOST:PORT``.

    >>> endpoint(argparse.Namespace(rdzv_backend="c10d", rdzv_endpoint="[fd00::1]:29400"))
    ('fd00::1', 29400)
    """
    by_address = torchrun.rdzv_backend == "static" and not torchrun.rdzv_endpoint
    named = f"{torchrun.master_addr}:{torchrun.master_port}" if by_address else torchrun.rdzv_endpoint
    try:
        return parse_rendezvous_endpoint(named, PORTS.get(torchrun.rdzv_backend, 0))
    except ValueError as error:
        raise UsageError(str(error)) from None


def with_way(plan: LaunchPlan, environ: Mapping[str, str]) -> LaunchPlan:
    """The ``plan`` with the settings that follow from the route to the rendezvous, if there is one. Those that the user has set stay.

    They are the interface for gloo, this node's address for the others, and whether this node hosts the rendezvous.
    """
    if plan.torchrun.rdzv_backend not in PORTS or plan.in_this_process:
        return plan
    host, port = endpoint(plan.torchrun)
    try:
        way = way_to(host, port)
    except OSError:
        return plan
    torchrun = argparse.Namespace(**vars(plan.torchrun))
    # a machine's own name often resolves to its loopback, as on Debian, but only on that machine
    by_name = is_loopback(way.here) and host != "localhost" and not is_loopback(host)
    torchrun.local_addr = torchrun.local_addr or (host if by_name else way.here)
    if torchrun.rdzv_backend == "c10d" and "is_host" not in _conf(torchrun) and not is_loopback(way.here):  # torch detects loopbacks
        hosts = way.own and _is_free(host, port)  # else another node of this job on the same machine hosts it
        _add_conf(torchrun, {"is_host": int(hosts)})
    variables = {} if by_name else variables_for(way.interface, environ)
    return replace(plan, variables={**plan.variables, **variables}, torchrun=torchrun)


def interface_variables(others: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make gloo use the interface that leads to other machines, without those that are set in ``environ``.

    Args:
        others: the addresses of all nodes, as ``local_addr`` of each; the first one on another machine decides.
        environ: the environment variables.
    """
    for other in others:
        with suppress(OSError):
            way = way_to(other, 0)
            if not way.own:
                return variables_for(way.interface, environ)
    return {}


def listener(host: str) -> socket.socket:
    """A socket that listens on a free port: only at ``host``, a name or address of this machine, or where it must, on all interfaces."""
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(address[0])) <= (is_loopback(host) or host == "localhost"):  # other machines resolve the name differently
            return socket.create_server(address[:2], family=family)
    return socket.create_server(("", 0))


def check_interfaces(environ: Mapping[str, str]) -> None:
    """Raise :class:`LaunchError` if the user's variable for gloo names an interface that is not here: every rank would fail in gloo."""
    here = interfaces()
    missing = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name and name not in here]
    if missing and here and not WINDOWS:  # whose interfaces have several names
        raise LaunchError(
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which this machine does not have. It has {', '.join(here)}: correct the "
            "variable, or unset it."
        )


def await_rendezvous(plan: LaunchPlan, environ: Mapping[str, str]) -> LaunchPlan:
    """Wait until the rendezvous can be reached, unless this node hosts it.

    Returns the plan with its timeouts and with the settings of :func:`with_way`.

    Raises:
        LaunchError: the rendezvous timeout passed.
    """
    if plan.torchrun.rdzv_backend not in PORTS:
        return plan
    seconds = rendezvous_timeout(plan)
    _wait_for(plan, seconds)
    plan = with_way(plan, environ)
    _add_conf(plan.torchrun, dict.fromkeys(("timeout", "join_timeout"), math.ceil(seconds)))
    return plan


def _wait_for(plan: LaunchPlan, seconds: float) -> None:
    """Wait until something listens at the rendezvous, unless this node has to listen there."""
    host, port = endpoint(plan.torchrun)
    static = plan.torchrun.rdzv_backend == "static"
    is_host = plan.torchrun.node_rank == 0 if static else _conf(plan.torchrun).get("is_host", "").lower() in ("1", "true", "t", "yes", "y")
    began, reported = time.monotonic(), False
    while True:
        left = began + seconds - time.monotonic()
        try:
            own = way_to(host, port).own
            if is_host or (own and not static):
                return
            with socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))):
                return
        except OSError as error:
            if left <= 0:
                raise LaunchError(unreachable(host, port, seconds, error, static)) from None
        if not reported and time.monotonic() > began + REPORT_AFTER:
            reported = True
            print(f"parwrap: waiting for the first node, at {host} port {port}", file=sys.stderr)
        time.sleep(min(0.2, max(0.0, left)))


def unreachable(host: str, port: int, seconds: float, error: OSError, static: bool) -> str:
    """The error message when ``host`` could not be reached, or did not listen at ``port``."""
    option, first = ("--master-addr", "the node with --node-rank 0") if static else ("--rdzv-endpoint", "the node with that address")
    if isinstance(error, socket.gaierror):
        why, check = "this machine cannot look up that name", f"that {option} is the host name of the first node, spelled correctly"
    elif error.errno == errno.ECONNREFUSED:
        why, check = "the machine answers, but nothing listens on that port", f"that {first} was started with the same port"
    else:
        why = f"no answer ({error.strerror or error})"
        check = f"that {option} is an address that `ping {host}` reaches from here, and that no firewall blocks TCP port {port}"
    return f"cannot reach the first node at {host} port {port}, after trying for {seconds:g} s: {why}. Check {check}."


def rendezvous_timeout(plan: LaunchPlan) -> float:
    """Seconds that this node waits for the others."""
    configured = _conf(plan.torchrun)
    timeout = (plan.script.scope or {}).get("timeout")
    with suppress(KeyError, ValueError):
        timeout = timeout or float(configured["timeout"])
    return timeout or DEFAULT_TIMEOUT


def _conf(torchrun: argparse.Namespace) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in (torchrun.rdzv_conf or "").split(",") if pair)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _add_conf(torchrun: argparse.Namespace, values: Mapping[str, int]) -> None:
    ours = [f"{name}={value}" for name, value in values.items() if name not in _conf(torchrun)]
    torchrun.rdzv_conf = ",".join([torchrun.rdzv_conf, *ours] if torchrun.rdzv_conf else ours)


def _is_free(host: str, port: int) -> bool:
    """Whether ``port`` of this machine is free."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        if not WINDOWS:  # which would share a port that is in use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
