import builtins
import contextlib
import copy
import functools
import math
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch

from parwrap.intercept.patch import Patch, installed, is_patched


class Base:
    def method(self):
        return "base"

    @staticmethod
    def static():
        return "static"


class Inherits(Base):
    pass


def shout(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs).upper()


@pytest.mark.parametrize(("owner", "name"), [(Base, "method"), (Inherits, "method"), (Base, "static")])
def test_a_patch_is_put_back(owner, name):
    before = dict(vars(owner))
    with installed([Patch(owner, name, shout)]):
        assert getattr(owner(), name)().isupper()

    assert before == dict(vars(owner))


def test_a_patch_is_put_back_after_an_exception():
    before = vars(Base)["method"]
    with pytest.raises(KeyError), installed([Patch(Base, "method", shout)]):
        raise KeyError

    assert vars(Base)["method"] is before


def test_later_patches_act_first_and_nest():
    def by(word):
        return lambda wrapped, instance, args, kwargs: f"{word} {wrapped()}"

    with installed([Patch(Base, "method", by("inner")), Patch(Base, "method", by("outer"))]):
        assert Base().method() == "outer inner base"


def negated(wrapped, instance, args, kwargs):
    return -wrapped(*args)


def loaded(name, file, monkeypatch):
    """A module that has imported a function by value."""
    module = types.ModuleType(name)
    module.__file__, module.square_root = file, math.sqrt
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("fails", [False, True])
def test_names_that_the_users_modules_imported_are_patched_too(fails, monkeypatch):
    utilities = loaded("project.utilities", "/project/utilities.py", monkeypatch)
    with contextlib.suppress(KeyError), installed([Patch(math, "sqrt", negated), Patch(math, "sqrt", negated)]):
        assert [2, utilities.square_root] == [utilities.square_root(4), math.sqrt]
        with installed([Patch(math, "sqrt", negated)]):
            assert -2 == utilities.square_root(4)
        assert 2 == utilities.square_root(4)
        if fails:
            raise KeyError

    assert utilities.square_root is math.sqrt
    assert not is_patched(math.sqrt)


def test_partials_and_dicts_of_the_users_modules_are_patched_too(monkeypatch):
    utilities = loaded("project.utilities", "/project/utilities.py", monkeypatch)
    utilities.partial, utilities.table = functools.partial(math.sqrt, 4), {"root": math.sqrt, "of 4": functools.partial(math.sqrt, 4)}
    with installed([Patch(math, "sqrt", negated)]):
        assert [-2, -2, -2] == [utilities.partial(), utilities.table["root"](4), utilities.table["of 4"]()]

    assert [math.sqrt] * 3 == [utilities.partial.func, utilities.table["root"], utilities.table["of 4"].func]


def test_installed_packages_are_patched_only_if_the_function_is_from_there(monkeypatch):
    installed_one = loaded("library.utilities", "/python/site-packages/library/utilities.py", monkeypatch)
    standard = loaded("standard", contextlib.__file__, monkeypatch)
    patch = Patch(math, "sqrt", negated)
    with installed([patch], "project"):
        assert [2, 2] == [installed_one.square_root(4), standard.square_root(4)]
    with installed([patch], "library.training"):
        assert [-2, 2] == [installed_one.square_root(4), standard.square_root(4)]

    assert installed_one.square_root is math.sqrt


@pytest.mark.parametrize("file", ["/project/late.py", "/python/site-packages/late.py"])
def test_a_module_that_was_imported_inside_has_the_original_afterwards(file, monkeypatch):
    with installed([Patch(math, "sqrt", negated)]):
        with installed([Patch(math, "sqrt", negated)]):
            late = loaded("late", file, monkeypatch)
            assert 2 == late.square_root(4)
        assert -2 == late.square_root(4)

    assert late.square_root is math.sqrt


@pytest.mark.parametrize("unloads", [False, True])
def test_a_module_that_was_unloaded_and_loaded_again_has_the_original_afterwards(unloads, monkeypatch):
    loaded("other", "/python/site-packages/other.py", monkeypatch)
    with monkeypatch.context() as before:
        loaded("late", "/python/site-packages/late.py", before)
        with installed([Patch(math, "sqrt", negated)]):
            pass
    with installed([Patch(math, "sqrt", negated)]):
        if unloads:
            monkeypatch.delitem(sys.modules, "other")
        late = loaded("late", "/python/site-packages/late.py", monkeypatch)

    assert late.square_root is math.sqrt


def test_patches_can_be_removed_in_another_order(monkeypatch):
    """A script that starts its own group removes the outer ones while the inner stay."""
    utilities = loaded("utilities", "/project/utilities.py", monkeypatch)
    outer, inner = (installed([Patch(math, "sqrt", negated)]) for _ in range(2))
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert -2 == utilities.square_root(4)
    inner.__exit__(None, None, None)

    assert utilities.square_root is math.sqrt
    assert not is_patched(math.sqrt)


def test_a_patched_function_copies_and_pickles_as_itself():
    """A model may hold print as its logger, and be copied for an average of its weights, or saved."""
    with installed([Patch(builtins, "print", shout), Patch(torch, "save", shout)]):
        for function in (builtins.print, torch.save):
            for copied in (copy.copy(function), copy.deepcopy([function])[0], pickle.loads(pickle.dumps(function))):
                assert copied is function
        pickled = pickle.dumps(print)

    assert pickle.loads(pickled) is print


CALLER = """
import math, wrapt
from parwrap.intercept.patch import Patch, caller, installed
def mine(): return math.sqrt(4)
with installed([Patch(math, "sqrt", lambda *call: caller().f_code.co_name)]):
    print(mine(), wrapt.FunctionWrapper.__module__)
"""


@pytest.mark.parametrize("without_extension", ["", "1"])
def test_a_wrapper_finds_the_caller_also_where_wrapt_is_plain_python(without_extension):
    environ = {**os.environ, "WRAPT_DISABLE_EXTENSIONS": without_extension}
    said = subprocess.run([sys.executable, "-c", CALLER], env=environ, capture_output=True, text=True, check=True).stdout
    assert said.startswith("mine ")
