"""Commands that a script runs: every rank runs them, and parwrap cannot restrict another program to rank 0."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from parwrap.errors import UsageError
from parwrap.intercept.patch import Patch, installed
from parwrap.places import Place, from_script, outside_of, script_place, warn

__all__ = ["only_reads", "refusing_exec", "warn_of_command"]

_READERS = (
    "arch basename cat cut date df dirname du echo expr false file free getconf grep groups head hostname id ifconfig ip ldd ls "
    "lsb_release lscpu lsmod lspci md5sum nproc nvidia-smi nvidia-topo pgrep printenv printf ps pwd readlink realpath rocm-smi "
    "sha1sum sha256sum sleep stat stty tail test tput tr true tty uname uptime vmstat wc whereis which who whoami xpu-smi"
)
READERS = frozenset(_READERS.split())
"""Commands that change no file, unless their output is redirected to one."""

READING_SUBCOMMANDS = {
    "git": {"rev-parse", "rev-list", "log", "status", "diff", "describe", "show", "ls-files", "ls-remote", "symbolic-ref", "blame"},
    "pip": {"list", "freeze", "show"},
    "conda": {"list", "info"},
}
LISTING = ("git branch", "git remote", "git tag", "git config")
"""Subcommands that change nothing if only options follow, or with ``--get``."""

LONGEST = 60
"""The number of characters of a command to show."""


def warn_of_command(command: Any, size: int, said: set[Place]) -> None:
    """Warn, once for each line, if the script runs a ``command`` that may change files. Commands that a library runs cause no warning.

    Args:
        command: the command, in a form that ``subprocess`` accepts.
        size: the number of ranks.
        said: the lines that have caused a warning; this line is added.
    """
    frame = outside_of(sys._getframe(), "parwrap", "wrapt")
    if only_reads(command) or not from_script(frame) or (place := script_place(frame)) in said:
        return
    said.add(place)
    shown = command if isinstance(command, str) else subprocess.list2cmdline(map(os.fsdecode, command))
    shown = shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."
    warn(
        f"parwrap: this line runs `{shown}` on each of {size} ranks, which may change files {size} times. Run it in a function decorated "
        "with @parwrap.rank_zero_only."
    )


def only_reads(command: Any) -> bool:
    """Whether ``command``, in the form that ``subprocess`` accepts, is known to change no file.

    >>> [only_reads(each) for each in ("git rev-parse HEAD", ["nvidia-smi", "-L"], "ls | wc -l 2> /dev/null", "git branch --show-current")]
    [True, True, True, True]
    >>> [only_reads(each) for each in ("ls > names.txt", ["touch", "a"], "cat a | tee b", "git branch new", "")]
    [False, False, False, False, False]
    """
    if not isinstance(command, (str, bytes, os.PathLike)):
        return _reads([os.fsdecode(each) for each in command])
    text = re.sub(r"(\d?>&\d|(\d|&)?>\s*/dev/null)", "", os.fsdecode(command))
    if ">" in text or "`" in text or "$(" in text:
        return False
    try:
        return all(_reads(shlex.split(part)) for part in re.split(r"\|\|?|&&?|;|\n", text))
    except ValueError:
        return False


def refusing_exec(size: int) -> AbstractContextManager[None]:
    """Inside the block, ``os.exec*`` raises :class:`UsageError` on this rank, one of ``size``. Processes that it forks may call it."""
    rank = os.getpid()

    def refuse(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        if os.getpid() == rank:
            raise UsageError(
                f"{script_place()} calls os.{wrapped.__name__}, which replaces this rank by a program that is not a rank: {size} "
                "separate programs would run. If the script starts itself again to set a variable, set the variable before the command: "
                "`NAME=value parwrap run ...`."
            )
        return wrapped(*args, **kwargs)

    return installed([Patch(os, name, refuse) for name in ("execv", "execve")])  # the other exec* call these


def _reads(words: list[str]) -> bool:
    if not words:
        return False
    name, *rest = os.path.basename(words[0]), *words[1:]
    arguments = [each for each in rest if not each.startswith("-")]
    if rest and not arguments and {*rest} <= {"--version", "-V", "-v", "--help", "-h"}:
        return True
    if name in READERS or (arguments and arguments[0] in READING_SUBCOMMANDS.get(name, ())):
        return True
    listing = f"{name} {rest[0]}" in LISTING if rest else False
    return listing and (all(each.startswith("-") for each in rest[1:]) or "--get" in rest)
