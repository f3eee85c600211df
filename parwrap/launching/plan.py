"""Turns a command line into a launch plan, without side effects: what to run, on how many ranks, with which variables.

The options are torchrun's and a few of parwrap's own. Facts about the machine are passed in, so that a plan can be tested and shown.
``run.py`` and ``agent.py`` carry it out. Read it in this order: the plan, the parser, the script, the nodes, the outer launcher.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, NoReturn

import parwrap
from parwrap.errors import LaunchError, UsageError
from parwrap.launching.command_line import UnknownOptionError, in_files, parse_options
from parwrap.launching.defaults import NONE, Defaults
from parwrap.launching.job_launchers import launchers_with
from parwrap.launching.training_options import GROUPS, Given, add_options, decorators, scope_options
from parwrap.options import Options
from parwrap.ranks.device import BACKEND, of_sharing
from parwrap.ranks.launchers import LAUNCHERS, LOOPBACK, Node, node_of
from parwrap.ranks.platform import START_METHOD, START_METHODS, WINDOWS
from parwrap.ranks.world import World, detect

__all__ = ["LaunchPlan", "Script", "columns", "command_parser", "describe", "describe_script", "look_for", "plan_launch", "unknown_option"]

ONE_NODE = "parwrap"
"""The rendezvous backend of a single node, which does not wait for other nodes; see ``agent.py``."""
DOCTOR = "parwrap.doctor"
"""The module of parwrap that opens the process group itself to diagnose it, so it runs without a scope."""
NO_BINDING = "none"
"""The value of ``--numa-binding`` that lets ranks run on any core."""
OF_OTHERS = ("-n", "-np", "--np", "--ntasks", "--num-processes", "--num_processes", "--gpus")
"""Names that other launchers use for ``--nproc-per-node``."""
FOR_SEVERAL_RANKS = ("--nproc-per-node", "--nnodes")
"""The options that ask for several ranks. If one rank runs and the script gets one of these, a notice says so."""
TORCHRUNS = {"nnodes": "1:1", "node_rank": 0, "master_addr": None, "master_port": None}
"""Torchrun's defaults; :func:`plan_launch` has the default of the rendezvous backend."""
NOT_GIVEN = dict.fromkeys([*TORCHRUNS, "nproc_per_node"])
"""Parser defaults that mark torchrun's options as not given."""
ONE = ("1", "1:1")
"""Values of ``--nnodes`` that mean one node."""


@dataclass(frozen=True)
class Script:
    """What to run.

    Attributes:
        target: a path, the name of a module, or a program that is not Python.
        args: its arguments.
        kind: which of these ``target`` is.
        scope: the options of the ``distributed`` scope around the target; ``None`` to only launch the target.
        decorators: other decorators of parwrap around the target, each with its arguments.
        quiet: print no line about numbers of a share, and no summary at the end.
        hand_local_rank: pass on the local rank as an argument if the script has an option for it.
    """

    target: str
    args: tuple[str, ...] = ()
    kind: Literal["file", "module", "program"] = "file"
    scope: Mapping[str, Any] | None = None
    decorators: Mapping[str, Given] = field(default_factory=dict)
    quiet: bool = False
    hand_local_rank: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """What a command line requests.

    Attributes:
        argv: the command line, with options in full.
        script: what every rank runs.
        ranks: the number of ranks on this node.
        nodes: the minimum and maximum number of nodes.
        threads: the number of threads of each rank; ``None`` leaves it to the user's ``OMP_NUM_THREADS``.
        variables: the environment variables to set for the ranks.
        torchrun: torchrun's options, as its own parser gives them.
        everyone: show the output of every rank, not only of rank 0.
        log_dir: the directory for a log file of each rank; ``None`` for no files, or if torchrun writes its own logs.
        in_this_process: whether a single rank runs in this process.
        outer: this process's rank and its launcher, if another launcher started it as a rank.
        dry_run: only show the plan.
        notice: a message to print first; may be empty.
        sources: the options that come from files, for each file.
    """

    argv: tuple[str, ...]
    script: Script
    ranks: int
    nodes: tuple[int, int]
    threads: int | None
    variables: Mapping[str, str]
    torchrun: argparse.Namespace
    everyone: bool
    log_dir: str | None
    in_this_process: bool
    outer: World | None
    dry_run: bool
    notice: str
    sources: Mapping[str, str]


def plan_launch(
    argv: Sequence[str], environ: Mapping[str, str], gpus: int, cores: int, here: bool = True, defaults: Defaults = NONE
) -> LaunchPlan:
    """The plan for ``parwrap run ARGV``.

    Args:
        argv: the command line without the program's name.
        environ: the environment variables; torchrun's parser reads most of its own ``PET_*`` from ``os.environ``.
        gpus: the number of GPUs that torch can use here.
        cores: the number of CPU cores that this process may use.
        here: whether the script runs on this machine, so that its path can be checked.
        defaults: the user's defaults for the options.

    Raises:
        UsageError: an unknown option or value, or options that exclude each other.
        LaunchError: the script or the GPUs do not exist, or another launcher's variables are wrong or incomplete.
    """
    parser = command_parser()
    parser.set_defaults(
        **NOT_GIVEN,
        **({"signals_to_handle": "SIGTERM,SIGINT"} if WINDOWS else {}),
        start_method=environ.get("PET_START_METHOD", START_METHOD),
        rdzv_backend=environ.get("PET_RDZV_BACKEND"),
    )
    try:
        given, command = defaults.split(parser, argv)
    except UnknownOptionError as unknown:
        raise UsageError(unknown_option(unknown, parser)) from None
    arguments = parse_options(parser, given, command)
    if arguments.launcher:
        raise UsageError("--launcher must be written in full, not abbreviated.")  # otherwise ``run.py`` has noticed it
    if arguments.start_method not in START_METHODS:
        raise UsageError(f"--start-method {arguments.start_method} needs a system that can fork, and this one cannot: remove it.")
    arguments.rdzv_backend = arguments.rdzv_backend or ("c10d" if arguments.rdzv_endpoint else "static")
    options = scope_options(arguments)
    outer = _fill_in(arguments, environ, gpus)
    nodes = _node_counts(arguments)
    alone_by_default = not (arguments.nproc_per_node or outer)
    one_process = hasattr(arguments, "data_parallel")
    of_node = max(gpus, 2 if hasattr(arguments, "explain") else 1)  # with one rank there is nothing to explain
    ranks = _ranks(arguments.nproc_per_node or str(1 if outer or one_process else of_node), gpus, cores)
    if one_process:
        _refuse_several(ranks, nodes, options)
    share = 0 < gpus < ranks and not arguments.plain and options.get("backend") != "gloo"
    if share and ("backend" in options or arguments.master_addr or not _is_only_node(arguments, nodes)):
        raise LaunchError(
            f"{ranks} ranks are more than the GPUs that torch can use on this node ({gpus}). Set --nproc-per-node to at most {gpus}, or "
            "use --backend gloo to let ranks share GPUs."
        )
    script = _script(arguments, options, decorators(arguments), here)
    if arguments.all_ranks and (logs := _torchrun_logs(arguments)):
        raise UsageError(
            f"--all-ranks and {' and '.join(logs)} control what ranks print in different ways: remove --all-ranks or {' and '.join(logs)}."
        )
    if not arguments.plain and "0" not in (arguments.local_ranks_filter or "0").split(","):
        raise UsageError(
            f"--local-ranks-filter {arguments.local_ranks_filter} shows ranks that print nothing, because only rank 0 does: add "
            "--log-dir DIR instead, for a file of what each rank prints."
        )
    if arguments.monitor_interval <= 0:
        raise UsageError(f"--monitor-interval {arguments.monitor_interval:g} is not a positive number of seconds: pass a number above 0.")
    if _is_only_node(arguments, nodes):
        arguments.rdzv_backend, arguments.rdzv_endpoint = ONE_NODE, "localhost"
    arguments.master_addr = arguments.master_addr or "127.0.0.1"  # torchrun's own defaults, which its parser does not set
    arguments.master_port = 29500 if arguments.master_port is None else arguments.master_port
    arguments.nproc_per_node = str(ranks)
    for_the_agent = _for_the_agent(arguments)
    in_this_process = ranks == 1 and not for_the_agent
    if outer and not in_this_process:
        raise UsageError(
            f"{outer.launcher} started this process as rank {outer.rank} of {outer.size}, but only a parwrap run that starts ranks can use "
            f"{' and '.join(for_the_agent)}: remove {' and '.join(for_the_agent)}, or add --standalone for a separate run in each process."
        )
    notice = of_sharing(ranks, gpus, "--backend gloo") if share else ""
    if alone_by_default and in_this_process:
        notice = _option_after_script(script)
    threads = max(1, cores // ranks)
    return LaunchPlan(
        argv=(*given, *command),
        script=script,
        ranks=ranks,
        nodes=nodes,
        threads=None if environ.get("OMP_NUM_THREADS") else threads,
        variables={name: value for name, value in _variables(arguments, threads, share).items() if not environ.get(name)},
        torchrun=arguments,
        everyone=arguments.all_ranks,
        log_dir=None if _torchrun_logs(arguments) else arguments.log_dir,
        in_this_process=in_this_process,
        outer=outer,
        dry_run=arguments.dry_run,
        notice=notice,
        sources=_sources(argv[: len(argv) - len(command)], given, defaults),
    )


def _sources(options: Sequence[str], given: Sequence[str], defaults: Defaults) -> dict[str, str]:
    """The options from files: what is in each ``@file`` of ``options``, and the defaults that nothing in ``given`` overrides."""
    found = {each: shlex.join(words) for each in options if each.startswith("@") and (words := in_files([each])) != [each]}
    return found | ({"defaults": used} if (used := defaults.used(given)) else {})


def describe(plan: LaunchPlan) -> str:
    """The plan in readable form, which ``--dry-run`` prints."""
    torchrun = plan.torchrun
    many = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    where = "1 node" if plan.nodes == (1, 1) else f"each of {'-'.join(map(str, dict.fromkeys(plan.nodes)))} nodes"
    facts = {"ranks": f"{many} on {where}", **describe_script(plan.script)}
    if plan.outer:
        facts["ranks"] = f"rank {plan.outer.rank} of {plan.outer.size}, started by {plan.outer.launcher}"
    facts |= plan.sources
    if plan.in_this_process:
        return columns({**facts, "started": "in this process"})
    alone = torchrun.rdzv_backend == ONE_NODE
    endpoint = torchrun.rdzv_endpoint or f"{torchrun.master_addr}:{torchrun.master_port}"
    restarts = f", restarted up to {torchrun.max_restarts} times after a failure" if torchrun.max_restarts else ""
    facts |= {
        "started": f"by {torchrun.start_method}{restarts}",
        "rendezvous": _meeting_of_one_node(plan) if alone else f"{torchrun.rdzv_backend} at {endpoint}",
        "variables": " ".join(f"{name}={value}" for name, value in plan.variables.items()) or "as they are",
    }
    return columns(facts)


def _meeting_of_one_node(plan: LaunchPlan) -> str:
    return "on a free port of 127.0.0.1" if plan.script.scope is None else "in a private folder of this machine"


def describe_script(script: Script) -> dict[str, str]:
    """What runs, and in which scope."""
    options = ", ".join(f"{name}={value!r}" for name, value in (script.scope or {}).items())
    scopes = [
        f"parwrap.distributed({options})",
        *(f"parwrap.{name}({given})" for name, given in script.decorators.items()),
    ]
    return {
        {"file": "script", "module": "module", "program": "program"}[script.kind]: shlex.join([script.target, *script.args]),
        "inside": "none: only launched" if script.scope is None else ", ".join(scopes),
    }


EXAMPLES = """\
usage: parwrap run [options] train.py [its options]

  parwrap run --nproc-per-node 2 train.py --epochs 3     two ranks on this machine
  parwrap run --batch global --sync-bn train.py          all GPUs, with the numbers of one process
  parwrap run --nnodes 2 --rdzv-endpoint HOST train.py   the same command on each of two machines

Defaults are in brackets.
"""

OF_TORCHRUN = {
    "launch": {
        "--nproc-per-node N": "ranks on this machine [its number of GPUs, or 1]",
        "--nnodes N": "machines, or their least and most, as 2:4 [1]",
        "--rdzv-endpoint HOST:PORT": "where machines meet: the first one",
        "--max-restarts N": "how often a failed job starts again [0]",
        "-m, --module": "train.py is the name of a module",
    },
    "output": {"--log-dir DIR": "write a log file of each rank there"},
    "help": {"-h, --help": "this list"},
}
"""Those of torchrun's options that are needed most, in their groups of the help text."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            "no script to run: put its path after the options of parwrap run, followed by the script's own arguments."
            if "training_script" in message
            else message
        )

    def format_help(self) -> str:
        """The help text: a few options of torchrun, and those of parwrap and of a launcher, on one line each where possible."""
        titles = [str(group.title) for group in self._action_groups]
        ours = self._action_groups[titles.index(GROUPS[0]) :]  # before them are those of torchrun
        rows = [(group.title, _rows({**OF_TORCHRUN.get(str(group.title), {}), **_options_of(group)})) for group in ours]
        return EXAMPLES + "".join(f"\n{title}:\n{options}" for title, options in rows)


def _options_of(group: argparse._ArgumentGroup) -> dict[str, str]:
    return {
        f"{each.option_strings[0]} {each.metavar or ''}".rstrip(): (each.help or "").replace("%%", "%") for each in group._group_actions
    }


def _rows(options: Mapping[str, str]) -> str:
    rows = (
        (left, right)
        for option, text in options.items()
        for left, right in zip_longest([option], wrap(text, 50, break_on_hyphens=False), fillvalue="")
    )
    return "".join(f"  {left:27} {right}\n" for left, right in rows)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *of_option: Any) -> NoReturn:
        print(argparse.ArgumentParser.format_help(parser))
        parser.exit()


def command_parser() -> argparse.ArgumentParser:
    """The parser of ``parwrap run``."""
    from torch.distributed.run import get_args_parser  # this imports torch, which the command must do after it starts its fork server

    parser = _Parser(
        prog="parwrap run",
        description=(
            "Run a plain single-GPU training script on many ranks, unchanged. Takes every option of torchrun, with two different "
            "defaults: --nproc-per-node is the number of GPUs, or 1, and --start-method is "
            f"{START_METHOD}."
        ),
        parents=[get_args_parser()],
        add_help=False,
    )
    binding: Any = parser._option_string_actions["--numa-binding"]
    binding.choices = [*binding.choices, NO_BINDING]
    binding.help = (
        "The cores of each rank: those of the NUMA node near its GPU, as on machines with several NUMA nodes if this is not given; of its "
        f"socket; an exclusive part of the node; or a part with a common cache. {NO_BINDING}: any core."
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    launch, output, about = groups["launch"], groups["output"], groups["help"]
    launch.add_argument("--plain", action="store_true", help="only launch the script, as torchrun does")
    launch.add_argument("--no-defaults", "--no_defaults", action="store_true", help="leave out [tool.parwrap] of pyproject.toml")
    launch.add_argument("--dry-run", "--dry_run", action="store_true", help="print the plan and start nothing")
    # as in torch.distributed.launch; without --plain, no script gets it
    launch.add_argument("--use-env", "--use_env", action="store_true", help="plain: a script with --local-rank does not get it")
    output.add_argument("--all-ranks", "--all_ranks", action="store_true", help="show the output of every rank")
    output.add_argument("--quiet", action="store_true", help="no line about shares, and no summary at the end")
    groups["clusters"].add_argument("--launcher", metavar="NAME", help="slurm, kubeflow or ray, with options of its own")
    about.add_argument("--help-all", "--help_all", action=_HelpAll, nargs=0, help="all options of torchrun too")
    about.add_argument("--version", action="version", version=f"parwrap {parwrap.__version__}", help="print the version")
    add_options(groups)
    return parser


def unknown_option(unknown: UnknownOptionError, parser: argparse.ArgumentParser) -> str:
    """The error message for an option that ``parser`` does not have."""
    name = str(unknown).partition("=")[0]
    known = [option for option in parser._option_string_actions if "_" not in option]
    begin = [option for option in known if option.startswith(name[:7])]  # so that --nprocs does not match --nnodes
    close = difflib.get_close_matches(name, begin, n=1, cutoff=0.0) or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if name in OF_OTHERS:
        close = ["--nproc-per-node"]
    if launchers := launchers_with(name):
        text = f"{name} is an option of --launcher {' and '.join(launchers)}: add the launcher, or remove {name}."
    elif close:
        text = f"there is no option {name}; did you mean {close[0]}?"
    else:
        text = f"there is no option {name}; `parwrap run --help-all` lists the options."
    if unknown.put_right:
        return f"{text} The script's own options come after its name: `{parser.prog} {shlex.join(unknown.put_right)}`"
    return text if close or launchers else f"{text} The script's own options come after its name."


def _ranks(asked: str, gpus: int, cores: int) -> int:
    """The number of ranks on this node, from the value of ``--nproc-per-node``: a number, ``gpu``, ``cpu`` or ``auto``."""
    if asked == "gpu" and not gpus:
        raise LaunchError(
            "--nproc-per-node gpu starts a rank on each GPU, but torch cannot use a GPU here: set a number of ranks to train on the CPU."
        )
    here = {"gpu": gpus, "cpu": cores, "auto": gpus or cores}
    if asked in here:
        return here[asked]
    if not asked.isdecimal() or int(asked) == 0:
        known = ", ".join(f"{name} ({count} here)" for name, count in here.items())
        raise UsageError(f"--nproc-per-node {asked} is not a positive number of ranks, nor {known}.")
    return int(asked)


def _refuse_several(ranks: int, nodes: tuple[int, int], options: dict[str, Any]) -> None:
    """Raise an error for options of several ranks, which ``--data-parallel`` excludes: it runs one process on several devices."""
    if ranks > 1 or nodes != (1, 1):
        raise UsageError(
            "--data-parallel runs one process on several devices, but --nproc-per-node or --nnodes asks for several ranks. Remove "
            "--data-parallel, because ranks are faster, or remove --nproc-per-node and --nnodes."
        )
    if "strategy" in options:
        raise UsageError(
            "--data-parallel runs one process, and --strategy says how several ranks train together: remove one of them. With several "
            "ranks, --nproc-per-node says how many."
        )


def _script(arguments: argparse.Namespace, options: dict[str, Any], around: dict[str, Given], here: bool) -> Script:
    target = arguments.training_script
    doctor = arguments.module and target == DOCTOR
    if (arguments.plain or doctor) and (options or around):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in (*options, *around))
        who = DOCTOR if doctor else "--plain"
        raise UsageError(
            f"{who} does not change how a script trains, so it cannot be combined with {given}: remove "
            f"{given}{'' if doctor else ', or --plain'}."
        )
    if arguments.no_python and arguments.module:
        raise UsageError("--no-python runs a program, and --module runs a Python module: remove one of them.")
    if arguments.no_python and not arguments.plain:
        raise UsageError(
            "--no-python runs a program that is not Python, so parwrap cannot change anything in it: add --plain to only launch it."
        )
    if here:
        look_for(target, arguments)
    try:
        Options(**options)
        for name, each in around.items():
            getattr(parwrap, name)(*each.args, **each.kwargs)
    except UsageError as error:
        raise UsageError(f"{error} Your script's own options go after its name.") from None
    return Script(
        target=target,
        args=tuple(arguments.training_script_args),
        kind="module" if arguments.module else "program" if arguments.no_python else "file",
        scope=None if arguments.plain or doctor else options,
        decorators=around,
        quiet=arguments.quiet,
        hand_local_rank=arguments.plain and not arguments.no_python and not arguments.use_env,
    )


def _option_after_script(script: Script) -> str:
    """The notice that an option such as ``--nnodes`` comes after the script, so that the script receives it; empty if none does."""
    given = [argument for argument in script.args if argument.partition("=")[0].replace("_", "-") in FOR_SEVERAL_RANKS]
    source = Path(script.target).read_text(errors="replace") if script.kind == "file" and Path(script.target).is_file() else ""
    if not given or "nproc" in source:
        return ""  # a script with such an option is a launcher itself
    return (
        f"1 rank runs: {given[0]} follows {script.target}, so it is an option of the script. To start several ranks, put it before "
        f"{'-m' if script.kind == 'module' else script.target}."
    )


def look_for(target: str, arguments: argparse.Namespace) -> None:
    """Raise :class:`LaunchError` if ``target``, a script, module or program, is not there or is a directory that cannot run."""
    if arguments.no_python and shutil.which(target) is None:
        raise LaunchError(f"cannot find the program {target}: pass its path, or the name of a program on the PATH.")
    if not arguments.no_python and not arguments.module and not os.path.exists(target):
        hint = "" if target.endswith(".py") else " To run a module, put -m before its name."
        if os.path.isabs(target):
            raise LaunchError(f"cannot find the script {target}. Correct the path.{hint}")
        there = f"{target} in {os.getcwd()}"
        raise LaunchError(f"cannot find the script {there}. Correct the path, or change to the directory it is relative to.{hint}")
    if not arguments.no_python and not arguments.module and os.path.isdir(target) and not os.path.exists(f"{target}/__main__.py"):
        raise LaunchError(f"{target} is a directory without a __main__.py, so it cannot run: pass the path of a script in it.")
    if arguments.module and importlib.util.find_spec(target.partition(".")[0]) is None:
        raise LaunchError(
            f"cannot find the module {target}, neither in the current directory nor among the installed packages: change to the directory "
            "that contains the module, or install it."
        )


def _for_the_agent(arguments: argparse.Namespace) -> list[str]:
    """What needs torch's agent, by its option: a plain launch, restarts, log files and other nodes."""
    found = [name for name, given in (("--plain", arguments.plain), ("--max-restarts", arguments.max_restarts)) if given]
    found += ["--log-dir"] * bool(arguments.log_dir) + _torchrun_logs(arguments)
    return found + ["the options of the rendezvous"] * (arguments.rdzv_backend != ONE_NODE)


def _torchrun_logs(arguments: argparse.Namespace) -> list[str]:
    """The given options that ask for torchrun's own logs."""
    defaults = {"redirects": "0", "tee": "0", "local_ranks_filter": ""}
    return [f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(arguments, name) != default]


def _variables(arguments: argparse.Namespace, threads: int, share: bool) -> dict[str, str]:
    """The variables that divide cores among ranks, fix the hash seed, keep one node on its loopback, and let ranks share GPUs.

    The caller leaves out those that the user has set.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0"}
    if arguments.rdzv_backend == ONE_NODE:
        variables |= LOOPBACK
    if share:
        variables[BACKEND] = "gloo"
    return variables


def columns(facts: Mapping[str, str]) -> str:
    """``facts`` in lines of a name and a value."""
    return "\n".join(f"{name:<10} {value}" for name, value in facts.items())


def _node_counts(arguments: argparse.Namespace) -> tuple[int, int]:
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
        raise UsageError(
            f"--node-rank {arguments.node_rank} does not fit --nnodes {counts[-1]}: node ranks start at 0, and the last is "
            f"{counts[-1] - 1}."
        )
    if counts[0] < counts[-1] and arguments.rdzv_backend == "static" and not arguments.standalone:
        raise UsageError(
            f"--nnodes {arguments.nnodes} lets nodes join and leave, which --master-addr does not allow: use --rdzv-endpoint HOST:PORT."
        )
    if counts[-1] > 1 and not arguments.rdzv_endpoint:
        _require_rendezvous(arguments)
    return counts[0], counts[-1]


def _is_only_node(arguments: argparse.Namespace, nodes: tuple[int, int]) -> bool:
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


def _fill_in(arguments: argparse.Namespace, environ: Mapping[str, str], gpus: int) -> World | None:
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
    by_variables = node is not None and arguments.nnodes is None and not environ.get("PET_NNODES")
    for name in ("nnodes", "nproc_per_node"):
        _fill(arguments, name, environ, from_launcher)
    if node and arguments.nnodes not in ONE:
        from_launcher = {"node_rank": node.rank, "master_addr": node.address, "master_port": node.port}
    for name in ("node_rank", "master_addr", "master_port"):
        _fill(arguments, name, environ, from_launcher)
    by_address = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint
    if node and by_variables and arguments.nnodes not in ONE and by_address and not arguments.master_addr:
        raise LaunchError(
            f"{node.variables} in the environment make this one of {node.nodes} nodes, but do not say where the first node can be reached. "
            "If another tool has left these variables, unset them. Otherwise set MASTER_ADDR to the address of the first node, on all "
            "nodes."
        )
    return outer


def _fill(arguments: argparse.Namespace, name: str, environ: Mapping[str, str], from_launcher: Mapping[str, str | None]) -> None:
    """Set the option ``name`` unless it is given: from its ``PET_*`` variable, else from the launcher, else torchrun's default."""
    if getattr(arguments, name) is not None:
        return
    of_torchrun = f"PET_{name.upper()}"
    value = environ.get(of_torchrun) or from_launcher.get(name) or TORCHRUNS.get(name)
    if isinstance(value, str) and name in ("node_rank", "master_port"):
        if not value.strip().isdecimal():
            raise LaunchError(
                f"the environment sets --{name.replace('_', '-')} to {value!r}, which is not an integer: correct "
                f"{of_torchrun if environ.get(of_torchrun) else 'the variable'}, or pass the option on the command line."
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
        f"--nproc-per-node {asked} would start ranks here, but {outer.launcher} started this process as rank {outer.rank} of {outer.size}. "
        "Remove --nproc-per-node, start one process per node, or add --standalone for a separate run in each process."
    )


def _node_of_world(outer: World, environ: Mapping[str, str]) -> Node:
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if outer.rendezvous.startswith("tcp://"):
        address, _, port = outer.rendezvous.removeprefix("tcp://").rpartition(":")
    return Node(outer.launcher or "", "", str(outer.size), str(outer.rank), address, port, None)
