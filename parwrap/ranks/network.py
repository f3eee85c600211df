"""The network of this machine: which of its addresses and interfaces lead to an address, and which interfaces it has.

gloo listens at the address that the machine's own name resolves to, unless a variable names an interface. On many machines that is
the loopback, which others cannot reach. NCCL finds its interfaces itself.
"""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parwrap.ranks.launchers import LOOPBACK

__all__ = ["Way", "interface_of", "interfaces", "is_loopback", "variables_for", "way_to"]

SIOCGIFCONF = 0x8912
IFREQ = struct.Struct("16s 4x 4s 16x")
"""An entry of Linux's answer to SIOCGIFCONF: a name, and an address in a ``sockaddr_in``."""


OF_GLOO = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""The variables with the interface of gloo and of TensorPipe. NCCL chooses among all that a machine has, so its variable is the user's."""


@dataclass(frozen=True)
class Way:
    """The route from this machine to an address.

    Attributes:
        here: this machine's address on that route.
        interface: the name of the network interface that has ``here``; ``None`` if it is unknown.
        own: whether the address is one of this machine itself.
    """

    here: str
    interface: str | None
    own: bool


def way_to(host: str, port: int) -> Way:
    """The route to ``host`` in the machine's routing table. Nothing is sent to ``host``.

    Raises:
        OSError: the name is unknown, or there is no route.

    >>> way_to("127.0.0.1", 29500).own
    True
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        here = probe.getsockname()[0]
    return Way(here, interface_of(here), own=is_loopback(here) or here == address[0])


def variables_for(interface: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make gloo listen on ``interface``, without those that ``environ`` sets; none if it is unknown.

    >>> variables_for("eth0", {"TP_SOCKET_IFNAME": "eth1"})
    {'GLOO_SOCKET_IFNAME': 'eth0'}
    """
    return {name: interface for name in OF_GLOO if interface and name not in environ}


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, IPv4 first; none on systems other than Linux."""
    found: dict[str, list[str]] = {}
    with suppress(OSError):  # the system does not report them
        found = {name: [] for _, name in socket.if_nameindex()}
    if sys.platform == "linux":
        for name, address in [*_with_ipv4(), *_with_ipv6()]:
            found.setdefault(name, []).append(address)
    return found


def interface_of(address: str) -> str | None:
    """The name of the network interface that has ``address``; ``None`` where it is unknown, as on macOS."""
    if is_loopback(address):  # covers all of 127.0.0.0/8
        return LOOPBACK.get("GLOO_SOCKET_IFNAME")
    return next((name for name, addresses in interfaces().items() if str(ipaddress.ip_address(address)) in addresses), None)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address. A host name is not.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("localhost")
    (True, True, False)
    """
    return address.startswith("127.") or address == "::1"


def _with_ipv4() -> list[tuple[str, str]]:
    import fcntl

    entries = array.array("B", bytes(1024 * IFREQ.size))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iP", len(entries), entries.buffer_info()[0]))
    except OSError:  # no IPv4, or the system does not report them
        return []
    filled = entries.tobytes()[: struct.unpack_from("i", answer)[0]]
    rows = IFREQ.iter_unpack(filled)
    return [(name.partition(b"\0")[0].partition(b":")[0].decode(), socket.inet_ntoa(address)) for name, address in rows]


def _with_ipv6() -> list[tuple[str, str]]:
    with suppress(OSError):  # the interface is down
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [(name, str(ipaddress.IPv6Address(int(number, 16)))) for number, *_, name in lines]
    return []
