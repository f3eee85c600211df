"""Torch's private names are used in ``parwrap/torch_private/`` only, and each has a test."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

PACKAGE = Path(__file__).parents[2] / "parwrap"
ROOM = PACKAGE / "torch_private"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents)

OTHER_MODULES = {"argparse", "atexit", "functools", "logging", "np", "os", "random", "subprocess", "sys", "tempfile", "threading"}
"""Names by which files know modules that are not torch's."""
OTHERS = {
    *("_DaliBaseIterator", "_OperatorInstance", "_b", "_init_pipeline_backend", "_internal_schema_name", "_max_batch_size"),
    *("_operator_name", "_ops", "_pipes", "_process_arguments", "_schema_name", "_seed", "_spec"),
    *(
        "_DummyThread",
        "_FileOpeners",
        "_PathGlobber",
        "_StringGlobber",
        "_Outside",
        "_Traced",
        "_actions",
        "_blksize",
        "_builtin_open",
        "_config",
    ),
    *("_current_frames", "_datasource", "_distributed", "_end_with_pytest", "_ends", "_epoch", "_fields", "_finalize", "_fixtureinfo"),
    *("_forkserver", "_forkserver_pid", "_instances", "_io", "_ispytest", "_normal_accessor", "_option_string_actions", "_options"),
    *("_group_actions", "_popen", "_pytest", "_resource_tracker", "_sources", "_start", "_stop", "_use_item_location", "_wrap_update"),
}
"""Private names of other libraries, and parwrap's own of other files."""


def private(*paths):
    """The parts of dotted paths that begin with one underscore; what begins with ``_parwrap_`` says whose it is."""
    return {part for path in paths for part in re.split("[.:]", path) if re.match(r"_(?!parwrap_)[A-Za-z]", part)}


def texts_of(tree):
    """The strings of a file that can be names: no docstrings and no sentences."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from [node.value] if re.fullmatch(r"[\w.:]+", node.value) else []


def used_in(path):
    """The private names that a file of ``torch_private`` takes from torch."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from private(node.attr)
        elif isinstance(node, ast.ImportFrom):
            yield from private(node.module, *(alias.name for alias in node.names))
    for text in texts_of(tree):
        yield from private(text)


TORCHS = {name for path in ROOM.glob("*.py") for name in used_in(path)} | {
    name
    for thing in (torch, torch._C, torch.Tensor, nn.Module(), nn.parallel.DistributedDataParallel, torch.optim.Optimizer, DataLoader([0]))
    for name in private(*dir(thing))
}
"""Names that are certainly torch's: of its most common objects, and those that parwrap uses."""


def defined_in(tree):
    """The private names that a file or a class gives a meaning itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            yield node.attr


def torchs_names(source, others=frozenset()):
    """The private names of torch in ``source``, as far as they are not the code's own or ``others``."""
    tree = ast.parse(source)
    own = {*defined_in(tree)} | others
    classes = {}  # of classes in classes, the inner ones come last
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own_of_class = {*defined_in(node)}
            classes |= {id(inner): own_of_class for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value) in ("self", "cls", "super()"):
            found += {node.attr} & TORCHS - classes.get(id(node), set())
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] not in OTHER_MODULES - {"ops"}:
            found += private(node.attr) - {"_replace", "_fields"} - (own - TORCHS | others)
        elif isinstance(node, ast.keyword) and node.arg:
            found += private(node.arg) - others
        elif isinstance(node, ast.Import):
            found += private(*(alias.name for alias in node.names)) - others - sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            found += private(node.module, *(alias.name for alias in node.names)) - others
    for text in texts_of(tree):
        found += private(text) - (own - TORCHS | others)
    return sorted(found)


def test_no_other_file_uses_a_private_name_of_torch():
    found = {str(path.relative_to(PACKAGE)): torchs_names(path.read_text(), OTHERS) for path in FILES}

    assert {} == {name: names for name, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("torch._C._new()", ["_C", "_new"]),
        ("if p._version: pass", ["_version"]),
        ("optimizer._step_count += 1", ["_step_count"]),
        ("loader._iterator = None", ["_iterator"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from torch.optim.optimizer import _new", ["_new"]),
        ("importlib.import_module('torch._inductor.config')", ["_inductor"]),
        ("Patch(nn.Module, '_new_call', wrapper)", ["_new_call"]),
        ("vars(model)['_buffers']", ["_buffers"]),
        ("getattr(node, '_saved_new', None)", ["_saved_new"]),
        ("tensor.sum(_new=True)", ["_new"]),
        ("class A(DistributedDataParallel):\n    def arm(self): return self._has_rebuilt_buckets", ["_has_rebuilt_buckets"]),
        ("class A:\n    def __init__(self): self._buffers = {}\n    def of(self, module): return module._buffers", ["_buffers"]),
    ],
)
def test_a_private_name_of_torch_is_found(source, names):
    assert names == torchs_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self): self._buffers = {}\n    def all(self): return self._buffers",
        "class A:\n    def __init__(self, other): self._held = other._held",
        "sys._getframe(1)",
        "import _thread",
        "call._replace(weight=1)",
        '"""What ``torch._C`` does."""',
        "raise UsageError('torch._C is not for you')",
    ],
)
def test_private_names_of_parwrap_and_other_libraries_are_not_found(source):
    assert [] == torchs_names(source)


def names_of(path):
    """The public names that a file of ``torch_private`` defines."""
    values = [ast.literal_eval(node.value) for node in ast.parse(path.read_text()).body if _is_all(node)]
    return [f"{path.stem}.{name}" for names in values for name in names]


def _is_all(node):
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def test_each_name_has_a_test():
    tested = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        tree = ast.parse(path.read_text())
        tested |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    assert [] == [name for path in sorted(ROOM.glob("*.py")) for name in names_of(path) if name not in tested]
