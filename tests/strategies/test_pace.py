"""Which workers may continue when, by the messages that a server gets; without any process."""

import pytest

from parwrap.errors import RankMismatchError
from parwrap.strategies.parameter_server.staleness import Staleness


def test_without_a_bound_nobody_waits():
    pace = Staleness([0, 1], staleness=None)
    for _ in range(5):
        pace.push(0, 0, 1)

        assert [[0]] == pace.released()


def test_a_worker_is_at_most_the_bound_ahead_of_the_slowest():
    pace = Staleness([0, 1, 2], staleness=2)
    released = 0
    pace.push(1, 0, 1)
    assert [[1]] == pace.released()
    for _ in range(3):
        pace.push(0, 0, 1)
        released += len(pace.released())
    assert 2 == released  # rank 2 has taken none yet
    pace.push(2, 0, 1)

    assert [[0], [2]] == sorted(pace.released())


def test_with_staleness_0_all_that_train_take_one_step():
    pace = Staleness([0, 1, 2], staleness=0)
    pace.push(2, 0, 1)
    pace.push(0, 0, 1)
    assert [] == pace.released()
    pace.push(1, 0, 1)

    assert [[0, 1, 2]] == pace.released()
    assert [] == pace.released()


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_waits_elsewhere_has_ended_or_died_is_not_waited_for(staleness):
    pace = Staleness([0, 1, 2], staleness)
    pace.wait(1, number=3)
    pace.end(2)
    for _ in range(3):
        pace.push(0, 0, number=3)

        assert [[0]] == pace.released()


def test_who_was_at_a_meeting_that_is_over_is_waited_for_though_it_has_not_said_so():
    pace = Staleness([0, 1], staleness=0)
    pace.wait(1, number=3)
    pace.push(0, 0, number=4)
    assert [] == pace.released()
    pace.push(1, 0, number=4)

    assert [[0, 1]] == pace.released()


def test_what_was_missed_at_a_meeting_is_not_made_up_for():
    pace = Staleness([0, 1], staleness=1)
    pace.wait(1, number=3)
    for _ in range(9):
        pace.push(0, 0, number=3)
        pace.released()
    pace.push(0, 0, number=4)
    assert [] == pace.released()
    pace.push(1, 0, number=4)

    assert [[0], [1]] == sorted(pace.released())


def test_steps_of_different_optimizers_at_the_same_time_are_an_error():
    pace = Staleness([0, 1], staleness=0)
    pace.push(0, 0, 1)
    assert [] == pace.released()
    pace.push(1, 1, 1)

    with pytest.raises(
        RankMismatchError,
        match="would wait for each other forever: rank 0 is at a step of optimizer 0, rank 1 is at a step of optimizer 1",
    ):
        pace.released()


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_waits_for_a_file_is_not_waited_for_in_the_step_alone_that_comes_before_it_is_written(staleness):
    pace = Staleness([0, 1], staleness)
    if staleness:
        pace.push(0, 0, number=3, step=1)
        assert [[0]] == pace.released()
    pace.push(0, 0, number=3, step=2)
    pace.wait(1, number=3, step=1)  # which was of an earlier step
    assert [] == pace.released()
    pace.wait(1, number=3, step=2)
    assert [[0]] == pace.released()
    pace.push(0, 0, number=3, step=3)
    assert [] == pace.released()
    pace.push(1, 0, number=3, step=1)

    assert [[0, 1]] == pace.released() if staleness == 0 else [[0], [1]] == sorted(pace.released())
