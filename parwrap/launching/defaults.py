"""The user's defaults for ``parwrap run``: the table ``[tool.parwrap]`` of the nearest ``pyproject.toml`` that has one."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parwrap.errors import UsageError
from parwrap.launching.command_line import split_at_script
from parwrap.launching.job_launchers import launchers_with

__all__ = ["NONE", "TURNED_OFF", "Defaults", "defaults_here"]

TURNED_OFF = "--no-defaults"
"""The option that leaves the table out."""

NO_DEFAULT = {"help", "help_all", "version", "shell_completion", "launcher", "no_defaults", "training_script", "training_script_args"}
"""What only a command can ask for."""


class Defaults(NamedTuple):
    """A table of defaults.

    Attributes:
        file: the file that has it; ``None`` if there is none.
        table: its keys, which are the names of options, and their values.
    """

    file: Path | None = None
    table: Mapping[str, Any] = {}

    def likely(self) -> list[str]:
        """The table as options, unchecked."""
        return [f"--{key}={value}" for key, value in self.table.items()]

    def split(self, parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split ``argv`` at the script, as :func:`split_at_script`, and put the defaults before its options, so that these win.

        A script that is only launched takes no defaults for training.

        Raises:
            UsageError: the table has an unknown key or a value of a wrong type, or as in :func:`split_at_script`.
        """
        given, script = split_at_script(parser, argv)
        if TURNED_OFF in given:
            return given, script
        options = self._options(parser)
        if "--plain" in given or "--plain" in options.values():
            from parwrap.launching.training_options import DECORATORS, OF_DECORATORS, SCOPE_OPTIONS  # imports torch

            of_training = {*SCOPE_OPTIONS, *DECORATORS, *OF_DECORATORS}
            options = {key: option for key, option in options.items() if key.replace("-", "_") not in of_training}
        return [*options.values(), *given], script

    def used(self, given: Sequence[str]) -> str:
        """The keys that no option in ``given`` overrides, with their values and the file; empty if there are none."""
        names = [] if TURNED_OFF in given else [option.partition("=")[0].replace("_", "-") for option in given]
        table = {key: value for key, value in self.table.items() if value is not False}
        used = [f"{key}={value}" for key, value in table.items() if names.count(f"--{key.replace('_', '-')}") == 1]
        return f"{', '.join(used)} ({self.file})" if used else ""

    def _options(self, parser: argparse.ArgumentParser) -> dict[str, str]:
        known = {
            option.removeprefix("--"): action
            for option, action in parser._option_string_actions.items()
            if option.startswith("--") and action.dest not in NO_DEFAULT
        }
        options = {}
        for key, value in self.table.items():
            action = known.get(name := key.replace("_", "-"))
            if action is None:
                raise UsageError(f"{self.file}: [tool.parwrap] has the key {key}, {_instead(name, list(known))}")
            if isinstance(value, bool) != (action.nargs == 0) or not isinstance(value, (bool, int, float, str)):
                takes = "true or false" if action.nargs == 0 else "a string or a number"
                raise UsageError(f"{self.file}: [tool.parwrap] has {key} = {value!r}, but --{name} takes {takes} there.")
            if value is not False:
                options[name] = f"--{name}" if value is True else f"--{name}={value}"
        return options


NONE = Defaults()
"""No table."""


def defaults_here() -> Defaults:
    """The defaults in the working directory: of the nearest ``pyproject.toml``, in it or above, that has ``[tool.parwrap]``.

    Raises:
        UsageError: a file that mentions parwrap is no TOML.
    """
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return NONE
    for file in (each / "pyproject.toml" for each in (here, *here.parents)):
        try:
            text = file.read_bytes()
        except OSError:
            continue
        if b"tool.parwrap" not in text:
            continue
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            table = toml.loads(text.decode()).get("tool", {}).get("parwrap")
        except ValueError as error:
            raise UsageError(f"{file} is no valid TOML: {error}. Correct it.") from None
        if isinstance(table, dict):
            return Defaults(file, table)
    return NONE


def _instead(name: str, known: Sequence[str]) -> str:
    if launchers := launchers_with(f"--{name}"):
        return f"an option of --launcher {' and '.join(launchers)}: write it on the command line."
    if name in ("launcher", "no-defaults"):
        return f"which only a command can ask for: write --{name} there."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"which is no option of parwrap run: did you mean {close[0]}?"
