"""Splits a command line at the script: options of ``parwrap run`` come before it, and what follows belongs to the script.

``argparse`` cannot do this: it reads options on both sides of a positional argument. ``plan.py`` interprets the options.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from parwrap.errors import UsageError

__all__ = ["UnknownOptionError", "in_files", "parse_options", "split_at_script"]


class UnknownOptionError(UsageError):
    """An option before the script that the parser does not know; its argument is the option as written.

    Attributes:
        put_right: the command line with all such options, and their values, after the script; empty if no script is found.
    """

    def __init__(self, written: str) -> None:
        super().__init__(written)
        self.put_right: list[str] = []


def split_at_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``argv`` into options of ``parser``, spelled in full, and the script with its arguments as written.

    A long option may be abbreviated to a unique prefix; in it, a dash and an underscore are interchangeable. The words in a file replace
    ``@file``.

    Args:
        parser: the parser, whose options take one value or none.
        argv: the command line without the program's name.

    Returns:
        The options and the script's part, empty if no script is named.

    Raises:
        UnknownOptionError: ``parser`` has no such option.
        UsageError: a prefix is ambiguous, or a file cannot be read.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--nproc-per-node"), parser.add_argument("--seed")
    >>> split_at_script(parser, ["--nproc", "2", "train.py", "--seed=7", "--nproc", "5"])
    (['--nproc-per-node', '2'], ['train.py', '--seed=7', '--nproc', '5'])
    """
    options: list[str] = []
    rest = list(argv)
    read: list[str] = []
    while rest and rest[0].startswith(("-", "@")) and rest[0] not in ("-", "@"):
        written = rest.pop(0)
        if written.startswith("@"):
            if written in read:
                raise UsageError(f"{written} stands twice on the command line, or names itself: each file of options counts once.")
            read.append(written)
            rest[:0] = _words(written)
            continue
        if written == "--":
            break
        name, equals, value = _attached(parser, written)
        try:
            full = _in_full(parser, name, written)
        except UnknownOptionError as unknown:
            unknown.put_right = _put_right(parser, argv)
            raise
        takes_value = parser._option_string_actions[full].nargs is None
        if takes_value and not equals and rest:
            value = rest.pop(0)
            # argparse interprets a separate value that begins with a dash as an option
            options += [f"{full}={value}"] if value.startswith("-") else [full, value]
        else:
            options.append(f"{full}={value}" if equals else full)
    return options, rest


def in_files(argv: Sequence[str]) -> list[str]:
    """``argv`` with the words of each file ``@file`` that exists, also of those that belong to the script."""
    return [word for each in argv for word in (_words(each) if each.startswith("@") and os.path.isfile(each.removeprefix("@")) else [each])]


def _words(written: str) -> list[str]:
    """The words in the file ``@file``, as a shell reads them."""
    try:
        return shlex.split(Path(written.removeprefix("@")).read_text(), comments=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read options from {written}: {error}. Write options there as on a command line; for a script of this name, write "
            f"./{written}."
        ) from None


def parse_options(parser: argparse.ArgumentParser, options: list[str], script: Sequence[str]) -> argparse.Namespace:
    """Parse ``options`` from :func:`split_at_script`, and set ``training_script`` and ``training_script_args`` from ``script``."""
    placeholder = ["script"] if script else []  # it never looks like an option
    try:
        arguments = parser.parse_args([*options, *placeholder])
    except BrokenPipeError:  # of a help text, whose reader has seen enough, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at its end
        parser.exit()
    arguments.training_script, *arguments.training_script_args = script
    return arguments


def _put_right(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """``argv`` with the options that ``parser`` does not know, and their values, after the script; empty if no script is found.

    After an unknown option, the script is the next word that ends with ``.py`` or follows ``-m``: any other word may be its value.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--seed")
    >>> _put_right(parser, ["--epochs", "3", "--seed", "7", "--fast", "train.py", "--lr", "1"])
    ['--seed', '7', 'train.py', '--epochs', '3', '--fast', '--lr', '1']
    """
    ours: list[str] = []
    theirs: list[str] = []
    rest, before = list(argv), ""
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if word.endswith(".py") or before in ("-m", "--module"):
                return [*ours, word, *theirs, *rest]
            theirs.append(word)
            continue
        name, equals, _ = _attached(parser, word)
        try:
            before = _in_full(parser, name, word)
        except UsageError:
            before = ""
            theirs.append(word)
            continue
        ours.append(word)
        if parser._option_string_actions[before].nargs is None and not equals and rest:
            ours.append(rest.pop(0))
    return []


def _attached(parser: argparse.ArgumentParser, written: str) -> tuple[str, str, str]:
    """Split ``written`` into the option, ``"="`` if a value is attached, and this value."""
    short = written[:2]
    if not written.startswith("--") and len(written) > 2 and short in parser._option_string_actions:
        return short, "=", written[2:].removeprefix("=")
    return written.partition("=")


def _in_full(parser: argparse.ArgumentParser, name: str, written: str) -> str:
    """The full spelling of option ``name``: ``name`` itself if it is an option, otherwise the option that it abbreviates."""
    known = parser._option_string_actions
    if name in known:
        return name
    meant = {id(action): action for action in _beginning_with(known, name)}
    if len(meant) > 1:
        several = sorted(action.option_strings[0] for action in meant.values())
        named = f"{', '.join(several[:-1])} or {several[-1]}"
        raise UsageError(f"{name} is ambiguous: it may mean {named}. Write it in full. Your script's own options go after its name.")
    if not meant:
        raise UnknownOptionError(written)
    (action,) = meant.values()
    return action.option_strings[0]


def _beginning_with(known: dict[str, argparse.Action], name: str) -> Iterator[argparse.Action]:
    if not name.startswith("--"):
        return
    dashed = name.replace("_", "-")
    exact = [action for spelling, action in known.items() if spelling.replace("_", "-") == dashed]
    yield from exact or (action for spelling, action in known.items() if spelling.replace("_", "-").startswith(dashed))
