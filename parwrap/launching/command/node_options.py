"""What torchrun's options say about nodes: how many, and their rendezvous."""

from __future__ import annotations

import argparse

from parwrap.errors import UsageError

__all__ = ["is_only_node", "node_counts"]


def node_counts(arguments: argparse.Namespace) -> tuple[int, int]:
    """The least and the largest number of nodes.

    Args:
        arguments: torchrun's options with all defaults filled in.

    Raises:
        UsageError: they contradict each other, or give no rendezvous.
    """
    try:
        counts = [int(count) for count in arguments.nnodes.split(":")]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2) or not 0 < counts[0] <= counts[-1]:
        raise UsageError(f"--nnodes {arguments.nnodes} is not a number of nodes: give one above 0, or MIN:MAX for a job that can grow.")
    if arguments.standalone and counts[-1] > 1:
        raise UsageError(f"--standalone is for one node, and --nnodes {arguments.nnodes} asks for more: remove one of them.")
    if arguments.rdzv_backend == "static" and not 0 <= arguments.node_rank < counts[-1]:
        raise UsageError(f"--node-rank {arguments.node_rank} is not below --nnodes {counts[-1]}: nodes are counted from 0.")
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
    """Raise if no rendezvous is given: each node would wait for the others on itself."""
    if arguments.rdzv_backend == "static" and not arguments.master_addr:
        raise UsageError(
            f"--nnodes {arguments.nnodes} needs a rendezvous: give every node the address of the first by --master-addr, and a different "
            "--node-rank from 0; or give every node the same --rdzv-endpoint HOST:PORT, on any one of them."
        )
    if arguments.rdzv_backend == "c10d":
        raise UsageError("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, on any one of the nodes: give it to all of them.")
