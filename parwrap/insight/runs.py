"""What ``parwrap verify`` and ``scaling`` share: parsing options of ``parwrap run`` beside their own, and running a script in scratch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from parwrap.errors import ParwrapError, UsageError, counted
from parwrap.insight.recording import PRECISELY, Settings
from parwrap.launching.command_line import UnknownOptionError, parse_options
from parwrap.launching.defaults import TURNED_OFF, defaults_here
from parwrap.launching.plan import command_parser, look_for, unknown_option
from parwrap.ranks.world import IN_SCRATCH

__all__ = ["Asked", "Run", "answered", "asked_for", "run_in_scratch"]

SET_HERE = ("--nproc-per-node", "--nproc_per_node", "--seed", "-m", "--module")
"""Options of ``parwrap run`` that the commands set for each run."""

NOT_COMPARED = ("dry_run", "plain", "launcher", "nnodes", "all_ranks", "log_dir")
"""Options of ``parwrap run`` that the commands refuse, because they run the script several times on this machine."""


TRACEBACK, MOST_LINES = "Traceback (most recent call last):", 30
REFUSED = "parwrap run: "
"""How the error begins with which ``parwrap run`` refuses a command line."""


CLEAR = "\033[K"
"""Clears the rest of a terminal's line."""


class Asked(NamedTuple):
    """What a command line asks for.

    Attributes:
        arguments: all options, as ``argparse`` gives them.
        options: those of ``parwrap run`` that hold for every run, spelled in full.
        script: the script and its arguments.
    """

    arguments: argparse.Namespace
    options: list[str]
    script: list[str]


def asked_for(argv: Sequence[str], add_own: Callable[[argparse.ArgumentParser], None]) -> Asked:
    """Parse ``argv``, with the options of ``parwrap run`` and those that ``add_own`` adds to the parser.

    Raises:
        UsageError: an option does not exist or has no effect here, or there is no script.
        LaunchError: the script does not exist.
    """
    parser = command_parser()
    of_run = set(parser._option_string_actions)
    parser.set_defaults(nproc_per_node=None, nnodes=None)
    add_own(parser)
    try:
        given, script = defaults_here().split(parser, argv)
    except UnknownOptionError as unknown:
        raise UsageError(unknown_option(unknown, parser)) from None
    arguments = parse_options(parser, given, script)
    for name in NOT_COMPARED:
        if getattr(arguments, name):
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect here: the script runs on ranks of this machine, several times. Remove the "
                "option."
            )
    look_for(arguments.training_script, arguments)
    options, rest = [], list(given)
    while rest:
        name, equals, _ = rest[0].partition("=")
        width = 2 if parser._option_string_actions[name].nargs is None and not equals else 1
        if name in of_run and name not in SET_HERE:
            options += rest[:width]
        del rest[:width]
    return Asked(arguments, options, script)


def answered(command: str, help_text: str, run: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Call ``run(argv)``, or print ``help_text`` if ``argv`` is empty or asks for it. Returns the exit code, 2 for an error of parwrap."""
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text, end="")
        return 0
    try:
        return run(argv)
    except ParwrapError as error:
        print(f"parwrap {command}: {error}", file=sys.stderr)
        return 2


class Run(NamedTuple):
    """How a run has ended.

    Attributes:
        folder: the folder with the records of the run.
        status: the exit code.
        said: everything that the run has printed.
    """

    folder: Path
    status: int
    said: str

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.status != 0

    def last(self) -> str:
        """The last lines that the run has printed, at most 30 and from its last traceback on, and its exit code; indented."""
        last = self.said[max(self.said.rfind(TRACEBACK), 0) :].splitlines()[-MOST_LINES:]
        return "\n".join(f"  {line}" for line in [*last, f"exit code {self.status}"])


def run_in_scratch(ranks: int, options: Sequence[str], settings: Settings, script: Sequence[str], folder: Path) -> Run:
    """Run ``script`` on ``ranks`` ranks with the ``options`` of ``parwrap run``, and record the run in the new ``folder``.

    Raises:
        UsageError: ``parwrap run`` refuses the options.
    """
    folder.mkdir()
    recorder = json.dumps(asdict(settings) | {"folder": str(folder)})
    on_ranks = ["--nproc-per-node", str(ranks), *(["--seed", str(settings.seed)] if ranks > 1 else [])]
    command = [sys.executable, "-m", "parwrap.run", TURNED_OFF, *on_ranks, *options, "-m", "parwrap.insight.recording", recorder, *script]
    precisely = {} if settings.timed else PRECISELY
    environ = {"PYTHONHASHSEED": "0", **precisely, **os.environ, IN_SCRATCH: "1", "PYTHONUNBUFFERED": "1"}
    output = folder / "said"
    with output.open("wb") as said, subprocess.Popen(command, env=environ, stdout=said, stderr=said, stdin=subprocess.DEVNULL) as run:
        try:
            _show_steps(run, f"{folder.name}, {counted(ranks, 'rank')}", settings, folder)
            run.wait()
        except BaseException:
            run.kill()
            raise
    shown = output.read_text(errors="replace")
    last = shown.splitlines()[-1:]
    if run.returncode == 2 and last and last[0].startswith(REFUSED):
        raise UsageError(last[0].removeprefix(REFUSED))
    return Run(folder, run.returncode, shown)


def _show_steps(run: subprocess.Popen, name: str, settings: Settings, folder: Path) -> None:
    """Until ``run`` ends, show on a terminal how many steps it has recorded."""
    if not sys.stderr.isatty():
        return
    steps = -1
    while run.poll() is None:
        if (now := len(list(folder.glob("step-*.pt")))) != steps and not settings.timed:
            steps = now
            bar = "#" * (20 * steps // settings.steps)
            after = ", to the end of the epoch" if steps == settings.steps and settings.prints else ""
            print(f"\r{CLEAR}{name} [{bar:20}] {steps} of {settings.steps} steps{after}", end="", file=sys.stderr, flush=True)
        time.sleep(0.1)
    print(f"\r{CLEAR}", end="", file=sys.stderr, flush=True)
