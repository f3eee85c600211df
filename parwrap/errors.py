"""The exceptions that parwrap raises; every one says what was asked, why it cannot be and what to do.

::

    ParwrapError
    ├── UsageError          a decorator, an option or a call that cannot mean anything (also a ValueError)
    ├── LaunchError         the ranks cannot be found or started
    ├── RankMismatchError   the ranks disagree: another dataset, another call, a rank that never came
    └── RankZeroError       rank 0 failed at what the other ranks were waiting for
"""

__all__ = ["LaunchError", "ParwrapError", "RankMismatchError", "RankZeroError", "UsageError"]


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
