"""Turns a command line with ``--launcher`` into a job: the launcher, its options, and the command to run on each node.

Nothing starts here. Every mistake that can be found now is reported now, because a job may wait for hours before a node could report it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parwrap.errors import UsageError
from parwrap.launching.command_line import UnknownOptionError, parse_options
from parwrap.launching.defaults import NONE, Defaults
from parwrap.launching.job_launchers import HOMES, launcher_named, launchers_with
from parwrap.launching.plan import LaunchPlan, command_parser, plan_launch, unknown_option

__all__ = ["Job", "print_line", "requested_job"]

RENDEZVOUS_OPTIONS = (
    *("nnodes", "node_rank", "master_addr", "master_port", "local_addr"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
)
"""Torchrun's options with which nodes find each other; the launcher sets them."""


@dataclass(frozen=True)
class Job:
    """The job that a command line requests from a launcher.

    Attributes:
        launcher: its name.
        nodes: the number of machines or workers.
        gpus_per_node: the number of GPUs that each node must have; ``None`` if not given.
        ranks_per_node: ``--nproc-per-node`` as given, or the number of GPUs; ``None`` leaves it to the node.
        max_restarts: how often failed ranks are restarted.
        plan: the launch plan of a node, as far as it is known on this machine.
        command: what follows ``parwrap run`` on each node, without the rendezvous.
        options: the launcher's own options.
        dry_run: only print the job.
    """

    launcher: str
    nodes: int
    gpus_per_node: int | None
    ranks_per_node: str | None
    max_restarts: int
    plan: LaunchPlan
    command: tuple[str, ...]
    options: argparse.Namespace
    dry_run: bool


def requested_job(argv: Sequence[str], environ: Mapping[str, str], cores: int, defaults: Defaults = NONE) -> Job | None:
    """The job for ``parwrap run ARGV``, which has ``--launcher`` in it; ``None`` if that option belongs to the script.

    Args:
        argv: the command line without the program's name.
        environ: the environment variables.
        cores: the number of CPU cores to assume for a node.
        defaults: the user's defaults for the options.

    Raises:
        UsageError: no ``--launcher``, an unknown option or value, an option of another launcher, or two that exclude each other.
        LaunchError: the script does not exist.
    """
    name = _first_name(argv)
    parser = command_parser()
    if name not in HOMES:
        parser.conflict_handler = "resolve"
    for each in [name] if name in HOMES else HOMES:  # the parser needs all their options to find where the script starts
        group = parser.add_argument_group(f"--launcher {each}")
        launcher_named(each).add_options(group)
    parser.set_defaults(nproc_per_node=None, **dict.fromkeys(RENDEZVOUS_OPTIONS))
    try:
        ours, script = defaults.split(parser, argv)
    except UnknownOptionError as unknown:
        if name not in HOMES:
            return None  # the name may belong to the script; without a job, the option is refused
        raise UsageError(_not_its_option(name, unknown, parser)) from None
    arguments = parse_options(parser, ours, script)
    if arguments.launcher is None:
        return None
    launcher = launcher_named(name)
    for given in [option for option in RENDEZVOUS_OPTIONS if getattr(arguments, option) is not None]:
        number = next(action.option_strings[0] for action in parser._actions if action.dest == "nodes")
        instead = f"set their number with {number} N" if given == "nnodes" else "remove it"
        raise UsageError(f"--{given.replace('_', '-')} is set by --launcher {name}, which connects the nodes: {instead}.")
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    launcher.add_options(own)
    own.add_argument("--launcher")
    own.add_argument("--dry-run", "--dry_run", action="store_true")
    options, command = own.parse_known_args(ours)
    command += script
    ranks = arguments.nproc_per_node
    if ranks is None and options.gpus_per_node:
        ranks = str(options.gpus_per_node)
        command = ["--nproc-per-node", ranks, *command]
    gpus = options.gpus_per_node or int(ranks == "gpu")  # if it is not given, only the node knows
    rendezvous = ["--nnodes", str(options.nodes), "--master-addr", "first-node"]  # the launcher fills in the address
    plan = plan_launch([*rendezvous, *command], environ, gpus, cores, here=launcher.SHARES_FILES)
    return Job(
        launcher=name,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        ranks_per_node=ranks,
        max_restarts=arguments.max_restarts,
        plan=plan,
        command=tuple(command),
        options=options,
        dry_run=arguments.dry_run,
    )


def print_line(what: str) -> None:
    """Report a job's progress to the user, apart from what its ranks write."""
    print(f"parwrap run: {what}", file=sys.stderr, flush=True)


def _first_name(argv: Sequence[str]) -> str:
    for option, following in zip(argv, [*argv[1:], ""], strict=True):
        if option == "--launcher":
            return following
        if option.startswith("--launcher="):
            return option.partition("=")[2]
    raise UsageError("there is no --launcher on the command line: add --launcher NAME.")


def _not_its_option(name: str, unknown: UnknownOptionError, parser: argparse.ArgumentParser) -> str:
    others = launchers_with(str(unknown).partition("=")[0])
    if others:
        return f"{unknown} is an option of --launcher {' and '.join(others)}, not of {name}: remove it, or choose that launcher."
    return unknown_option(unknown, parser)
