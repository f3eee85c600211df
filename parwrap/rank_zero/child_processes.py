"""Warns about file changes by child processes, which parwrap cannot restrict to rank 0, once per line of the script that starts one.

It ignores commands that only read, commands that a library runs, and files that ``DataLoader`` workers write.
"""

from __future__ import annotations

import mmap
import os
import re
import shlex
import subprocess
import sys
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from parwrap.coordination.call_site import is_ours
from parwrap.patching.imported_names import is_installed, is_standard
from parwrap.system.progress_bars import write_line

__all__ = ["Processes", "only_reads"]

READERS = frozenset(
    {
        "arch",
        "basename",
        "cat",
        "cut",
        "date",
        "df",
        "dirname",
        "du",
        "echo",
        "expr",
        "false",
        "file",
        "free",
        "getconf",
        "grep",
        "groups",
        "head",
        "hostname",
        "id",
        "ifconfig",
        "ip",
        "ldd",
        "ls",
        "lsb_release",
        "lscpu",
        "lsmod",
        "lspci",
        "md5sum",
        "nproc",
        "nvidia-smi",
        "nvidia-topo",
        "pgrep",
        "printenv",
        "printf",
        "ps",
        "pwd",
        "readlink",
        "realpath",
        "rocm-smi",
        "sha1sum",
        "sha256sum",
        "sleep",
        "stat",
        "stty",
        "tail",
        "test",
        "tput",
        "tr",
        "true",
        "tty",
        "uname",
        "uptime",
        "vmstat",
        "wc",
        "whereis",
        "which",
        "who",
        "whoami",
        "xpu-smi",
    }
)
"""Commands that change no file, unless their output is redirected to one."""

READING_SUBCOMMANDS = {
    "git": {"rev-parse", "rev-list", "log", "status", "diff", "describe", "show", "ls-files", "ls-remote", "symbolic-ref", "blame"},
    "pip": {"list", "freeze", "show"},
    "conda": {"list", "info"},
}
LISTING = ("git branch", "git remote", "git tag", "git config")
"""Subcommands that only list, as long as only options follow."""

LONGEST = 60
"""The number of characters of a command to show."""


class Processes:
    """Warns, on rank 0, about processes that may change files.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._said: set[str] = set()
        self._children_said = mmap.mmap(-1, 1)  # all forked processes share it

    def command(self, command: Any) -> None:
        """Warn if the script runs a ``command``, in the form that ``subprocess`` accepts, that may change files."""
        line = _line(sys._getframe(1), through_libraries=False)
        if line is None or line in self._said or only_reads(command):
            return
        self._said.add(line)
        shown = command if isinstance(command, str) else subprocess.list2cmdline(map(os.fsdecode, command))
        shown = shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."
        write_line(
            f"parwrap: {line} runs `{shown}` on each of {self._size} ranks. If this changes files, put it into a function decorated with "
            "@parwrap.rank_zero_only.",
        )

    def written(self, path: str) -> None:
        """Warn that a process that rank 0 has forked writes the file at ``path``."""
        if get_worker_info() is not None or self._children_said[0]:
            return
        self._children_said[0] = 1
        line = _line(sys._getframe(1), through_libraries=True)
        write_line(
            f"parwrap: {line} writes {path} in a child process, on each of {self._size} ranks. Start such processes in a function "
            "decorated with @parwrap.rank_zero_only.",
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


def _line(frame: FrameType | None, through_libraries: bool) -> str | None:
    """The innermost line of the script around ``frame``; ``None`` if a library's comes first, unless ``through_libraries``."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (is_ours(frame) or is_standard(file) or file.startswith("<frozen")) and not is_installed(file):
            return f"{file}:{frame.f_lineno}"
        if is_installed(file) and not through_libraries and not is_ours(frame) and f"{os.sep}wrapt{os.sep}" not in file:
            return None
        frame = frame.f_back
    return None
