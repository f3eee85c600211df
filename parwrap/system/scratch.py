"""Where a rank stores files that only it reads: in its launcher's directory, because a killed rank cannot remove them.

A rank of another launcher keeps them among the temporary files.
"""

import os
import tempfile

__all__ = ["SCRATCH", "scratch_directory"]

SCRATCH = "PARWRAP_SCRATCH"
"""The environment variable in which a launcher names its directory."""


def scratch_directory() -> str:
    """A new directory for this process.

    >>> path = scratch_directory()
    >>> os.listdir(path)
    []
    >>> os.rmdir(path)
    """
    launchers = os.environ.get(SCRATCH, "")
    return os.path.realpath(tempfile.mkdtemp(prefix="parwrap-scratch-", dir=launchers if os.path.isdir(launchers) else None))
