"""Prepares pytest once for the ranks of all tests, when the fork server imports this file; otherwise it would take each rank 60 ms."""

import json
import os

from parwrap.patching.imported_names import note_loaded_modules
from parwrap.testing.rank_process import minimal_pytest

PYTEST_OPTIONS = "PARWRAP_TESTING_PYTEST_OPTIONS"
"""The environment variable that has the ranks' pytest options, as JSON."""

if PYTEST_OPTIONS in os.environ:
    minimal_pytest(tuple(json.loads(os.environ[PYTEST_OPTIONS])))
    os.register_at_fork(before=note_loaded_modules)  # not now: this module moves to the end of sys.modules when it has been imported
