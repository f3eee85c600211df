"""What ``parwrap.run`` takes from a launcher that has started it on each node, or as each rank: the options that are not given.

Which launcher that is and what it says is read in ``nodes.py`` and ``world.py``.
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
"""What torchrun takes where nothing is said; for where nodes meet ``plan.py`` has it."""

ONE = ("1", "1:1")
"""Ways to say that there is one node."""

NOT_GIVEN = dict.fromkeys([*TORCHRUNS, "nproc_per_node"])
"""The defaults by which a parser of torchrun's options tells what is not given."""


def fill_in(arguments: argparse.Namespace, environ: Mapping[str, str], gpus: int) -> World | None:
    """Complete ``arguments`` that are not given: from torchrun's ``PET_*``, then from the surrounding launcher, then as torchrun does.

    Args:
        arguments: torchrun's, as parsed with the defaults ``NOT_GIVEN``.
        environ: the environment variables.
        gpus: how many GPUs torch can use here.

    Returns:
        This process's rank, if another launcher started it as one; ``None`` if it starts the ranks.

    Raises:
        LaunchError: as ``detect``; or each of several ranks on this node is asked to start ranks.
    """
    node, outer = None if arguments.standalone else node_of(environ), None
    by_hand = any(environ.get(name) for name in (*LAUNCHERS[0].rank, *LAUNCHERS[0].size))
    place = arguments.master_addr or arguments.rdzv_endpoint or environ.get("PET_MASTER_ADDR")
    counted = arguments.nnodes and (place or arguments.nnodes in ONE)  # else the launcher may tell the place
    elsewhere = node or arguments.standalone or counted or "PET_NNODES" in environ
    if by_hand or not elsewhere:
        world = detect(environ)
        node, outer = (None, world) if by_hand or world.size > 1 else (node, None)
    if outer and _starts_ranks(outer, arguments, environ, gpus):
        node, outer = _node_of_world(outer, environ), None
    if arguments.standalone and arguments.nnodes is None:
        arguments.nnodes = "1:1"
    told = {} if node is None else {"nnodes": node.nodes, "nproc_per_node": node.per_node}
    for name in ("nnodes", "nproc_per_node"):
        _fill(arguments, name, environ, told)
    if node and arguments.nnodes not in ONE:
        told = {"node_rank": node.rank, "master_addr": node.address, "master_port": node.port}
    for name in ("node_rank", "master_addr", "master_port"):
        _fill(arguments, name, environ, told)
    return outer


def _fill(arguments: argparse.Namespace, name: str, environ: Mapping[str, str], told: Mapping[str, str | None]) -> None:
    if getattr(arguments, name) is not None:
        return
    value = environ.get(f"PET_{name.upper()}") or told.get(name) or TORCHRUNS.get(name)
    if isinstance(value, str) and name in ("node_rank", "master_port"):
        if not value.strip().isdecimal():
            raise LaunchError(f"{value!r} is told for --{name.replace('_', '-')}, and is not a whole number: give the option.")
        value = int(value)
    setattr(arguments, name, value)


def _starts_ranks(outer: World, arguments: argparse.Namespace, environ: Mapping[str, str], gpus: int) -> bool:
    """Whether a process that is one of several is to start ranks on its node rather than to be one."""
    asked = arguments.nproc_per_node or environ.get("PET_NPROC_PER_NODE")
    meets = next(row.meets for row in LAUNCHERS if row.name == outer.launcher)
    if outer.local_size == 1 and not meets and outer.launcher != LAUNCHERS[0].name:
        return asked is not None or gpus > 1
    if asked is None:
        return False
    raise UsageError(
        f"--nproc-per-node {asked} asks for ranks to be started here, and by {outer.launcher} this process is itself rank {outer.rank} of "
        f"{outer.size}. Leave it out, start one process a node, or add --standalone for each process to have a run of its own."
    )


def _node_of_world(outer: World, environ: Mapping[str, str]) -> Node:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if outer.rendezvous.startswith("tcp://"):
        address, _, port = outer.rendezvous.removeprefix("tcp://").rpartition(":")
    return Node(outer.launcher or "", "", str(outer.size), str(outer.rank), address, port, None)
