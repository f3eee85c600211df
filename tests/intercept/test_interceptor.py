"""What an interceptor's class overrides decides what is patched, and a method that would never be called is an error."""

import re
from contextlib import nullcontext

import pytest
import torch

from parwrap.intercept.interceptor import CALLED_WITH, DECLARED, Interceptor, intercepts
from parwrap.intercept.table import PATCH_MAKERS, intercepting, patches


def created(name, method, *bases):
    """A class with that method."""
    return type("Mine", (*bases, Interceptor), {name: method})


def steps(self, optimizer):
    """Parameters as most calls have them."""


def refusal(text):
    return pytest.raises(TypeError, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("backwards", "Did you mean 'backward'?"),
        ("took_a_step", "Did you mean 'took_step'?"),
        ("optimiser_state", "Did you mean 'optimizer_state'?"),
        ("synchronize", "parwrap/intercept/interceptor.py lists the calls."),
    ],
)
@pytest.mark.parametrize("wrap", [lambda method: method, staticmethod, classmethod])
def test_a_marked_name_that_is_not_declared(name, hint, wrap):
    with refusal(f"Mine.{name} is marked with @intercepts, but Interceptor declares no such call. {hint}"):
        created(name, wrap(intercepts(steps)))


def test_a_marked_name_that_is_not_declared_in_a_class_that_is_mixed_in():
    class Mixed:
        @intercepts
        def stepp(self, optimizer):
            pass

    with refusal("Mine.stepp is marked with @intercepts, but Interceptor declares no such call. Did you mean 'step'?"):
        created("other", None, Mixed)


@pytest.mark.parametrize("value", [lambda self, optimizer: None, None, 3])
def test_a_declared_name_without_the_mark(value):
    with refusal("Mine.took_step overrides a method of Interceptor: mark it with @intercepts, or give it another name."):
        created("took_step", value)


def test_a_declared_name_without_the_mark_in_a_subclass_or_a_class_that_is_mixed_in():
    class Mixed:
        def took_step(self, optimizer):
            pass

    marked = created("took_step", intercepts(lambda self, optimizer: None))
    text = "overrides a method of Interceptor: mark it with @intercepts, or give it another name."
    with refusal(f"Mine.took_step {text}"):
        created("other", None, Mixed)
    with refusal(f"Derived.took_step {text}"):
        type("Derived", (marked,), {"took_step": lambda self, optimizer: None})


@pytest.mark.parametrize(
    ("name", "method", "shown", "declared"),
    [
        ("step", lambda self: None, "(self)", "(self, optimizer)"),
        ("step", lambda self, optimizer, closure: None, "(self, optimizer, closure)", "(self, optimizer)"),
        ("step", lambda self, *, optimizer: None, "(self, *, optimizer)", "(self, optimizer)"),
        ("speak", lambda self, say, file: None, "(self, say, file)", "(self, say, *, file, force)"),
        ("speak", lambda self, say, stream, force: None, "(self, say, stream, force)", "(self, say, *, file, force)"),
        (
            "open_descriptor",
            lambda self, original, path, flags, mode, *, dir_fd=None: 0,
            "(self, original, path, flags, mode, *, dir_fd=None)",
            "(self, original, path, flags, mode=511, *, dir_fd=None)",
        ),
    ],
)
def test_other_parameters(name, method, shown, declared):
    with refusal(f"Mine.{name}{shown} cannot be called as Interceptor declares it: {name}{declared}."):
        created(name, intercepts(method))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("step", lambda self, of: None),
        ("step", lambda self, *args: None),
        ("step", lambda self, optimizer, again=False: None),
        ("speak", lambda self, say, file, force: None),
        ("speak", lambda self, say, **kwargs: None),
        ("open_descriptor", lambda self, original, path, flags, mode=0o777, **kwargs: 0),
    ],
)
def test_parameters_that_take_the_same(name, method):
    assert {name} == created(name, intercepts(method)).intercepted


@pytest.mark.parametrize(("name", "other"), CALLED_WITH.items())
def test_a_method_that_another_calls(name, other):
    with refusal(f"Mine.{name} is only called where {other} is intercepted: override that too."):
        created(name, intercepts(lambda self, *args: None))


def test_every_declared_call_has_its_patches():
    assert DECLARED.keys() == PATCH_MAKERS.keys() | CALLED_WITH.keys()
    assert not PATCH_MAKERS.keys() & CALLED_WITH.keys()


@pytest.mark.parametrize("name", PATCH_MAKERS)
def test_every_declared_call_patches_something(name):
    other = [each for each in CALLED_WITH if CALLED_WITH[each] == name]
    every = type("Every", (Interceptor,), {each: intercepts(lambda self, *args, **kwargs: None) for each in (name, *other)})

    assert len(PATCH_MAKERS[name](every())) == len(patches(every())) > 0


@pytest.mark.parametrize("name", DECLARED)
def test_every_declared_call_says_when_it_is_called_and_what_it_returns(name):
    returns = DECLARED[name].__annotations__["return"] != "None"

    assert returns == ("Returns" in DECLARED[name].__doc__)


def test_only_what_a_class_overrides_is_patched():
    class Steps(Interceptor):
        @intercepts
        def move(self, module, apply):
            return apply()

    class AndBackwards(Steps):
        @intercepts
        def backward(self, call):
            call.run()

    assert {"move"} == Steps.intercepted
    assert {"move", "backward"} == AndBackwards.intercepted
    assert [(torch.nn.Module, "_apply")] == [(patch.owner, patch.name) for patch in patches(Steps())]
    assert [(torch.autograd, "backward"), (torch.nn.Module, "_apply")] == [(patch.owner, patch.name) for patch in patches(AndBackwards())]


def test_the_last_that_is_installed_is_called_first():
    class Noting(Interceptor):
        def __init__(self, name):
            self.name = name

        @intercepts
        def backward(self, call):
            seen.append(self.name)
            call.run()

    for between in (nullcontext(), intercepting([])):
        seen, x = [], torch.ones(1, requires_grad=True)
        with intercepting([Noting("outer"), Noting("middle")]), between, intercepting([Noting("inner")]):
            x.sum().backward()

        assert ["inner", "middle", "outer"] == seen
        assert [1.0] == x.grad.tolist()
