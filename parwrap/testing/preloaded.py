"""What the fork server does once for the ranks of all tests, when it imports this file: each rank needs it, and takes 60 ms for it."""

import json
import os

from parwrap.patching.imported_names import Namespaces
from parwrap.testing.rank_process import minimal_pytest

PYTEST_OPTIONS = "PARWRAP_TESTING_PYTEST_OPTIONS"
"""The environment variable that has the ranks' pytest options, as JSON."""

if PYTEST_OPTIONS in os.environ:
    minimal_pytest(tuple(json.loads(os.environ[PYTEST_OPTIONS])))
    os.register_at_fork(before=Namespaces)  # not now: this module moves to the end of sys.modules when it has been imported
