"""From a command line to a launch plan, without any effect: what to run, on how many ranks, with which variables.

The options are torchrun's own and a few of ours. Facts about the machine are passed in, so a plan can be tested and shown;
carrying it out is left to ``run.py`` and ``agent.py``.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from parwrap.errors import LaunchError, UsageError
from parwrap.feature_options import AMP_VALUES, add_feature_options, features_of, number, whole, with_amp_value
from parwrap.script import Script
from parwrap.strategy_options import STRATEGY_OPTIONS, add_strategy_options

__all__ = ["LaunchPlan", "describe", "plan_launch"]

SCOPE_OPTIONS = ("backend", "seed", "batch", "uneven", "lr", "loss", "timeout", "hang_after", *STRATEGY_OPTIONS)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ONE_NODE = "parwrap"
"""The rendezvous backend of a node that need not wait for others; see ``agent.py``."""


@dataclass(frozen=True)
class LaunchPlan:
    """What a command line asks for.

    Attributes:
        script: what every rank runs.
        ranks: how many of them on this node.
        nodes: the least and the largest number of nodes.
        threads: how many each rank computes with; ``None`` leaves it to the user's ``OMP_NUM_THREADS``.
        variables: the environment variables to set for the ranks.
        torchrun: torchrun's options, as its own parser gives them.
        in_this_process: one rank that needs no other process.
        show: only show the plan.
    """

    script: Script
    ranks: int
    nodes: tuple[int, int]
    threads: int | None
    variables: Mapping[str, str]
    torchrun: argparse.Namespace
    in_this_process: bool
    show: bool


def plan_launch(argv: Sequence[str], environ: Mapping[str, str], gpus: int, cores: int) -> LaunchPlan:
    """The plan for ``python -m parwrap.run ARGV``.

    Args:
        argv: the command line without the program's name.
        environ: the environment variables; torchrun's parser reads its own ``PET_*`` from ``os.environ``.
        gpus: how many GPUs torch can use here.
        cores: how many CPU cores this process may use.

    Raises:
        UsageError: an option or a value that does not exist, or options that exclude each other.
        LaunchError: what is asked for is not there: the script, the GPUs.
    """
    parser = _parser()
    parser.set_defaults(nproc_per_node=None, start_method=environ.get("PET_START_METHOD", "forkserver"))
    arguments, unknown = parser.parse_known_args(with_amp_value(parser, argv))
    if unknown:
        raise UsageError(_unknown(unknown[0], [option for action in parser._actions for option in action.option_strings]))
    options = {name: getattr(arguments, name) for name in SCOPE_OPTIONS if hasattr(arguments, name)}
    nodes = _nodes(arguments)
    one_process = hasattr(arguments, "data_parallel")
    asked = arguments.nproc_per_node or environ.get("PET_NPROC_PER_NODE", str(1 if one_process else gpus or 1))
    ranks = _ranks(asked, gpus, cores)
    if one_process and (ranks, nodes[-1]) != (1, 1):
        raise UsageError("--data-parallel runs one process on several devices, and more ranks are asked for: leave one of them out.")
    if gpus and ranks > gpus and not arguments.plain and options.get("backend") != "gloo":
        raise LaunchError(
            f"--nproc-per-node {ranks} is more than the GPUs that torch can use here ({gpus}). "
            f"Start at most {gpus} ranks on this node, or add --backend gloo to let ranks share GPUs."
        )
    script = _script(arguments, options, features_of(arguments))
    if _meets_alone(arguments, nodes):
        arguments.rdzv_backend, arguments.rdzv_endpoint = ONE_NODE, "localhost"
    if arguments.master_port is None:
        arguments.master_port = 29500  # torchrun's own default, which its parser leaves open
    arguments.nproc_per_node = str(ranks)
    threads = max(1, cores // ranks)
    return LaunchPlan(
        script=script,
        ranks=ranks,
        nodes=nodes,
        threads=None if "OMP_NUM_THREADS" in environ else threads,
        variables={name: value for name, value in _variables(arguments, threads).items() if name not in environ},
        torchrun=arguments,
        in_this_process=ranks == 1 and _needs_no_agent(arguments),
        show=arguments.show,
    )


def describe(plan: LaunchPlan) -> str:
    """The plan for people to read: what ``--show`` prints."""
    script, torchrun = plan.script, plan.torchrun
    many = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    where = "1 node" if plan.nodes == (1, 1) else f"each of {'-'.join(map(str, dict.fromkeys(plan.nodes)))} nodes"
    scope = None if script.scope is None else ", ".join(f"{name}={value!r}" for name, value in script.scope.items())
    features = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in script.features.items()]
    facts = {
        "ranks": f"{many} on {where}",
        {"file": "script", "module": "module", "program": "program"}[script.kind]: shlex.join([script.target, *script.args]),
        "inside": "nothing: it is only launched" if scope is None else " ".join([f"parwrap.distributed({scope})", *features]),
    }
    if plan.in_this_process:
        return _columns({**facts, "started": "in this process"})
    alone = torchrun.rdzv_backend == ONE_NODE
    endpoint = torchrun.rdzv_endpoint or f"{torchrun.master_addr}:{torchrun.master_port}"
    restarts = f", and again after a failure up to {torchrun.max_restarts} times" if torchrun.max_restarts else ""
    facts |= {
        "started": f"by {torchrun.start_method}{restarts}",
        "meeting": "at a free port of 127.0.0.1" if alone else f"by {torchrun.rdzv_backend} rendezvous at {endpoint}",
        "variables": " ".join(f"{name}={value}" for name, value in plan.variables.items()) or "as they are",
    }
    return _columns(facts)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            "there is no script to run: name it after the options, then its own arguments." if "training_script" in message else message
        )


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser  # with torch, which the command starts to import later than its fork server

    parser = _Parser(
        prog="python -m parwrap.run",
        description="Run a plain single-GPU training script on many ranks, unchanged. Takes every option of torchrun; other than there, "
        "--nproc-per-node is by default the number of GPUs, or 1, and --start-method is forkserver.",
        parents=[get_args_parser()],
        add_help=False,
    )
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="As for torch.distributed.launch. Without it a script that is only launched (--plain) and has an option --local-rank or "
        "--local_rank in its source is handed its local rank by that option. A script inside the scope is never handed it.",
    )
    ours = parser.add_argument_group("parwrap")
    ours.add_argument(
        "--plain", action="store_true", help="Only launch the script: no scope around it, and torchrun's variables for it to see."
    )
    ours.add_argument("--show", action="store_true", help="Print the plan and start nothing.")
    absent = argparse.SUPPRESS
    ours.add_argument("--backend", default=absent, help="Backend of the process group; by default nccl for GPUs and gloo for the CPU.")
    ours.add_argument("--seed", default=absent, type=whole, help="Seed of torch, numpy and python on all ranks.")
    ours.add_argument(
        "--batch", default=absent, help="per_rank: each rank takes whole batches; global: each takes its part of every batch."
    )
    ours.add_argument(
        "--uneven", default=absent, help="Where samples do not go round: pad takes some twice; drop leaves some out; join takes each once."
    )
    ours.add_argument("--lr", default=absent, help="Learning rates, as the global batch grows with the ranks: keep, linear or sqrt.")
    ours.add_argument("--loss", default=absent, help="What the loss is over the samples of a batch: mean or sum.")
    ours.add_argument("--timeout", default=absent, type=number, help="Seconds that a rank waits for another.")
    ours.add_argument(
        "--hang-after",
        "--hang_after",
        default=absent,
        type=number,
        help="Seconds after which rank 0 says where every rank is, if one still waits; by default 60.",
    )
    add_strategy_options(ours)
    add_feature_options(ours)
    return parser


def _unknown(option: str, known: list[str]) -> str:
    name = option.partition("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "`python -m parwrap.run --help` lists the options; those of the script come after it."
    return f"there is no option {name}; {hint}"


def _nodes(arguments: argparse.Namespace) -> tuple[int, int]:
    try:
        counts = [int(count) for count in arguments.nnodes.split(":")]
    except ValueError:
        counts = []
    if len(counts) not in (1, 2) or not 0 < counts[0] <= counts[-1]:
        raise UsageError(f"--nnodes {arguments.nnodes} is not a number of nodes: give one above 0, or MIN:MAX for a job that can grow.")
    if arguments.standalone and counts[-1] > 1:
        raise UsageError(f"--standalone is for one node, and --nnodes {arguments.nnodes} asks for more: leave one of them out.")
    return counts[0], counts[-1]


def _ranks(asked: str, gpus: int, cores: int) -> int:
    if asked == "gpu" and not gpus:
        raise LaunchError(
            "--nproc-per-node gpu asks for a rank on each GPU, and torch can use none here: give a number to train on the CPU."
        )
    here = {"gpu": gpus, "cpu": cores, "auto": gpus or cores}
    if asked in here:
        return here[asked]
    if not asked.isdecimal() or int(asked) == 0:
        known = ", ".join(f"{name} ({count} here)" for name, count in here.items())
        raise UsageError(f"--nproc-per-node {asked} is not a number of ranks: give one above 0, or {known}.")
    return int(asked)


def _script(arguments: argparse.Namespace, options: dict[str, Any], features: dict[str, dict[str, Any]]) -> Script:
    target = arguments.training_script
    if arguments.plain and (options or features):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in [*options, *features])
        raise UsageError(f"--plain opens no scope, so there is nothing for {given} to act on: leave one of them out.")
    if arguments.no_python and arguments.module:
        raise UsageError("--no-python runs a program and --module a Python module: leave one of them out.")
    if arguments.no_python and not arguments.plain:
        raise UsageError(
            "--no-python runs a program that is not Python, in which parwrap can change nothing: add --plain to only launch it."
        )
    if arguments.no_python and shutil.which(target) is None:
        raise LaunchError(f"there is no program {target} to run: give its path, or the name of one on the PATH.")
    if not arguments.no_python and not arguments.module and not os.path.exists(target):
        hint = "" if target.endswith(".py") else " To run a module, put -m before its name."
        if features.get("amp") == {"dtype": "auto"} and not target.endswith(".py"):
            hint += f" If it is meant for --amp: that takes {', '.join(AMP_VALUES)}."
        raise LaunchError(f"there is no script {target}: its path is taken from the directory that the command runs in.{hint}")
    if arguments.module and importlib.util.find_spec(target.partition(".")[0]) is None:
        raise LaunchError(
            f"there is no module {target}: it is looked for in the directory that the command runs in and among what is installed."
        )
    if options or features:
        import parwrap

        for name, chosen in {"distributed": options, **features}.items():
            getattr(parwrap, name)(**chosen)  # raises UsageError for values that it will not take
    return Script(
        target=target,
        args=tuple(arguments.training_script_args),
        kind="module" if arguments.module else "program" if arguments.no_python else "file",
        scope=None if arguments.plain else options,
        features=features,
        hand_local_rank=arguments.plain and not arguments.no_python and not arguments.use_env,
    )


def _meets_alone(arguments: argparse.Namespace, nodes: tuple[int, int]) -> bool:
    """Whether this is the only node and the user has not said how to find others."""
    default = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
    return arguments.standalone or (nodes == (1, 1) and default)


def _needs_no_agent(arguments: argparse.Namespace) -> bool:
    """Whether nothing is asked for beyond running the script."""
    logs = (arguments.redirects, arguments.tee, arguments.local_ranks_filter)
    return arguments.rdzv_backend == ONE_NODE and not arguments.plain and not arguments.max_restarts and logs == ("0", "0", "")


def _variables(arguments: argparse.Namespace, threads: int) -> dict[str, str]:
    """Unless the user has set them: cores shared out, sets in the same order everywhere, no listener beyond one node."""
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0"}
    if arguments.rdzv_backend == ONE_NODE:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), LOOPBACK)
    return variables


def _columns(facts: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<10} {value}" for name, value in facts.items())
