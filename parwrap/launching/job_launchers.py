"""Maps the name of a launcher to its module, which is loaded on demand, and an option to the launchers that have it.

A launcher is a module with ``add_options(group)``, which adds its options to argparse; ``launch(job)``, which starts a
:class:`parwrap.launching.jobs.Job` and returns its exit code; and ``SHARES_FILES``, whether its nodes see the files of this machine.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
from types import ModuleType

from parwrap.errors import UsageError

__all__ = ["HOMES", "add_node_options", "count", "launcher_named", "launchers_with"]

HOMES = {name: f"parwrap.launching.{name}" for name in ("slurm", "kubeflow", "ray")}
"""The module of each launcher, by the name that ``--launcher`` takes."""


def launcher_named(name: str) -> ModuleType:
    """The launcher ``name``.

    Raises:
        UsageError: no launcher has that name.
    """
    if name not in HOMES:
        close = difflib.get_close_matches(name, HOMES, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        *others, last = HOMES
        raise UsageError(f"there is no launcher {name}.{hint} The launchers are {', '.join(others)} and {last}.")
    return importlib.import_module(HOMES[name])


def launchers_with(option: str) -> list[str]:
    """The names of the launchers that have ``option``."""
    having = []
    for name in HOMES:
        parser = argparse.ArgumentParser(add_help=False)
        launcher_named(name).add_options(parser)
        if option in parser._option_string_actions:
            having.append(name)
    return having


def add_node_options(group: argparse._ActionsContainer) -> None:
    """Add ``--nodes`` and ``--gpus-per-node`` to ``group``, for launchers that start ``parwrap run`` on nodes."""
    group.add_argument("--nodes", type=count, default=1, metavar="N", help="machines [1]")
    group.add_argument("--gpus-per-node", type=count, metavar="G", help="GPUs per machine, and default of --nproc-per-node")


def count(text: str) -> int:
    """Argparse type: a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer.")
    return int(text)
