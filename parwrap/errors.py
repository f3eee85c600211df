"""The exceptions that parwrap raises; every message says what was requested, why it is impossible and what to do.

::

    ParwrapError
    ├── UsageError          an invalid decorator, option or call (also a ValueError)
    ├── LaunchError         the ranks cannot be found or started
    ├── RankMismatchError   the ranks disagree: different datasets, calls or weights, or a missing rank
    │   └── LockstepError   the ranks are at different places of the script
    └── RankZeroError       rank 0 failed at what the other ranks were waiting for
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from pickle import PickleError
from traceback import walk_tb

__all__ = [
    "LaunchError",
    "LockstepError",
    "ParwrapError",
    "RankMismatchError",
    "RankZeroError",
    "UsageError",
    "counted",
    "explain",
    "in_one_line",
    "shortened",
]


UNREADABLE = (EOFError, OSError, PickleError, ValueError, zipfile.BadZipFile)
"""The errors of code that reads a file which is only half there."""


class ParwrapError(Exception):
    """Base of all errors that parwrap raises itself."""


class UsageError(ParwrapError, ValueError):
    """An invalid decorator, option or call."""


class LaunchError(ParwrapError):
    """The ranks cannot be found or started."""


class RankMismatchError(ParwrapError):
    """The ranks disagree where they must agree, or one is missing."""


class LockstepError(RankMismatchError):
    """The ranks are at different places of the script, so that one would wait for something that another never does."""


class RankZeroError(ParwrapError):
    """Rank 0 failed while the other ranks were waiting for its result."""


OF_SHAPES = re.compile("shape|size|dimension", re.IGNORECASE)


def explain(
    error: BaseException,
    ranks: int = 1,
    part: int | None = None,
    short: tuple[int, int] | None = None,
    written: Sequence[str] = (),
    changed: Callable[[], str | None] = lambda: None,
    hidden: Sequence[str] = (),
) -> None:
    """Add a note with advice to an error about device numbers, batch norms, fixed batch sizes, files or variables, unless it has notes.

    Before Python 3.11 it does nothing.

    Args:
        error: the error.
        ranks: the number of ranks.
        part: the number of samples in this rank's part of a batch; ``None`` if batches are not divided.
        short: the sizes of a short last batch of this rank's share and of all batches of one process; ``None`` if that is not the case.
        written: names of the files that only this rank sees, the last ones written.
        changed: returns the name of the file that this thread has opened last, if another process has changed it since.
        hidden: the environment variables that the script does not see.
    """
    if sys.version_info < (3, 11) or isinstance(error, ParwrapError) or getattr(error, "__notes__", None):
        return
    of_shapes = isinstance(error, (RuntimeError, ValueError, IndexError, AssertionError)) and OF_SHAPES.search(in_one_line(error))
    of_shapes = of_shapes or (isinstance(error, AssertionError) and not error.args)  # which may be about the size of a batch
    if any("invalid device ordinal" in text for text in error.args if isinstance(text, str)):
        error.add_note(
            "parwrap: each rank sees only its own GPU, which is 'cuda:0' there, so other device numbers do not exist. Write 'cuda' or "
            "'cuda:0'. To distinguish the ranks of a node, use parwrap.local_rank()."
        )
    elif ranks > 1 and isinstance(error, ValueError) and "Expected more than 1 value per channel" in in_one_line(error):
        error.add_note(
            f"parwrap: each of {ranks} ranks has its share of the samples, so a batch may be one sample here and more in one process. "
            "Compute the statistics over all ranks, @parwrap.sync_bn (--sync-bn), or set drop_last=True in the loader."
        )
    elif short is not None and of_shapes:
        error.add_note(
            f"parwrap: the last batch of this rank's share has {counted(short[0], 'sample')}, where every batch of one process has "
            f"{short[1]}. If a batch size is fixed in the code, read it from the tensors, x.shape[0], set drop_last=True in the loader, or "
            "choose a batch size that divides the share."
        )
    elif part is not None and of_shapes:
        error.add_note(
            f'parwrap: with batch="global" this rank has a part of each batch, {counted(part, "sample")} of the last one. If a batch size '
            'is fixed in the code, read it from the tensors, x.shape[0], or use batch="per_rank" (--batch per-rank).'
        )
    elif written and _is_missing(error, written) and "parwrap" not in str(error):
        error.add_note(
            "parwrap: this rank's own files are in a private folder, where native code, `import` and processes that run already do not "
            f"find them: {', '.join(written)}. To read rank 0's instead, call parwrap.barrier() between the line that writes such a file "
            "and the line that reads it."
        )
    elif _missing_variable(error) in hidden:
        error.add_note(
            f"parwrap: `parwrap run` hides {_missing_variable(error)} and the other variables of a launcher from a plain script. To launch "
            "a script that distributes itself, add --plain: `parwrap run --plain ...`. Elsewhere use parwrap.rank(), parwrap.world_size()."
        )
    elif isinstance(error, UNREADABLE) and (name := changed()) is not None:
        error.add_note(
            f"parwrap: {name} has changed since this rank opened it, because another process writes it, such as a child process of another "
            "rank: child processes write real files on every rank. Call parwrap.barrier() between the line that waits for these processes "
            "and the line that reads the file."
        )


def _is_missing(error: BaseException, written: Sequence[str]) -> bool:
    """Whether ``error`` says that a file is missing, or a module whose file is among those ``written``."""
    module = f"{error.name}".rpartition(".")[2] if isinstance(error, ModuleNotFoundError) else ""
    return "No such file" in str(error) or f"{module}.py" in written


def _missing_variable(error: BaseException) -> str:
    """The environment variable that ``error`` says is missing; empty if it is another error.

    >>> _missing_variable(KeyError("RANK")), _missing_variable(ValueError("environment variable RANK expected, but not set"))
    ('', 'RANK')
    """
    of_torch = re.search(r"environment variable (\w+) expected", str(error)) if isinstance(error, ValueError) else None
    if of_torch is not None or not isinstance(error, KeyError):
        return of_torch[1] if of_torch else ""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(error.args[0]) if frames and frames[-1].f_code is type(os.environ).__getitem__.__code__ else ""


def counted(number: int, what: str) -> str:
    """``number`` and the noun ``what``, in the plural unless the number is 1. Its plural must be regular.

    >>> counted(1, "sample"), counted(2, "batch")
    ('1 sample', '2 batches')
    """
    return f"{number} {what if number == 1 else what + ('es' if what.endswith(('ch', 's')) else 's')}"


def in_one_line(error: BaseException) -> str:
    """The type of ``error`` and the first line of its message.

    >>> in_one_line(ValueError("no data\\nin train.csv")), in_one_line(KeyboardInterrupt())
    ('ValueError: no data', 'KeyboardInterrupt')
    """
    try:
        return f"{type(error).__qualname__}: {error}".splitlines()[0].removesuffix(": ")
    except Exception:  # in its own __str__
        return type(error).__qualname__


def shortened(text: str, limit: int) -> str:
    """``text``, cut and with dots at its end if it has ``limit`` characters or more.

    >>> shortened("tensor(0.5)", 12), shortened("tensor(0.25)", 12)
    ('tensor(0.5)', 'tensor(0....')
    """
    return text if len(text) < limit else f"{text[: limit - 3]}..."
