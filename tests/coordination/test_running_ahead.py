"""Hosts that go ahead, as with GPUs: two ranks in the threads of one process, whose sync points end at once."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest

from parwrap.coordination.status_board import KEPT, State, StatusBoard, SyncPoint
from parwrap.coordination.subgroup_sync import NestedCoordinator
from parwrap.coordination.sync_points import Coordinator
from parwrap.errors import RankMismatchError
from parwrap.world.world import World

pytestmark = pytest.mark.filterwarnings("ignore:parwrap. rank 1 is at end")
STEPS = 5 * KEPT
STEP = SyncPoint("step", "train.py:7")


def two_coordinators(timeout=10.0):
    memory = bytearray(StatusBoard.size(World(size=2)))
    both = [Coordinator(StatusBoard(World(rank, 2), memory), timedelta(seconds=timeout), runs_ahead=True) for rank in range(2)]
    answered = ([], [])
    for coordinator, details in zip(both, answered, strict=True):
        coordinator.answer("step", lambda detail, present, details=details: details.append(detail))
    return both, answered


def run_ahead(coordinator, steps=STEPS, over=True):
    for number in range(steps):
        coordinator.go_ahead(SyncPoint("step", "train.py:7", number))
        coordinator.through(over)
    coordinator.past()


def together(*ranks):
    """What each of ``ranks`` returns, each in a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [each.result(20) for each in [threads.submit(rank) for rank in ranks]]


@pytest.mark.parametrize("over", [True, False], ids=["each is over at once", "all are over at the end"])
def test_a_rank_that_left_answers_every_step_of_a_host_that_ran_ahead(over):
    (ours, theirs), (_, answered) = two_coordinators()

    together(lambda: (run_ahead(ours, over=over), ours.wait("end")), lambda: theirs.wait("end"))

    assert list(range(STEPS)) == answered


def test_hosts_that_run_ahead_together_wait_for_nobody():
    both, _ = two_coordinators()

    together(*(partial(run_ahead, coordinator, over=False) for coordinator in both))

    assert [1 + STEPS] * 2 == [coordinator.number for coordinator in both]


def test_a_host_waits_ahead_no_further_than_the_others_can_follow():
    """The sync point in which it waits has an entry too."""
    (ours, theirs), (_, answered) = two_coordinators()
    run_ahead(ours, KEPT)

    assert [[0, 1]] * 2 == together(lambda: ours.wait("end"), lambda: theirs.wait("end"))

    assert list(range(KEPT)) == answered


def test_a_host_that_is_ahead_learns_of_a_failure_behind_it(monkeypatch):
    monkeypatch.setattr("parwrap.coordination.sync_points.GRACE", 0.0)
    (ours, theirs), _ = two_coordinators()
    theirs.fail(ZeroDivisionError("by hand"))

    with pytest.raises(RankMismatchError, match="rank 1 failed with ZeroDivisionError: by hand"):
        run_ahead(ours)
    assert KEPT == ours.number - 1
    with pytest.raises(RankMismatchError, match="rank 1 failed with ZeroDivisionError: by hand"):
        ours.wait("end")


def test_a_host_that_is_ahead_of_a_stuck_rank_gives_up_after_the_timeout():
    (ours, _), _ = two_coordinators(timeout=0.1)

    with pytest.raises(RankMismatchError, match=r"rank 0 timed out after waiting 0.1 s .* Rank 1 has reached no sync point yet\."):
        run_ahead(ours)


def test_so_it_is_with_layers_that_send_something():
    (ours, theirs), _ = two_coordinators()
    memory, answered = bytearray(StatusBoard.size(World(size=2))), []
    boards = [StatusBoard(World(rank, 2), memory) for rank in range(2)]
    nested = NestedCoordinator(boards[0], (0, 1), lambda sent: None, keep_pace=ours.keep_pace)
    ours.add_nested(nested)
    theirs.add_nested(NestedCoordinator(boards[1], (0, 1), answered.append, keep_pace=theirs.keep_pace))

    def train():
        for number in range(STEPS):
            nested.enter("forward", number, ours.number)
            nested.through()
        return ours.wait("end")

    assert [[0, 1]] * 2 == together(train, lambda: theirs.wait("end"))

    assert list(range(STEPS)) == answered


def test_a_board_knows_who_may_still_read_an_entry():
    memory = bytearray(StatusBoard.size(World(size=2)))
    ours, theirs = (StatusBoard(World(rank, 2), memory) for rank in range(2))
    ours.write(3, STEP, State.CONTRIBUTING)
    ours.done(3)

    assert [1] == theirs.behind(3)
    theirs.write(3, STEP, State.CONTRIBUTING)
    assert [1] == ours.behind(3)
    theirs.write(4, STEP, State.CONTRIBUTING)  # the third is over for it, though it has not said so
    assert [] == ours.behind(3)
    assert [0, 1] == ours.behind(4)
    assert [0] == ours.behind(4, without=[1])
