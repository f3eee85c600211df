import ast
import inspect
import subprocess
import sys

import pytest

import parwrap
from parwrap.api import signatures
from parwrap.decorator import ScopeDecorator

IMPORT = "import sys; before = set(sys.modules); import parwrap; print(*sorted(set(sys.modules) - before))"


def test_every_public_name_is_there_and_documented():
    assert sorted(set(parwrap.__all__)) == sorted(parwrap.__all__)
    for name in parwrap.__all__:
        assert getattr(parwrap, name).__doc__, name
    assert {*parwrap.__all__, "__version__", "data"} == set(dir(parwrap))


DECORATORS = {
    name: each for name in parwrap.__all__ if isinstance(each := getattr(parwrap, name), type) and issubclass(each, ScopeDecorator)
}


def seen_by_a_type_checker(name):
    """The options of a decorator, as :mod:`parwrap` declares them: names, whether by name alone, and defaults."""
    declared = [node for each in ast.parse(inspect.getsource(parwrap)).body if isinstance(each, ast.If) for node in each.body]
    taken = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in declared if isinstance(node, ast.Assign)}
    if name in taken:
        home = parwrap._HOME_OF[name].removeprefix("parwrap.api.")
        assert f"signatures.decorator(_{home}.{name}.__init__)" == taken[name]
        options = list(inspect.signature(DECORATORS[name].__init__).parameters.values())[1:]
        return [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in options]
    (kind,) = [node.annotation.attr for node in declared if isinstance(node, ast.AnnAssign) and node.target.id == name]
    call = ast.parse(inspect.getsource(getattr(signatures, kind))).body[0].body[-1].args
    first = zip(call.args[1:], [ast.unparse(default) for default in call.defaults] or ["None"] * len(call.args), strict=False)
    by_name = zip(call.kwonlyargs, map(ast.unparse, call.kw_defaults), strict=True)
    return [(each.arg, False, eval(default)) for each, default in first] + [(each.arg, True, eval(default)) for each, default in by_name]


@pytest.mark.parametrize("name", DECORATORS)
def test_editors_and_type_checkers_see_every_option_of_a_decorator(name):
    options = inspect.signature(DECORATORS[name]).parameters.values()

    assert [(each.name, each.kind is each.KEYWORD_ONLY, each.default) for each in options] == seen_by_a_type_checker(name)


def test_the_names_of_data_are_there_and_documented():
    for name in parwrap.data.__all__:
        assert getattr(parwrap.data, name).__doc__, name
    assert set(parwrap.data.__all__) <= set(dir(parwrap.data))
    with pytest.raises(AttributeError, match=r"module .parwrap\.data. has no attribute .pad."):
        _ = parwrap.data.pad


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'parwrap' has no attribute 'distribute'"):
        _ = parwrap.distribute


@pytest.mark.parametrize(("code", "imports_torch"), [(IMPORT, False), (IMPORT.replace("parwrap;", "parwrap; parwrap.rank;"), True)])
def test_importing_parwrap_imports_nothing_else_until_a_name_is_used(code, imports_torch):
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert "parwrap" in imported
    assert imports_torch == ("torch" in imported)
