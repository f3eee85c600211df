"""Imports only go down the rooms of the design, and restricted modules are used only where allowed."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parwrap"
PAGE = PACKAGE.parent / "docs" / "architecture.rst"
ROOMS = re.findall(r"^``(\w+)/?`` ", PAGE.read_text(), re.MULTILINE)
"""From the highest to the lowest, as the page lists them."""
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """The modules that a file imports, anywhere in it, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "parwrap")


def room(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_the_page_lists_every_room_once():
    assert sorted({room(path) for path in FILES} - {"__init__"}) == sorted(ROOMS)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != PACKAGE or path.stem != "__init__"], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_go_down(path):
    higher = ROOMS[: ROOMS.index(room(path))]

    assert [] == [name for name in imports(path) if name.startswith("parwrap.") and name.split(".")[1] in higher]


@pytest.mark.parametrize(
    ("parent", "rooms"),
    [
        ("strategies", ["parameter_server", "hogwild", "local_sgd", "zero1", "fsdp", "ddp", "data_parallel", "common"]),
        ("launching", ["jobs", "elastic", "command"]),
        ("data", ["evaluation", "lengths"]),
    ],
)
def test_imports_go_down_within_a_room(parent, rooms):
    for number, name in enumerate(rooms):
        for path in (PACKAGE / parent / name).glob("*.py"):
            higher = {f"parwrap.{parent}.{each}" for each in rooms[:number]}

            assert [] == [each for each in imports(path) if any(f"{each}.".startswith(f"{one}.") for one in higher)], path


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("import wrapt", {"patching/patch.py"}),
        ("dist.init_process_group(", {"group/group.py"}),
        ("warnings.warn(", set()),
        (
            "os.environ.pop(",
            {
                "session/hidden_launch.py",
                "group/rendezvous.py",
                "launching/command/reexec.py",
                "launching/elastic/script_run.py",
                "testing/rank_launcher.py",
                "testing/rank_process.py",
            },
        ),
    ],
)
def test_who_may_touch_what(what, where):
    assert {str(path.relative_to(PACKAGE)) for path in FILES if what in path.read_text()} <= where


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_says_what_its_job_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name == "__init__.py" and "\n::\n" in path.read_text()], ids=lambda path: path.parent.name
)
def test_a_room_that_lists_its_files_lists_all_of_them(path):
    files = {each.name for each in path.parent.glob("*.py")} - {"__init__.py"}
    listed = set(re.findall(r"\b\w+\.py\b", (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n::\n")[1]))

    assert files == listed
