"""Fills in missing options from an outer launcher, which started ``parwrap.run`` once per node or once per rank.

``nodes.py`` and ``world.py`` detect that launcher and read its variables.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from parwrap.errors import LaunchError, UsageError
from parwrap.world.launchers import LAUNCHERS
from parwrap.world.nodes import Node, node_of
from parwrap.world.world import World, detect

__all__ = ["NOT_GIVEN", "fill_in"]

TORCHRUNS = {"nnodes": "1:1", "node_rank": 0, "master_addr": None, "master_port": None}
"""Torchrun's defaults; ``plan.py`` has the one of the rendezvous."""

ONE = ("1", "1:1")
"""Values of ``--nnodes`` that mean one node."""

NOT_GIVEN = dict.fromkeys([*TORCHRUNS, "nproc_per_node"])
"""Parser defaults that mark torchrun's options as not given."""


def fill_in(arguments: argparse.Namespace, environ: Mapping[str, str], gpus: int) -> World | None:
    """Fill in missing ``arguments`` from torchrun's ``PET_*`` variables, then from the outer launcher, then from torchrun's defaults.

    Args:
        arguments: torchrun's options, parsed with the defaults ``NOT_GIVEN``.
        environ: the environment variables.
        gpus: the number of GPUs that torch can use here.

    Returns:
        This process's rank, if another launcher started it as a rank; ``None`` if it starts the ranks.

    Raises:
        LaunchError: as in ``detect``, or the options ask each of several ranks on this node to start ranks.
    """
    node, outer = None if arguments.standalone else node_of(environ), None
    by_hand = any(environ.get(name) for name in (*LAUNCHERS[0].rank, *LAUNCHERS[0].size))
    place = arguments.master_addr or arguments.rdzv_endpoint or environ.get("PET_MASTER_ADDR")
    counted = arguments.nnodes and (place or arguments.nnodes in ONE)  # otherwise the launcher may know the address
    elsewhere = node or arguments.standalone or counted or "PET_NNODES" in environ
    if by_hand or not elsewhere:
        world = detect(environ)
        node, outer = (None, world) if by_hand or world.size > 1 else (node, None)
    if outer and _starts_ranks(outer, arguments, environ, gpus):
        node, outer = _node_of_world(outer, environ), None
    if arguments.standalone and arguments.nnodes is None:
        arguments.nnodes = "1:1"
    from_launcher = {} if node is None else {"nnodes": node.nodes, "nproc_per_node": node.per_node}
    for name in ("nnodes", "nproc_per_node"):
        _fill(arguments, name, environ, from_launcher)
    if node and arguments.nnodes not in ONE:
        from_launcher = {"node_rank": node.rank, "master_addr": node.address, "master_port": node.port}
    for name in ("node_rank", "master_addr", "master_port"):
        _fill(arguments, name, environ, from_launcher)
    return outer


def _fill(arguments: argparse.Namespace, name: str, environ: Mapping[str, str], from_launcher: Mapping[str, str | None]) -> None:
    if getattr(arguments, name) is not None:
        return
    value = environ.get(f"PET_{name.upper()}") or from_launcher.get(name) or TORCHRUNS.get(name)
    if isinstance(value, str) and name in ("node_rank", "master_port"):
        if not value.strip().isdecimal():
            raise LaunchError(
                f"--{name.replace('_', '-')} is set to {value!r} by the environment, which is not an integer: pass the option on the "
                "command line."
            )
        value = int(value)
    setattr(arguments, name, value)


def _starts_ranks(outer: World, arguments: argparse.Namespace, environ: Mapping[str, str], gpus: int) -> bool:
    """Whether this process, one of several, starts the ranks on its node, rather than being a rank itself."""
    asked = arguments.nproc_per_node or environ.get("PET_NPROC_PER_NODE")
    has_rendezvous = next(row.has_rendezvous for row in LAUNCHERS if row.name == outer.launcher)
    if outer.local_size == 1 and not has_rendezvous and outer.launcher != LAUNCHERS[0].name:
        return asked is not None or gpus > 1
    if asked is None:
        return False
    raise UsageError(
        f"--nproc-per-node {asked} would start ranks here, but {outer.launcher} started this process as rank {outer.rank} of "
        f"{outer.size}. Remove it, start one process per node, or add --standalone for a separate run in each process."
    )


def _node_of_world(outer: World, environ: Mapping[str, str]) -> Node:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if outer.rendezvous.startswith("tcp://"):
        address, _, port = outer.rendezvous.removeprefix("tcp://").rpartition(":")
    return Node(outer.launcher or "", "", str(outer.size), str(outer.rank), address, port, None)
