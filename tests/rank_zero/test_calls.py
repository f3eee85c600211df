"""Functions of ``os`` that other modules hold under names of their own."""

import io
import os

from parwrap.intercept.patch import Patch, installed
from parwrap.rank_zero.calls import _holding_patched_calls


class Accessor:
    """As in pathlib of Python 3.10."""

    mkdir = os.mkdir
    open = io.open
    readlink = os.readlink


class Globber:
    """As in glob of Python 3.13."""

    scandir = staticmethod(os.scandir)


def patched(name, module=os):
    return Patch(module, name, lambda wrapped, instance, args, kwargs: f"{name} of {args[0]}")


def test_they_call_the_patched_functions_and_are_put_back():
    accessor, before = Accessor(), (Accessor.mkdir, Accessor.open, Globber.__dict__["scandir"])
    calls = [patched("mkdir"), patched("scandir"), patched("open", io), *map(_holding_patched_calls, (accessor, Globber))]
    with installed(calls):
        seen = accessor.mkdir("a"), accessor.open("a"), Globber.scandir("a"), Globber().scandir("a")

    assert ("mkdir of a", "open of a", "scandir of a", "scandir of a") == seen
    assert before == (Accessor.mkdir, Accessor.open, Globber.__dict__["scandir"])
    assert not vars(accessor)
