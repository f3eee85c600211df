import builtins
import copy
import math
import pickle
import types

import pytest
import torch

from parwrap.patching import Patch, aliases, installed


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
def test_what_is_patched_is_put_back(owner, name):
    before = dict(vars(owner))
    with installed([Patch(owner, name, shout)]):
        assert getattr(owner(), name)().isupper()

    assert before == dict(vars(owner))


def test_what_is_patched_is_put_back_after_an_exception():
    before = vars(Base)["method"]
    with pytest.raises(KeyError), installed([Patch(Base, "method", shout)]):
        raise KeyError

    assert vars(Base)["method"] is before


def test_later_patches_act_first_and_nest():
    def by(word):
        return lambda wrapped, instance, args, kwargs: f"{word} {wrapped()}"

    with installed([Patch(Base, "method", by("inner")), Patch(Base, "method", by("outer"))]):
        assert Base().method() == "outer inner base"


def test_names_imported_before_are_patched_too():
    script = types.ModuleType("script")
    script.square_root = math.sqrt
    patch = Patch(math, "sqrt", lambda wrapped, instance, args, kwargs: -wrapped(*args))
    with installed([patch, *aliases([patch], script)]):
        assert script.square_root(4) == -2

    assert script.square_root is math.sqrt


def test_a_patched_function_copies_and_pickles_as_itself():
    """A model may hold print as its logger, and be copied for an average of its weights, or saved."""
    with installed([Patch(builtins, "print", shout), Patch(torch, "save", shout)]):
        for function in (builtins.print, torch.save):
            for copied in (copy.copy(function), copy.deepcopy([function])[0], pickle.loads(pickle.dumps(function))):
                assert copied is function
        pickled = pickle.dumps(print)

    assert pickle.loads(pickled) is print
