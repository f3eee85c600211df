"""The logger ``parwrap``: what the script configures neither doubles nor hides its lines, and the user chooses their level."""

import os
import subprocess
import sys

import pytest

SAYS = "from parwrap.messages import INFO, tell; tell('for information', INFO); tell('a note')"
BOTH, NOTE = "parwrap: for information\nparwrap: a note\n", "parwrap: a note\n"


def said(before, **environ):
    command = [sys.executable, "-c", f"import logging, logging.config; import parwrap.messages; {before}; {SAYS}"]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    "configured",
    [
        "pass",
        "logging.basicConfig(level=logging.DEBUG)",
        "logging.getLogger().addHandler(logging.StreamHandler()); logging.getLogger().setLevel(logging.ERROR)",
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': True, 'root': {'level': 'ERROR'}})",
        "logging.disable(logging.CRITICAL)",
    ],
)
def test_a_configuration_of_the_script_neither_doubles_nor_hides_lines(configured):
    assert BOTH == said(configured)


@pytest.mark.parametrize(("level", "expected"), [("quiet", NOTE), ("info", BOTH), ("debug", BOTH)])
def test_a_variable_sets_the_level(level, expected):
    assert expected == said("pass", PARWRAP_LOG=level)


def test_the_script_may_take_the_lines_to_its_own_log():
    own = "logging.basicConfig(format='%(levelname)s of %(name)s: %(message)s')"
    ours = "log = logging.getLogger('parwrap'); log.handlers.clear(); log.propagate = True; log.setLevel(logging.WARNING)"

    assert "WARNING of parwrap: a note\n" == said(f"{own}; {ours}")
