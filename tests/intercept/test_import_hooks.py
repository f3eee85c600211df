"""A function is called when a module is imported, and patches of that module are put back."""

import importlib.util
import sys

import pytest

from parwrap.intercept.import_hooks import imports_watched
from parwrap.intercept.patch import Patch, when_imported


@pytest.fixture
def optional(tmp_path, monkeypatch):
    """The name of a package that is not imported yet, with a module in it."""
    package = tmp_path / "optional_package"
    package.mkdir()
    (package / "__init__.py").write_text("from optional_package.part import name")
    (package / "part.py").write_text("def name(): return 'name'")
    (package / "broken.py").write_text("raise KeyError('on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    yield package.name
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


def test_the_function_is_called_once_when_the_module_is_loaded(optional):
    seen, before = [], list(sys.meta_path)
    with imports_watched(f"{optional}.part", seen.append):
        assert importlib.util.find_spec(optional)
        assert [] == seen
        package = importlib.import_module(optional)
        assert [package.part] == seen
        importlib.import_module(f"{optional}.part")

    assert [package.part] == seen
    assert before == sys.meta_path
    assert "exec_module" not in vars(package.part.__loader__)


def test_an_import_that_fails(optional):
    seen, before = [], list(sys.meta_path)
    with pytest.raises(KeyError, match="on purpose"), imports_watched(f"{optional}.broken", seen.append):
        importlib.import_module(f"{optional}.broken")

    assert [] == seen
    assert before == sys.meta_path


def test_a_missing_module(optional):
    with pytest.raises(ModuleNotFoundError), imports_watched(f"{optional}.none", print):
        importlib.import_module(f"{optional}.none")


@pytest.mark.parametrize("imported", ["before", "between", "within"])
def test_patches_are_installed_in_the_order_of_the_blocks_and_put_back(optional, imported):
    def adding(what):
        return lambda module: [Patch(module, "name", lambda wrapped, instance, args, kwargs: what + wrapped())]

    part = f"{optional}.part"
    if imported == "before":
        importlib.import_module(part)
    with when_imported(part, adding("first ")):
        if imported == "between":
            importlib.import_module(part)
        with when_imported(part, adding("second ")):
            module = importlib.import_module(part)
            assert "second first name" == module.name()
        assert "first name" == module.name()

    assert "name" == module.name()
    assert type(lambda: None) is type(module.name)
