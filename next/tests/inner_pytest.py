"""What a pytest inside a test is given to run; the fixture ``run`` in ``conftest.py`` runs it."""

from collections.abc import Callable
from textwrap import dedent, indent

import pytest

Run = Callable[..., pytest.RunResult]
HEAD = """\
import ctypes, multiprocessing, os, signal, sys, time, unittest
import pytest
import torch.distributed as dist
from parwrap import rank
"""


def on_two_ranks(body: str) -> str:
    return f"@pytest.mark.ranks(2)\ndef test_it():\n{indent(dedent(body).strip(), '    ')}\n"
