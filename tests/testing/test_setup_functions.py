"""What setup functions and fixtures set in a test's module and class reaches the ranks, as it reaches a test on one process."""

import os
from typing import ClassVar

import pytest

import parwrap
from inner_pytest import Run

pytest_plugins = ["pytester"]

CASES: list[int] = []
MADE_IN = 0
NAME = ""
IN_ORDER = ["first", "second"]


def setup_module(module):
    CASES.extend([1, 2, 3])
    module.MADE_IN = os.getpid()


def teardown_module():
    CASES.clear()


def setup_function(function):
    global NAME
    NAME = function.__name__


@pytest.mark.ranks(2)
def test_setup_functions_of_the_module_reach_the_ranks():
    assert parwrap.gather(CASES) == [[1, 2, 3]] * 2
    assert parwrap.gather(NAME) == ["test_setup_functions_of_the_module_reach_the_ranks"] * 2
    assert parwrap.gather(MADE_IN) == [MADE_IN] * 2
    assert os.getpid() != MADE_IN


@pytest.fixture
def _turned(monkeypatch):
    monkeypatch.setattr(f"{__name__}.IN_ORDER", IN_ORDER[::-1])


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("_turned")
def test_a_global_that_a_fixture_sets_reaches_the_ranks():
    assert IN_ORDER == ["second", "first"]


@pytest.mark.ranks(2)
def test_such_a_global_is_put_back_for_the_next_test():
    assert IN_ORDER == ["first", "second"]


class Base:
    shared: ClassVar[list[str]] = []

    @classmethod
    def setup_class(cls):
        cls.size = 9
        cls.shared.append("setup_class")


@pytest.fixture(scope="class")
def _noted(request):
    request.cls.noted = [request.cls.size]


@pytest.mark.ranks(2)
class TestOfClass(Base):
    def test_setup_class_reaches_the_ranks(self):
        assert (self.size, self.shared) == (9, ["setup_class"])

    @pytest.mark.usefixtures("_noted")
    def test_what_a_fixture_sets_in_the_class_reaches_the_ranks(self):
        assert self.noted == [9]


def test_what_cannot_be_sent_is_named_with_what_to_do(run: Run):
    result = run(
        """
        def setup_module(module):
            module.answer = lambda: 42

        class TestIt:
            @pytest.mark.ranks(2)
            def test_of_module(self): pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["The changed global 'answer' of test_of_module cannot be sent to the ranks, *: setup_module.<locals>.*"])
