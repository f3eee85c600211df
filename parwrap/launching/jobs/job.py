"""From a command line with ``--launcher`` to a job: which launcher, its options, and what to run on each node.

Nothing is started here, and everything that can be known to be wrong is said: a job may wait for hours before a node would say it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parwrap.errors import UsageError
from parwrap.launching.command.command_line import UnknownOptionError, parse_options, split_at_script
from parwrap.launching.command.job_launchers import HOMES, launcher_named, launchers_with
from parwrap.launching.command.plan import LaunchPlan, command_parser, plan_launch, unknown_option

__all__ = ["Job", "job_asked", "launch_job", "say"]

MEETING = (
    *("nnodes", "node_rank", "master_addr", "master_port", "local_addr"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
)
"""Torchrun's options that say how nodes find each other, which is the launcher's part."""


@dataclass(frozen=True)
class Job:
    """What a command line asks of a launcher.

    Attributes:
        launcher: its name.
        nodes: on how many machines, or in how many workers, to each of which the next two apply.
        gpus_per_node: how many GPUs each must have; ``None`` if that was not said.
        ranks_per_node: ``--nproc-per-node`` as it was given, or as many as GPUs; ``None`` leaves it to the node.
        max_restarts: how often failed ranks are started again.
        plan: what each node is to do, as far as it is known here.
        command: what follows ``python -m parwrap.run`` on each node, but for where nodes meet.
        options: the launcher's own.
        dry_run: only show what would be done.
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


def job_asked(argv: Sequence[str], environ: Mapping[str, str], cores: int) -> Job | None:
    """The job for ``python -m parwrap.run ARGV``; ``None`` where ``--launcher`` is none of its options but one of the script.

    Args:
        argv: the command line without the program's name.
        environ: the environment variables.
        cores: how many CPU cores a node has, as far as is known.

    Raises:
        UsageError: an option or a value that does not exist, is another launcher's or excludes another.
        LaunchError: what is asked for is not there.
    """
    name = _first_name(argv)
    parser = command_parser()
    if name not in HOMES:
        parser.conflict_handler = "resolve"
    for each in [name] if name in HOMES else HOMES:  # all of them tell options' values from the script, which the name may belong to
        group = parser.add_argument_group(f"--launcher {each}")
        launcher_named(each).add_options(group)
    parser.set_defaults(nproc_per_node=None, **dict.fromkeys(MEETING))
    try:
        ours, script = split_at_script(parser, argv)
    except UnknownOptionError as unknown:
        if name not in HOMES:
            return None  # the name may be the script's, and the option is refused where there is no job
        raise UsageError(_not_its_option(name, str(unknown), parser)) from None
    arguments = parse_options(parser, ours, script)
    if arguments.launcher is None:
        return None
    launcher = launcher_named(name)
    for given in [option for option in MEETING if getattr(arguments, option) is not None]:
        number = next(action.option_strings[0] for action in parser._actions if action.dest == "nodes")
        instead = f"{number} N says how many there are" if given == "nnodes" else "leave it out"
        raise UsageError(f"--{given.replace('_', '-')} is for --launcher {name} to set, which tells the nodes of each other: {instead}.")
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
    gpus = options.gpus_per_node or int(ranks == "gpu")  # unless it was said, only the node can know
    meeting = ["--nnodes", str(options.nodes), "--master-addr", "first-node"]  # the launcher will know
    plan = plan_launch([*meeting, *command], environ, gpus, cores, here=launcher.SHARES_FILES)
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


def launch_job(job: Job) -> int:
    """Start ``job`` and return its exit code.

    Raises:
        UsageError, LaunchError: the launcher cannot do it.
    """
    return launcher_named(job.launcher).launch(job)


def say(what: str) -> None:
    """Tell the user what becomes of a job, beside what its ranks write."""
    print(f"parwrap.run: {what}", file=sys.stderr, flush=True)


def _first_name(argv: Sequence[str]) -> str:
    for option, following in zip(argv, [*argv[1:], ""], strict=True):
        if option == "--launcher":
            return following
        if option.startswith("--launcher="):
            return option.partition("=")[2]
    raise UsageError("there is no --launcher on the command line.")


def _not_its_option(name: str, option: str, parser: argparse.ArgumentParser) -> str:
    others = launchers_with(option.partition("=")[0])
    if others:
        return f"{option} is an option of --launcher {' and '.join(others)}, not of {name}: leave it out, or choose that launcher."
    return unknown_option(option, parser)
