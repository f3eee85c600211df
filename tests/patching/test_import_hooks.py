"""Who waits for a module is told when it is imported; what then is patched is put back."""

import importlib.util
import sys

import pytest

import parwrap
from parwrap.patching.import_hooks import imports_watched
from parwrap.patching.patch import Patch, when_imported


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


def test_told_once_when_it_is_loaded(optional):
    told, before = [], list(sys.meta_path)
    with imports_watched(f"{optional}.part", told.append):
        assert importlib.util.find_spec(optional)
        assert [] == told
        package = importlib.import_module(optional)
        assert [package.part] == told
        importlib.import_module(f"{optional}.part")

    assert [package.part] == told
    assert before == sys.meta_path
    assert "exec_module" not in vars(package.part.__loader__)


def test_an_import_that_fails(optional):
    told, before = [], list(sys.meta_path)
    with pytest.raises(KeyError, match="on purpose"), imports_watched(f"{optional}.broken", told.append):
        importlib.import_module(f"{optional}.broken")

    assert [] == told
    assert before == sys.meta_path


def test_a_module_that_is_not_there(optional):
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


@pytest.mark.ranks(2)
def test_nothing_that_is_optional_is_imported_by_parwrap():
    with parwrap.distributed():
        assert "nvidia.dali" not in sys.modules
