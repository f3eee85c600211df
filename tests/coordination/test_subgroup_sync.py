"""Sync points besides the main ones, played by two ranks in one process."""

import pytest

from parwrap.coordination.status_board import KEPT, PART, State, StatusBoard
from parwrap.coordination.subgroup_sync import NestedCoordinator
from parwrap.errors import RankMismatchError
from parwrap.world.world import World


def two_nested_coordinators(**options):
    """The nested coordinators of ranks 4 and 7, and what each has answered."""
    memory, answered = bytearray(StatusBoard.size(World(size=2))), ([], [])
    nested_coordinators = [
        NestedCoordinator(StatusBoard(World(rank, 2), memory), (4, 7), answered[rank].append, "Take turns.", **options) for rank in range(2)
    ]
    for nested in nested_coordinators:
        nested.begin(1)
    return *nested_coordinators, *answered


def test_who_waits_answers_what_another_has_begun():
    ours, theirs, _, answered = two_nested_coordinators()
    ours.enter("forward", sent=17, main=3)

    assert theirs.begun(3)
    assert theirs.answer_begun(3)
    assert [17] == answered
    ours.through()
    assert ours.number == theirs.number
    assert not theirs.begun(3)


@pytest.mark.parametrize("kind", ["x" * 219, "x" * 500, "é" * 300], ids=len)
def test_a_meeting_with_a_long_name_is_answered_as_itself(kind):
    """As of layers deep in a model: entries have no room for all of their path."""
    ours, theirs, *_ = two_nested_coordinators()
    ours.enter(f"{kind} 1", sent=17, main=3)
    assert theirs.answer_begun(3)
    ours.compare()
    ours.through()
    ours.enter(f"{kind} 1", sent=18, main=3)
    theirs.enter(f"{kind} 1", sent=18, main=3)
    ours.through()
    theirs.through()
    ours.enter(f"{kind} 1", sent=18, main=3)
    with pytest.raises(RankMismatchError):
        theirs.enter(f"{kind} 2", sent=18, main=3)


def test_who_has_come_to_a_later_main_meeting_is_not_answered():
    """It has left the one for which this rank still waits, and this rank comes to the same point of the script by itself."""
    ours, theirs, _, answered = two_nested_coordinators()
    ours.enter("forward", sent=17, main=4)

    assert not theirs.answer_begun(3)
    assert [] == answered
    theirs.enter("forward", sent=17, main=4)


@pytest.mark.parametrize("other", [("forward of another", 17, 3), ("forward", 18, 3), ("forward", 17, 4)])
def test_ranks_in_different_meetings_are_told_where_they_are(other):
    ours, theirs, _, _ = two_nested_coordinators()
    ours.enter("forward", sent=17, main=3)
    with pytest.raises(RankMismatchError, match=f"in different places .*: rank 4 is in forward; rank 7 is in {other[0]}.* Take turns."):
        theirs.enter(*other)


def test_where_a_rank_is():
    ours, theirs, _, _ = two_nested_coordinators()
    ours.enter("forward", sent=17, main=3)

    assert (State.CONTRIBUTING, "forward") == (theirs.inside(4).state, theirs.inside(4).sync_point.kind)
    assert [True, False] == [theirs.passed(4), ours.passed(7)]
    assert [None, None] == [theirs.inside(7), theirs.inside(0)]
    ours.through()
    assert theirs.inside(4) is None


def test_another_part_begins_at_its_first_meeting_whatever_was_left_open():
    ours, theirs, _, _ = two_nested_coordinators()
    ours.enter("forward", sent=17, main=3)
    ours.begin(2)
    theirs.begin(2)

    assert ours.number == theirs.number
    assert not theirs.begun(3)
    theirs.enter("forward", sent=5, main=3)


def test_a_host_runs_ahead_of_the_others_only_as_far_as_they_can_follow():
    def keep_pace(status_board, number):
        while number & (1 << PART) - 1 > KEPT and status_board.behind(number - KEPT):
            theirs.answer_begun(3)

    ours, theirs, _, answered = two_nested_coordinators(keep_pace=keep_pace)
    for sent in range(3 * KEPT):
        ours.enter("forward", sent, main=3)
        ours.through()
    while theirs.answer_begun(3):
        pass

    assert list(range(3 * KEPT)) == answered
