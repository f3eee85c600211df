"""The network interfaces of this machine and their addresses, as far as the system reports them."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

from parwrap.world.launchers import LOOPBACK

__all__ = ["interface_of", "interfaces", "is_loopback"]

SIOCGIFCONF = 0x8912
IFREQ = struct.Struct("16s 4x 4s 16x")
"""An entry of Linux's answer to SIOCGIFCONF: a name, and an address in a ``sockaddr_in``."""


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
        return LOOPBACK["GLOO_SOCKET_IFNAME"]
    return next((name for name, addresses in interfaces().items() if str(ipaddress.ip_address(address)) in addresses), None)


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback address. A host name is not.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("localhost")
    (True, True, False)
    """
    return address.startswith("127.") or address == "::1"


def _with_ipv4() -> list[tuple[str, str]]:
    import array
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
