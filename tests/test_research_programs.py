"""A search for silently wrong numbers: random programs of the kinds that researchers write, on one rank and on several.

``PARWRAP_PROGRAMS=300 pytest tests/test_research_programs.py`` looks at more of them, at others each time.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parwrap.testing.rank_launcher import start_fork_server
from programs import run
from research_programs import research_programs, train, train_by_hand, train_synced

MORE = os.environ.get("PARWRAP_PROGRAMS")
FACTOR = int(os.environ.get("PARWRAP_PROGRAMS_FACTOR", "1"))  # more with --runslow

search = settings(
    max_examples=int(MORE or 4 * FACTOR),
    derandomize=not MORE,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
ranks = st.integers(2, 3)


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    start_fork_server()


def finished(results):
    """The results of ranks that all came to the end, without an error."""
    assert [] == [result.stacks for result in results if result.stacks], "a rank hangs"
    assert [] == [result.error for result in results if result.error]
    return results


def assert_same_weights(one, other, tolerance=0.0):
    for name in one.parameters:
        np.testing.assert_allclose(other.state[name], one.state[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.slow
@search
@given(research_programs())
def test_on_one_rank_it_does_what_it_does_without_parwrap(program):
    (plain,), (wrapped,) = finished(run(program, 0, function=train)), finished(run(program, 1, function=train))

    assert plain == wrapped


@search
@given(research_programs(), ranks)
def test_the_ranks_agree_and_find_the_numbers_of_one_process(program, size):
    results = finished(run(program, size, function=train))
    for result in results:
        assert_same_weights(results[0], result)

        assert pytest.approx(result.numbers.expected, abs=1e-5) == result.numbers.found
        assert pytest.approx(results[0].numbers.found, abs=1e-5) == result.numbers.found


@search
@given(research_programs().filter(lambda program: program.same_by_theory), ranks)
def test_ranks_that_split_each_batch_come_to_the_weights_of_one_process(program, size):
    (plain,), results = finished(run(program, 0, function=train)), finished(run(program, size, "global", function=train_synced))

    assert_same_weights(plain, results[0], tolerance=1e-4)


@pytest.mark.slow
@search
@given(research_programs().filter(lambda program: program.has_equal_by_hand), ranks)
def test_the_weights_are_those_of_hand_written_ddp(program, size):
    by_hand, results = finished(run(program, size, None, function=train_by_hand)), finished(run(program, size, function=train))

    # The order in which gloo adds the numbers of 3 ranks depends on how it cuts a buffer, and ours holds the signal or other gradients too:
    # that is one rounding (2**-24 of a gradient below 10, times lr 0.1) in each of the up to 20 steps. Two numbers have only one order.
    assert_same_weights(by_hand[0], results[0], tolerance=0.0 if size == 2 else 20 * 2.0**-24)
