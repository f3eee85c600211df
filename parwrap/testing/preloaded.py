"""Imports what all ranks need once, and prepares pytest once, when the fork server imports this file.

Without it, torch would take each rank seconds and pytest 60 ms.
"""

import importlib
import json
import os
import sys
from contextlib import suppress

from parwrap.testing.rank_process import minimal_pytest

PRELOAD = "PARWRAP_TESTING_PRELOAD"
"""The environment variable with the names of the modules to import and the ranks' pytest options, as JSON."""


def preload(modules: list[str], pytest_options: list[str]) -> None:
    """Import those of ``modules`` that can be imported, and prepare pytest with ``pytest_options``.

    For a module that cannot be imported, the rank that needs it shows the error.
    """
    from parwrap.intercept.imported_names import note_loaded_modules  # imports torch, unlike this file, which pytest's own process imports

    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    minimal_pytest(tuple(pytest_options))
    if sys.platform != "win32":
        os.register_at_fork(before=note_loaded_modules)  # not now: this module moves to the end of sys.modules when it has been imported


if PRELOAD in os.environ:
    preload(*json.loads(os.environ[PRELOAD]))
