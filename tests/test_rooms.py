"""The rooms of the package: imports only go down, and nothing finds out what a script means from its bytecode or from live objects."""

import ast
import io
import re
import runpy
from pathlib import Path

from docutils import nodes
from docutils.core import publish_doctree
from docutils.parsers.rst import Directive, directives, roles

import parwrap

PACKAGE = Path(parwrap.__file__).parent
ROOMS = [
    *("__main__", "run", "insight", "doctor", "launching", "testing", "decorators", "precision", "norm", "strategies", "data", "checks"),
    *("loop", "rows", "rank_zero", "intercept", "inline", "ranks", "torch_private", "options", "places", "messages", "errors"),
]
"""From the top down."""

FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")}


def imported(path):
    """The modules of the package that a file imports, in functions too, and for types alone."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "parwrap":
            inner = node.module.partition(".")[2]
            found |= {name if (name := f"{inner}.{each.name}".strip(".")) in FILES else inner for each in node.names}
    return {each for each in found if each}


def room(module):
    return module.partition(".")[0]


def test_every_file_is_in_a_room():
    assert {room(module) for module in FILES} == {*ROOMS, "__init__"}


def test_imports_only_go_down():
    up = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        for other in imported(path)
        if module != "__init__" and ROOMS.index(room(other)) < ROOMS.index(room(module))
    ]

    assert [] == up


def test_no_file_imports_itself_through_others():
    left = {module: imported(path) for module, path in FILES.items()}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]

    assert {} == left


def test_nothing_reads_bytecode_reference_counts_or_the_collector():
    guesses = re.compile(r"getrefcount|co_code|\bdis\.|gc\.get_|\bf_lasti\b")
    assert [] == [module for module, path in FILES.items() if guesses.search(path.read_text())]


def test_only_the_table_of_devices_and_private_names_use_torchs_module_for_cuda():
    """Not in comments and docstrings, which may name it for the reader, and not in messages."""
    found = []
    for module, path in FILES.items():
        if module != "ranks.device" and room(module) != "torch_private":
            uses = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            found += [f"{module}: {use}" for use in uses if use == "torch.cuda"]

    assert [] == found


DOCS = PACKAGE.parent / "docs"


def test_the_architecture_page_names_every_room_and_only_what_exists():
    page = (DOCS / "architecture.rst").read_text()
    named = set(re.findall(r"``([a-z_]+)/?``", page.split("One picture")[0]))
    paths = re.findall(r"``([a-z_]+/[a-z_]+\.py)``(?:: ``(\w+)``)?", page + (DOCS / "how_it_works.rst").read_text())

    assert set() == set(ROOMS) - named
    assert len(paths) > 60
    assert [] == [path for path, _ in paths if not (PACKAGE / path).exists() and not (PACKAGE.parent / path).exists()]
    assert [] == [f"{path}: {name}" for path, name in paths if name and not re.search(rf"\b{name}\b", (PACKAGE / path).read_text())]


def test_no_public_name_is_also_that_of_a_room():
    """Importing the room would replace the name: ``parwrap.launch(train)`` would call a module."""
    assert set() == set(parwrap.__all__) & set(ROOMS)


class OfTheSite(Directive):
    """A directive of Sphinx or of ``docs/site_pages.py``, which docutils does not know. A build of the site checks it."""

    has_content = final_argument_whitespace = True
    optional_arguments = 1
    option_spec = dict.fromkeys(("caption", "maxdepth", "start-at", "end-before", "pyobject", "dedent"), directives.unchanged)

    def run(self):
        return []


for name in (
    "toctree",
    "literalinclude",
    "tab-set",
    "example",
    "command-line",
    "rst-class",
    "currentmodule",
    "autoclass",
    "autofunction",
    "autoexception",
):
    directives.register_directive(name, OfTheSite)
roles.register_generic_role("class", nodes.literal)


def test_pages_are_well_formed_and_their_links_lead_to_pages():
    for page in [DOCS.parent / "README.rst", *DOCS.rglob("*.rst")]:
        complaints = io.StringIO()
        publish_doctree(page.read_text(), str(page), settings_overrides={"warning_stream": complaints, "report_level": 2})
        links = re.findall(r"<([\w/.]+\.rst)>", page.read_text())

        assert "" == complaints.getvalue(), page
        assert [] == [link for link in links if not (page.parent / link).exists()], page


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference" / "api.rst").read_text()

    assert sorted(parwrap.__all__) == sorted(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))


def test_the_pictures_are_those_that_the_program_draws():
    draw = runpy.run_path(str(DOCS / "draw.py"))

    assert {name: make() for name, make in draw["PICTURES"].items()} == {
        path.name: path.read_text() for path in (DOCS / "pictures").iterdir()
    }


def test_files_of_tests_have_different_names():
    """pytest imports them as top-level modules."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.parent.name != "scripts" and path.name != "conftest.py"]

    assert sorted(set(names)) == sorted(names)
