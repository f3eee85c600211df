"""Reads the number of nodes and their rendezvous from torchrun's options."""

from __future__ import annotations

import argparse

from parwrap.errors import UsageError

__all__ = ["is_only_node", "node_counts"]


def node_counts(arguments: argparse.Namespace) -> tuple[int, int]:
    """The minimum and maximum number of nodes.

    Args:
        arguments: torchrun's options with all defaults filled in.

    Raises:
        UsageError: the options contradict each other, or name no rendezvous.
    """
    try:
        counts = [int(count) for count in arguments.nnodes.split(":")]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2) or not 0 < counts[0] <= counts[-1]:
        raise UsageError(f"--nnodes {arguments.nnodes} is not a positive number of nodes, nor MIN:MAX for a job that can grow.")
    if arguments.standalone and counts[-1] > 1:
        raise UsageError(f"--standalone is for one node, but --nnodes {arguments.nnodes} asks for more: remove one of the two.")
    if arguments.rdzv_backend == "static" and not 0 <= arguments.node_rank < counts[-1]:
        raise UsageError(f"--node-rank {arguments.node_rank} is not less than --nnodes {counts[-1]}: node ranks start at 0.")
    if counts[0] < counts[-1] and arguments.rdzv_backend == "static" and not arguments.standalone:
        raise UsageError(f"--nnodes {arguments.nnodes} lets nodes join and leave: use --rdzv-endpoint HOST:PORT, not --master-addr.")
    if counts[-1] > 1 and not arguments.rdzv_endpoint:
        _require_rendezvous(arguments)
    return counts[0], counts[-1]


def is_only_node(arguments: argparse.Namespace, nodes: tuple[int, int]) -> bool:
    """Whether this is the only node and the user has given no rendezvous."""
    default = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
    return arguments.standalone or (nodes == (1, 1) and default)


def _require_rendezvous(arguments: argparse.Namespace) -> None:
    """Raise an error if no rendezvous is given, because each node would then wait for the others at its own address."""
    if arguments.rdzv_backend == "static" and not arguments.master_addr:
        raise UsageError(
            f"--nnodes {arguments.nnodes} needs a rendezvous: on every node, set --master-addr to the address of the first node, and "
            "--node-rank to a different number, starting from 0. Or set the same --rdzv-endpoint HOST:PORT on every node, with HOST any "
            "one of them."
        )
    if arguments.rdzv_backend == "c10d":
        raise UsageError(
            "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, with HOST any one of the nodes: set the same value on all nodes."
        )
