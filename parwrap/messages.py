"""The lines that parwrap prints while a script runs: records of the logger ``parwrap``.

Its own handler prints them, and they do not propagate, so a logging configuration of the script neither doubles nor hides them.
``getLogger("parwrap").propagate = True`` or a handler there gives them to the script's logs, too.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from logging import DEBUG, INFO, WARNING

__all__ = ["DEBUG", "INFO", "WARNING", "quiet", "tell"]

LEVELS = {"quiet": WARNING, "info": INFO, "debug": DEBUG}
"""The values of the variable ``PARWRAP_LOG``."""


class _Printer(logging.Handler):
    """Prints each message to stderr, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")  # a bar that is shown would be on the same line
        with bars.tqdm.external_write_mode(sys.stderr) if bars is not None else nullcontext():
            sys.stderr.write(f"parwrap: {record.getMessage()}\n")  # not print, which a script may replace


_logger = logging.getLogger("parwrap")
_logger.propagate = False
_logger.addHandler(_Printer())


def _least() -> int:
    """The least level that is printed: the logger's, if the script has set it."""
    return _logger.level or LEVELS.get(os.environ.get("PARWRAP_LOG", ""), INFO)


def quiet() -> bool:
    """Whether ``PARWRAP_LOG=quiet`` or the script leaves out what is only informative, such as the summary of a run."""
    return _least() > INFO


def tell(text: str, level: int = WARNING) -> None:
    """Print ``text`` if its ``level`` is among those that the user wants, also if the script has disabled all loggers that there are."""
    if level >= _least():
        _logger.disabled = False  # ``dictConfig`` disables loggers that it does not know
        _logger.handle(_logger.makeRecord(_logger.name, level, "", 0, text, (), None))
