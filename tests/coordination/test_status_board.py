"""Entries of the ranks' positions, in memory that ranks share and across nodes."""

import time
from dataclasses import replace

import pytest
import torch.distributed as dist

import parwrap
from parwrap.coordination import status_board
from parwrap.coordination.status_board import KEPT, PART, State, StatusBoard, SyncPoint
from parwrap.group.group import current
from parwrap.world.world import World

BARRIER = SyncPoint("barrier", "train.py:7")


def until(true, seconds=10):
    """Wait for what another process does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def two_ranks():
    """The mailboxes of two ranks in one memory."""
    memory = bytearray(StatusBoard.size(World(size=2)))
    return [StatusBoard(World(rank, 2), memory) for rank in range(2)]


def test_an_entry_is_read_by_the_others_as_it_was_written():
    ours, theirs = two_ranks()
    ours.write(3, SyncPoint("backward", "train.py:12", detail=5), State.ANSWERING, stale=True)

    entry = theirs.read(0, 3)

    assert ("backward", "train.py:12", 5) == (entry.sync_point.kind, entry.sync_point.place, entry.sync_point.detail)
    assert (0, 3, State.ANSWERING, True) == (entry.rank, entry.number, entry.state, entry.stale)
    assert [entry, None] == theirs.read_all(3)


def test_who_has_not_come_to_a_meeting_has_no_entry():
    ours, theirs = two_ranks()
    ours.write(3, BARRIER, State.WAITING)

    assert [None, None] == [theirs.read(0, number) for number in (2, 4)]
    assert (None, False) == ours.last(1)


def test_ranks_agree_unless_one_is_known_to_be_elsewhere():
    ours, theirs = two_ranks()
    ours.write(1, SyncPoint("backward", detail=1), State.CONTRIBUTING)

    assert ours.agreed(1, SyncPoint("backward", "another.py:3", detail=1))
    assert theirs.agreed(2, SyncPoint("backward", detail=2))
    assert not theirs.agreed(1, SyncPoint("backward", detail=2))
    assert not theirs.agreed(1, SyncPoint("barrier", detail=1))


def test_a_meeting_is_regular_when_all_went_ahead_to_it_with_nothing_to_report():
    ours, theirs = two_ranks()
    backward = SyncPoint("backward", detail=1)
    for number, speak_up in enumerate([lambda number: None, ours.notify, ours.diverge, lambda number: None], start=1):
        ours.write(number, backward, State.CONTRIBUTING)
        theirs.write(number, backward, State.CONTRIBUTING)
        speak_up(number)

    assert [True, False, False, True] == [theirs.regular(number, backward) for number in range(1, 5)]
    assert [False, False, True, False] == [theirs.any_diverged(number) for number in range(1, 5)]
    assert not theirs.regular(1, SyncPoint("backward", detail=2))


def test_a_meeting_that_a_rank_answers_is_not_regular():
    ours, theirs = two_ranks()
    backward = SyncPoint("backward", detail=1)
    ours.write(1, backward, State.CONTRIBUTING)
    theirs.write(1, backward, State.ANSWERING)

    assert not ours.regular(1, backward)


def test_a_long_path_is_known_by_its_end():
    ours, theirs = two_ranks()
    ours.write(1, SyncPoint("barrier", "/very" * 100 + "/train.py:7"), State.WAITING)

    assert theirs.read(0, 1).sync_point.place.endswith("/very/train.py:7")


def test_the_last_meeting_and_whether_a_rank_is_still_in_it():
    ours, theirs = two_ranks()
    for number in range(1, 3 * KEPT):
        ours.write(number, BARRIER, State.WAITING)

    assert (3 * KEPT - 1, True) == (theirs.last(0)[0].number, theirs.last(0)[1])
    ours.done(3 * KEPT - 1)
    assert not theirs.last(0)[1]


def test_telling_a_place_touches_nothing_beside_it():
    ours, theirs = two_ranks()
    ours.write(1, BARRIER, State.WAITING)
    ours.done(1)
    for place in ("/very" * 100 + "/train.py:7", "train.py:8"):
        ours.publish_place(place)

        assert place.endswith(theirs.where[0])
        assert (BARRIER, False) == (theirs.last(0)[0].sync_point, theirs.last(0)[1])


def test_the_end_of_a_part_can_be_read_when_the_next_two_have_begun():
    ours, theirs = two_ranks()
    for end in range(1, KEPT + 1):
        ours.write(end, BARRIER, State.MET)
        for part in (1, 2):
            for number in range(KEPT):
                ours.write((part << PART) + number, BARRIER, State.WAITING)

        assert end == theirs.read(0, end).number


@pytest.mark.ranks(2)
def test_entries_travel_between_nodes_too():
    group = current()
    apart = replace(group.world, local_rank=0, local_size=1, node_rank=group.world.rank)
    with status_board.opened(apart, dist.PrefixStore("apart", group.store)) as entries:
        entries.waiting = True
        entries.write(1, SyncPoint("barrier", f"train.py:{apart.rank}"), State.WAITING)
        until(lambda: entries.read(1 - apart.rank, 1))

        assert f"train.py:{1 - apart.rank}" == entries.read(1 - apart.rank, 1).sync_point.place
        assert not entries.immediate
        parwrap.barrier()
