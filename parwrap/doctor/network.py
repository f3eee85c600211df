"""Where gloo would listen: on the interface in ``GLOO_SOCKET_IFNAME``, otherwise on the first bindable address of the host's own name,
otherwise on the loopback, which other machines cannot reach (torch's ``ProcessGroupGloo.cpp``).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from parwrap.doctor.facts import Network
from parwrap.launching.elastic.network_interfaces import interface_of, interfaces

__all__ = ["find_network"]


def find_network(environ: Mapping[str, str]) -> Network:
    """The network, with the environment variables ``environ``."""
    known = interfaces()
    addresses = _addresses(socket.gethostname())
    gloo = environ.get("GLOO_SOCKET_IFNAME")
    interface: str | None
    if gloo:
        interface = gloo.split(",")[0]
        address = next(iter(known.get(interface, [])), None)
    else:
        address = next((address for address in addresses if _can_bind(address)), None)
        interface = interface_of(address) if address else None
    return Network(
        addresses=addresses,
        interfaces=known,
        infiniband=sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        gloo=gloo,
        nccl=environ.get("NCCL_SOCKET_IFNAME"),
        address=address,
        interface=interface,
    )


def _addresses(host: str) -> list[str]:
    with suppress(OSError, UnicodeError):  # the latter for a name that no name server could have
        told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in told))
    return []


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        return True
    return False
