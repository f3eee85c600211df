"""Imports only go down the floors of the design, and who may touch what is kept to."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "parwrap"
FLOORS = [
    {
        "errors",
        "options",
        "world",
        "interfaces",
        "families",
        "node_lists",
        "nodes",
        "imported",
        "importing",
        "patching",
        "decorator",
        "processes",
        "progress_bars",
        "wording",
    },
    {
        "background",
        "device",
        "meeting_place",
        "sites",
        "memory",
        "mailbox",
        "blackboard",
        "lane",
        "whereabouts",
        "meetings",
        "watch",
        "first_failure",
        "group",
        "held_signals",
        "collectives",
        "batch_weights",
        "structures",
        "loop",
        "step_draws",
        "streams",
    }
    | {"inherited", "object_changes", "raised", "reach", "returned", "speaking", "launched_rank", "forking", "spawning", "launching"},
    {"verbs"},
    {"strategies", "data", "files", "voices", "precision", "accumulation"},
    {"features"},
    {"mixins"},
    {
        "__main__",
        "command_line",
        "plan",
        "node_options",
        "outer",
        "feature_options",
        "strategy_options",
        "launchers",
        "run",
        "script",
        "agent",
        "network",
        "waiting",
        "between_nodes",
        "rank_output",
        "failures",
        "forwarded_signals",
        "fork_server",
        "testing",
        "doctor",
        "_rank_fixtures",
        "_rank_launcher",
        "_rank_process",
    },
]
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """The modules that a file imports, anywhere in it, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "parwrap")


def home(path):
    """The name on a floor that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != PACKAGE or path.stem != "__init__"], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_go_down(path):
    mine = FLOOR_OF[home(path)]
    higher = [name for name in imports(path) if name.startswith("parwrap.") and FLOOR_OF.get(name.split(".")[1], 0) > mine]

    assert [] == higher


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("import wrapt", {"patching.py"}),
        ("dist.init_process_group(", {"group.py"}),
        ("warnings.warn(", set()),
        (
            "os.environ.pop(",
            {"features/environment.py", "meeting_place.py", "script.py", "run.py", "_rank_launcher.py", "_rank_process.py"},
        ),
    ],
)
def test_who_may_touch_what(what, where):
    assert {str(path.relative_to(PACKAGE)) for path in FILES if what in path.read_text()} <= where


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_says_what_its_job_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
