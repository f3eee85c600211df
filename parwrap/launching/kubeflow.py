"""``--launcher kubeflow``: writes the manifest of a job for Kubeflow on Kubernetes. Submitting it is left to ``kubectl``.

The operator gives every pod the rendezvous address in torchrun's variables ``PET_*``, which ``parwrap run`` reads. Pods of several nodes
get the job's secret from a Secret of Kubernetes, which is in the same file.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
from pathlib import Path
from typing import Any

from parwrap.errors import LaunchError, UsageError
from parwrap.launching.job_launchers import add_node_options
from parwrap.launching.jobs import Job
from parwrap.ranks.store import SECRET, secret_of

__all__ = ["SHARES_FILES", "add_options", "launch", "manifest", "secret"]

SHARES_FILES = False
KINDS = {"pytorchjob": "from v1, of the Training Operator from 1.7", "trainjob": "v2, of Kubeflow Trainer"}
RUNTIME = "torch-distributed"
LONGEST_NAME = 46
"""The maximum length of a job's name: a label holds 63 characters, and a pod adds a suffix like ``-worker-99`` or ``-node-0-999-abcde``."""
LIKE_A_NUMBER = re.compile(r"[-+.]*[0-9]|[yYnN]$")
"""What Kubernetes may parse as a number or a boolean unless it is quoted.

These are more values than in YAML 1.1, for example ``1e-3``, ``08`` and ``y``.
"""

BREAKS = re.compile("[\x85\u2028\u2029]")
"""Line breaks of YAML that are spaces for others: only double quotes keep them."""


def add_options(group: argparse._ActionsContainer) -> None:
    """Add this launcher's options to argparse."""
    add_node_options(group)
    group.add_argument("--image", help="container image with parwrap and the script")
    group.add_argument("--print", action="store_true", help="print the manifest, for `kubectl apply -f -`")
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    group.add_argument("--kind", choices=KINDS, default="pytorchjob", help=f"{kinds} [pytorchjob]")
    group.add_argument("--name", help="name of the job [that of the script]")
    group.add_argument("--namespace", help="its namespace [that of `kubectl`]")
    group.add_argument("--runtime", help=f"trainjob: the ClusterTrainingRuntime [{RUNTIME}]")


def launch(job: Job) -> int:
    """Print the manifest of ``job``, after that of its secret if it has several nodes. Returns 0.

    Raises:
        UsageError: an option is missing or does not fit the others, or Kubernetes would reject its value.
        LaunchError: PyYAML is not installed.
    """
    if job.options.runtime and job.options.kind != "trainjob":
        raise UsageError(f"--runtime {job.options.runtime} needs --kind trainjob: add it, or remove --runtime.")
    if not (job.options.print or job.dry_run):
        raise UsageError(
            "--launcher kubeflow writes a manifest and submits nothing: add --print, and pipe the output into `kubectl apply -f -`."
        )
    try:
        import yaml
    except ImportError:
        raise LaunchError(
            "--launcher kubeflow writes YAML with PyYAML, which is not installed: pip install PyYAML, or install parwrap[kubeflow]."
        ) from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def quoted(dumper: Any, text: str) -> Any:
        style = '"' if BREAKS.search(text) else "'" if LIKE_A_NUMBER.match(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, quoted)
    documents = [manifest(job)]
    if job.nodes > 1:
        documents.insert(0, secret(documents[0]["metadata"], secret_of(os.environ) or secrets.token_hex(16)))
    print(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000), end="")
    return 0


def manifest(job: Job) -> dict[str, Any]:
    """The manifest of ``job`` as plain dicts and lists.

    Raises:
        UsageError: an option is missing or does not fit the others, or Kubernetes would reject its value.
    """
    options = job.options
    if not options.image:
        raise UsageError("--launcher kubeflow needs --image, a container image that contains parwrap and the script.")
    name = options.name or _name_of(job.plan.script.target)
    if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", name):
        raise UsageError(
            f"--name {name} is not a valid job name on Kubernetes: use up to {LONGEST_NAME} lowercase letters, digits and '-', starting "
            "with a letter."
        )
    group, form = ("kubeflow.org/v1", _pytorchjob) if options.kind == "pytorchjob" else ("trainer.kubeflow.org/v1alpha1", _trainjob)
    return {
        "apiVersion": group,
        "kind": "PyTorchJob" if options.kind == "pytorchjob" else "TrainJob",
        "metadata": {"name": name} | ({"namespace": options.namespace} if options.namespace else {}),
        "spec": form(job, _environment(job, name)),
    }


def secret(metadata: dict[str, str], text: str) -> dict[str, Any]:
    """The manifest of the Secret with the ``text`` that signs what the job's nodes send; ``metadata`` are those of the job."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {SECRET: text}}


def _name_of(script: str) -> str:
    """The job's name, derived from the script's name."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).name.removesuffix(".py").lower()).lstrip("-0123456789")[:LONGEST_NAME].rstrip("-")
    if not name:
        raise UsageError(f"the script's name, {script}, cannot be turned into a job name on Kubernetes: add --name.")
    return name


def _pytorchjob(job: Job, environment: dict[str, Any]) -> dict[str, Any]:
    """The job's specification: with ``--max-restarts``, pods that all restart when one fails; otherwise a master pod and workers."""
    common = {
        "runPolicy": {"cleanPodPolicy": "Running"},  # so that pods that wait for a failed one are removed
        "nprocPerNode": job.ranks_per_node or "1",
    }
    if job.max_restarts:
        elastic = {"rdzvBackend": "c10d", "minReplicas": job.nodes, "maxReplicas": job.nodes, "maxRestarts": job.max_restarts}
        return {**common, "elasticPolicy": elastic, "pytorchReplicaSpecs": {"Worker": _pods(job, job.nodes, environment)}}
    others = {"Worker": _pods(job, job.nodes - 1, environment)} if job.nodes > 1 else {}
    return {**common, "pytorchReplicaSpecs": {"Master": _pods(job, 1, environment), **others}}


def _pods(job: Job, replicas: int, environment: dict[str, Any]) -> dict[str, Any]:
    container = {
        "name": "pytorch",  # the operator requires this container name
        "image": job.options.image,
        **_command(job),
        **environment,
        **_resources(job),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    # a pod has 64 MB of shared memory by default, too little for NCCL and for loader workers
    shared_memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return {
        "replicas": replicas,
        "restartPolicy": "OnFailure" if job.max_restarts else "Never",
        "template": {"spec": {"containers": [container], "volumes": [shared_memory]}},
    }


def _trainjob(job: Job, environment: dict[str, Any]) -> dict[str, Any]:
    if job.max_restarts:
        raise UsageError(
            "--max-restarts has no effect with --kind trainjob, whose nodes cannot restart together: remove it, or choose --kind "
            "pytorchjob."
        )
    if not (job.ranks_per_node or "1").isdecimal():
        raise UsageError(
            f"--nproc-per-node {job.ranks_per_node} is not a number, which --kind trainjob needs: set the number of ranks on each node."
        )
    resources = {"resourcesPerNode": resources["resources"]} if (resources := _resources(job)) else {}
    return {
        "runtimeRef": {"name": job.options.runtime or RUNTIME},
        "trainer": {
            "image": job.options.image,
            **_command(job),
            **environment,
            "numNodes": job.nodes,
            "numProcPerNode": int(job.ranks_per_node or 1),
            **resources,
        },
    }


def _command(job: Job) -> dict[str, Any]:
    """The container's command and arguments. Dollars are doubled, because Kubernetes would expand ``$(NAME)`` to a variable."""
    command = job.command if job.ranks_per_node else ("--nproc-per-node", "1", *job.command)
    return {"command": ["python", "-m", "parwrap.run"], "args": [argument.replace("$", "$$") for argument in command]}


def _environment(job: Job, name: str) -> dict[str, Any]:
    if job.nodes == 1:
        return {}
    return {"env": [{"name": SECRET, "valueFrom": {"secretKeyRef": {"name": name, "key": SECRET}}}]}


def _resources(job: Job) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}}} if job.gpus_per_node else {}
