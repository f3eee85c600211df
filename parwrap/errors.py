"""The exceptions that parwrap raises; every one says what was asked, why it cannot be and what to do.

::

    ParwrapError
    ├── UsageError          a decorator, an option or a call that cannot mean anything (also a ValueError)
    ├── LaunchError         the ranks cannot be found or started
    ├── RankMismatchError   the ranks disagree: another dataset, another call, a rank that never came
    └── RankZeroError       rank 0 failed at what the other ranks were waiting for
"""

import sys

__all__ = ["LaunchError", "ParwrapError", "RankMismatchError", "RankZeroError", "UsageError", "explain"]


class ParwrapError(Exception):
    """Base of all errors that parwrap raises itself."""


class UsageError(ParwrapError, ValueError):
    """A decorator, an option or a call that cannot mean anything."""


class LaunchError(ParwrapError):
    """The ranks cannot be found or started."""


class RankMismatchError(ParwrapError):
    """The ranks disagree where they must not."""


class RankZeroError(ParwrapError):
    """Rank 0 failed at what the other ranks were waiting for."""


def explain(error: BaseException) -> None:
    """Add to an error of CUDA's, raised on one of several ranks, what it does not tell; from Python 3.11 on."""
    said = any("invalid device ordinal" in text for text in error.args if isinstance(text, str))
    if said and sys.version_info >= (3, 11) and not getattr(error, "__notes__", None):
        error.add_note(
            "parwrap: each rank sees one GPU of its own, which is 'cuda:0' there, so another number names none. Write 'cuda' or 'cuda:0'; "
            "parwrap.local_rank() tells the ranks of a node apart."
        )
