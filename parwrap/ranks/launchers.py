"""The variables of each launcher, as data: their names for rank and world size, and where rank 0 can be reached.

One row for each launcher; launchers that are started inside others come first. ``world.py`` draws conclusions from them. Some launchers,
such as Kubeflow, start one process on each node, and that process starts the ranks there. ``node_of`` reads their variables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

from parwrap.errors import LaunchError
from parwrap.ranks.node_lists import expanded_counts, expanded_hosts

__all__ = ["LAUNCHERS", "LOOPBACK", "NODE_LAUNCHERS", "NODE_VARIABLES", "Launcher", "Node", "NodeLauncher", "node_of", "sagemakers_hosts"]

LOOPBACK = {
    name: interface
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    if (interface := {"linux": "lo", "darwin": "lo0"}.get(sys.platform))
}
"""The variables that make ranks of one node listen only on its loopback interface; none where it has no fixed name, as on Windows."""

Environ = Mapping[str, str]


def _always(environ: Environ) -> bool:
    return True


def _nowhere(environ: Environ) -> str | None:
    return None


def _set(name: str) -> Callable[[Environ], bool]:
    return lambda environ: name in environ


class Launcher(NamedTuple):
    """One launcher: for each fact, the names of the variables that may hold it. The first one that is set counts.

    Attributes:
        name: the launcher, for messages.
        rank: the number of this process among all, from 0. Needed, like ``size`` and ``local_rank``.
        size: the number of all processes.
        local_rank: the number of this process on its node, from 0.
        local_size: the number of processes on this node.
        node_rank: the number of this node, from 0.
        nodes: the number of nodes.
        others: further names from which a script can see that it was launched.
        applies: a function that says whether this launcher has set the variables.
        has_rendezvous: whether it sets ``MASTER_ADDR`` and ``MASTER_PORT`` too.
        job: the names that together identify the job among all jobs of this node; empty if none do.
        local_size_of: a function that returns the number of processes on this node, if no single variable has it.
        host: a function that returns the host of rank 0, if a variable has it.
        port: the part of ``job`` that is the same on all nodes, to derive a port from.
        elastic: whether a process of another launcher may start this launcher, which then sets all variables again for its own processes.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    applies: Callable[[Environ], bool] = _always
    has_rendezvous: bool = False
    job: tuple[str, ...] = ()
    local_size_of: Callable[[Environ], str | None] = _nowhere
    host: Callable[[Environ], str | None] = _nowhere
    port: tuple[str, ...] = ()
    elastic: bool = False


class NodeLauncher(NamedTuple):
    """The names of the variables of a launcher that starts one process per node; that process starts the ranks.

    Attributes:
        name: the launcher, for messages.
        nodes: the number of nodes, or ``MIN:MAX``.
        rank: the number of this node, from 0.
        address: the address of the first node.
        port: its port, where the nodes meet.
        per_node: the number of ranks to start on each node.
    """

    name: str
    nodes: str
    rank: str
    address: str
    port: str
    per_node: str


def _is_step(environ: Environ) -> bool:
    """Whether ``srun`` has started this process: a batch script and an interactive shell have ``SLURM_PROCID=0`` too."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    special = 0xFFFFFFF0  # higher ids belong to the batch script, the interactive shell, ...
    return step.isdecimal() and int(step[:10]) < special


def _tasks_on_this_node(environ: Environ) -> str | None:
    node = environ.get("SLURM_NODEID", "")
    counts = expanded_counts(environ["SLURM_STEP_TASKS_PER_NODE"]) if "SLURM_STEP_TASKS_PER_NODE" in environ else []
    return str(counts[int(node[:10])]) if node.isdecimal() and int(node[:10]) < len(counts) else None


def _first_of_step(environ: Environ) -> str | None:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((hosts for name in names if (hosts := expanded_hosts(environ.get(name, "")))), [])
    return hosts[0] if hosts else None


def _first_of_lsf(environ: Environ) -> str | None:
    """The second node that LSF names, because the first may run only the batch script; the first if there is no other."""
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2] or list(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))
    return next(iter(hosts[1:] or hosts), None)


def sagemakers_hosts(environ: Environ) -> list[str]:
    """The hosts of a SageMaker job; empty elsewhere.

    Raises:
        LaunchError: ``SM_HOSTS`` is not a JSON list of names.
    """
    try:
        hosts = json.loads(environ.get("SM_HOSTS") or "[]")
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise LaunchError(
            f"SM_HOSTS={environ['SM_HOSTS']!r} is not a JSON list of names. SageMaker normally sets it: unset it, or correct it."
        )
    return hosts


def _first_of_cloud(environ: Environ) -> str | None:
    """The first node of an MPI job of Azure ML or SageMaker, which name it in variables of the cloud."""
    master = environ.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0]
    return master or next(iter(sagemakers_hosts(environ)), None)


_TORCH: dict = {
    "rank": ("RANK",),
    "size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_size": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    "node_rank": ("GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
    "nodes": ("GROUP_WORLD_SIZE", "CROSS_SIZE", "AZUREML_NODE_COUNT"),
    "others": ("MASTER_ADDR", "MASTER_PORT"),
    "has_rendezvous": True,
}

LAUNCHERS = (
    Launcher(
        name="PARWRAP_*",
        rank=("PARWRAP_RANK",),
        size=("PARWRAP_WORLD_SIZE",),
        local_rank=("PARWRAP_LOCAL_RANK",),
        local_size=("PARWRAP_LOCAL_WORLD_SIZE",),
        node_rank=("PARWRAP_NODE_RANK",),
    ),
    Launcher(
        name="torchrun",
        **_TORCH
        | {
            "others": (
                *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
                *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
            )
        },
        applies=_set("TORCHELASTIC_RUN_ID"),
        elastic=True,
    ),
    Launcher(name="DeepSpeed", **_TORCH, applies=_set("CROSS_SIZE")),
    Launcher(name="Ray Train", **_TORCH, applies=_set("ACCELERATE_TORCH_DEVICE")),
    Launcher(name="Azure ML", **_TORCH, applies=_set("AZUREML_EXPERIMENT_ID")),
    Launcher(name="SageMaker", **_TORCH, applies=_set("SM_TRAINING_ENV")),
    Launcher(  # sets no RANK; on the first node it is the local one
        name="Lightning",
        **_TORCH | {"rank": ("LOCAL_RANK",)},
        applies=lambda environ: (
            "RANK" not in environ and {"WORLD_SIZE", "LOCAL_RANK"} <= environ.keys() and environ.get("NODE_RANK") == "0"
        ),
    ),
    Launcher(name="torch.distributed", **_TORCH),
    Launcher(
        name="Horovod",
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        nodes=("HOROVOD_CROSS_SIZE",),
    ),
    Launcher(
        name="LSF jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("LSB_JOBID", "PMIX_NAMESPACE"),
        host=_first_of_lsf,
        port=("LSB_JOBID", "PMIX_NAMESPACE"),
    ),
    Launcher(
        name="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),  # OMPI_COMM_WORLD_NODE_RANK is not the node's rank
        others=("OMPI_COMM_WORLD_NODE_RANK",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports"),
        host=_first_of_cloud,
        port=("PMIX_NAMESPACE",),
    ),
    Launcher(
        name="Cray PALS",
        rank=("PALS_RANKID",),
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        applies=_set("PALS_RANKID"),
        job=("PALS_APID",),
    ),
    Launcher(
        name="MVAPICH2",
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        name="MPICH or Intel MPI",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    Launcher(
        name="SLURM",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        applies=_is_step,
        local_size_of=_tasks_on_this_node,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT"),
        host=_first_of_step,
        port=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)

NODE_LAUNCHERS = (
    NodeLauncher("Kubeflow Trainer", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"),
    NodeLauncher("Kubeflow or PAI", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"),
)

NODE_VARIABLES = frozenset(name for row in NODE_LAUNCHERS for name in row[1:]) | {"SM_HOSTS"}

SAGEMAKERS_PORT = "7777"


class Node(NamedTuple):
    """The node as the launcher's variables describe it.

    Attributes:
        launcher: its name.
        variables: the variables that identify the node, for messages.
        nodes: the number of nodes, or ``MIN:MAX``.
        rank: this node, from 0.
        address: the address of the first node; ``None``, like ``port`` and ``per_node``, if the launcher does not set it.
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
        """Whether this is the only node.

        >>> node_of({"RANK": "0", "WORLD_SIZE": "1"}).is_only
        True
        """
        return self.nodes.rpartition(":")[2].strip() == "1"


def node_of(environ: Mapping[str, str]) -> Node | None:
    """Which node this is; ``None`` unless a launcher has started this process to start the ranks of its node.

    Raises:
        LaunchError: ``SM_HOSTS`` is not a JSON list of names.

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
