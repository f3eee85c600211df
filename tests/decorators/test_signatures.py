"""What editors and type checkers see of the package."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import parwrap
from parwrap.decorators.scope import ScopeDecorator
from parwrap.options import CHOICES, Options

USERS = Path(__file__).with_name("typed_by_users.py")
CONFIG = """\
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,wrapt.*]
follow_imports = skip
"""


def test_a_type_checker_sees_every_option_and_the_types_of_decorated_functions(tmp_path, monkeypatch):
    (tmp_path / "mypy.ini").write_text(CONFIG)
    monkeypatch.setenv("MYPYPATH", str(Path(parwrap.__file__).parents[1]))
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", str(USERS)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    expected = {number: line.partition("  # ")[2] for number, line in enumerate(USERS.read_text().splitlines(), 1) if "  # " in line}
    found = dict[int, str]()
    for number, text in re.findall(r"typed_by_users\.py:(\d+): (.*)", said):
        found[int(number)] = found.get(int(number), "") + text

    assert expected.keys() == found.keys(), said
    assert {} == {number: found[number] for number, text in expected.items() if text not in found[number]}


@pytest.mark.slow
def test_pyright_finds_the_same_lines(tmp_path):
    pytest.importorskip("pyright", reason="pyright is not installed: nox -s pyright")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(USERS)]
    said = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout)["generalDiagnostics"]
    found = {each["range"]["start"]["line"] + 1: each["message"] for each in said}
    expected = {number: line.partition("  # ")[2] for number, line in enumerate(USERS.read_text().splitlines(), 1) if "  # " in line}

    assert expected.keys() == found.keys(), said
    for number, text in expected.items():
        assert not text.startswith('"') or text.strip('"').removeprefix("def ") in found[number]


def test_the_values_of_options_are_those_that_type_checkers_know():
    types = {name: {*get_args(kind)} for name, kind in get_type_hints(Options).items() if name in CHOICES}
    known = {name: {value for each in kinds for value in (get_args(each) or (each,))} - {type(None)} for name, kinds in types.items()}

    assert {name: {*values} - {None} for name, values in CHOICES.items()} == known


def test_no_decorator_is_forgotten():
    decorators = [name for name in parwrap.__all__ if isinstance(each := getattr(parwrap, name), type) and issubclass(each, ScopeDecorator)]
    (block,) = [node for node in ast.parse(inspect.getsource(parwrap)).body if isinstance(node, ast.If)]
    typed = [ast.unparse(node).partition(" = signatures")[0].partition(": signatures")[0] for node in block.body[-len(decorators) :]]

    assert sorted(decorators) == sorted(typed)


def test_every_public_name_is_listed_and_documented():
    assert sorted({*parwrap.__all__, "__version__"}) == dir(parwrap)
    for name in parwrap.__all__:
        assert getattr(parwrap, name).__doc__, name


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'parwrap' has no attribute 'distribute'$"):
        _ = parwrap.distribute


def test_importing_parwrap_does_not_import_torch():
    code = "import sys, parwrap; dir(parwrap); print('torch' in sys.modules)"

    assert "False" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
