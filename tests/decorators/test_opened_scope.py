"""The scope as one object."""

import inspect
from dataclasses import FrozenInstanceError

import pytest

import parwrap
from parwrap.decorators.opened_scope import current_scope
from parwrap.ranks.group import current


@pytest.mark.ranks(2)
def test_a_scope_never_changes_and_replaces_no_method_of_its_group():
    group, before = current(), current().observer
    with parwrap.distributed():
        scope = current_scope()
        with pytest.raises(FrozenInstanceError):
            scope.strategy = None
        assert group.observer is not before
        assert [] == [name for name, value in vars(group).items() if inspect.isroutine(value)]

    assert group.observer is before
    assert current_scope() is None
