"""Finds which node this is, if a launcher starts one process on each node, which starts the ranks there (for example Kubeflow).

``parwrap.run`` calls it to start the ranks; ``world.py`` calls it so that a node's number is not taken for a rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parwrap.world.launchers import LAUNCHERS, NODE_LAUNCHERS, sagemakers_hosts

__all__ = ["NODE_VARIABLES", "Node", "node_of"]

NODE_VARIABLES = frozenset(name for row in NODE_LAUNCHERS for name in row[1:]) | {"SM_HOSTS"}

SAGEMAKERS_PORT = "7777"


class Node(NamedTuple):
    """The node as the launcher's variables describe it.

    Attributes:
        launcher: its name.
        variables: the variables that identify the node, for messages.
        nodes: the number of nodes, or ``MIN:MAX``.
        rank: this node, from 0.
        address: the address of the first node.
        port: its port.
        per_node: the number of ranks to start here.
    """

    launcher: str
    variables: str
    nodes: str
    rank: str
    address: str | None
    port: str | None
    per_node: str | None

    @property
    def is_only(self) -> bool:
        """Whether it is the only node.

        >>> node_of({"RANK": "0", "WORLD_SIZE": "1"}).is_only
        True
        """
        return self.nodes.rpartition(":")[2].strip() == "1"


def node_of(environ: Mapping[str, str]) -> Node | None:
    """Which node this is; ``None`` without such a launcher.

    Raises:
        LaunchError: the variables make no sense.

    >>> node_of({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}).address
    'job-master-0'
    >>> node_of({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    """
    if any(row.applies(environ) and any(map(environ.get, row.local_rank)) for row in LAUNCHERS):
        return None  # these variables number processes of a node
    for row in NODE_LAUNCHERS:
        nodes, rank, address, port, per_node = (environ.get(name) or None for name in row[1:])
        if nodes and rank:
            return Node(row.name, f"{row.rank}={rank} and {row.nodes}={nodes}", nodes, rank, address, port, per_node)
    hosts = sagemakers_hosts(environ)
    if len(hosts) < 2 or environ.get("SM_CURRENT_HOST") not in hosts:
        return None
    rank, gpus = str(hosts.index(environ["SM_CURRENT_HOST"])), environ.get("SM_NUM_GPUS", "0")
    variables = f"SM_CURRENT_HOST={environ['SM_CURRENT_HOST']} and SM_HOSTS={environ['SM_HOSTS']}"
    return Node("SageMaker", variables, str(len(hosts)), rank, hosts[0], SAGEMAKERS_PORT, None if gpus == "0" else gpus)
