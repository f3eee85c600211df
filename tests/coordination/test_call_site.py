"""Places in the user's script."""

import contextlib
import functools
import inspect

import torch

from parwrap.coordination import call_site
from parwrap.decorator import ScopeDecorator


def here():
    return f"{__file__}:{inspect.currentframe().f_back.f_lineno}"


def test_a_place_is_the_users_own():
    place, found = here(), call_site.location()

    assert place == found


def test_frames_of_torch_and_of_parwrap_are_passed_over():
    class Locating(torch.nn.Module):
        def forward(self):
            return None

    found = []
    module = Locating()
    module.register_forward_pre_hook(functools.partial(lambda *args: found.append(call_site.innermost(inspect.currentframe().f_back))))
    module(), found.append(here())

    assert found[0] == found[1]


def test_where_a_scope_is_left_by_way_of_contextlib_the_place_is_around_it():
    found = []

    class Located(ScopeDecorator):
        @contextlib.contextmanager
        def scope(self, function):
            yield
            found.append(call_site.innermost(inspect.currentframe().f_back))

    Located()(lambda: None)(), found.append(here())
    with contextlib.ExitStack() as stack:
        stack.enter_context(Located())
        stack.close(), found.append(here())

    assert found[0] == found[1]
    assert found[2] == found[3]
