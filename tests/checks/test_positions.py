"""The pages of a node: which two can never meet, and what the error says. ``tests/launch`` has whole jobs that come apart."""

from __future__ import annotations

import threading
import time

import pytest

from parwrap.checks.positions import APART, SIZE, WORDS, Page, State, apart, what_parted
from parwrap.errors import LockstepError

RUNS, BACKWARD, CONTROL, ENDED, RAISED, AVERAGES, INNER = State


def page(*fields, sets):
    """A page whose last backwards averaged these ``sets``, the newest first."""
    return Page(*fields, "train.py:7", sets)


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        # I am about to run my third backward, over set 7
        (Page(3, BACKWARD, 7, 1), Page(2, RUNS, 0, 1), False),  # it is on its way
        (page(3, BACKWARD, 7, 1, sets=[7]), page(3, BACKWARD, 7, 1, sets=[7]), False),  # it is there
        (page(3, BACKWARD, 7, 1, sets=[7]), page(3, BACKWARD, 8, 1, sets=[8]), True),  # it averages another set
        (page(3, BACKWARD, 7, 1, sets=[7]), page(4, RUNS, 9, 1, sets=[9, 7]), False),  # it was here before, and has a GPU
        (page(3, BACKWARD, 7, 1, sets=[7]), page(4, RUNS, 7, 1, sets=[7, 8]), True),  # it averages another set on its GPU
        (page(3, BACKWARD, 7, 1, sets=[7, 9]), page(2, RUNS, 7, 1, sets=[7]), True),  # it averaged another set before
        (Page(3, BACKWARD, 7, 1), Page(2, RUNS, 5, 2), True),  # it has sent a message that I have not sent
        (Page(3, BACKWARD, 7, 1), Page(2, BACKWARD, 8, 1), False),  # it has not left the last one yet
        (Page(3, BACKWARD, 7, 1), Page(2, ENDED, 0, 1), True),  # it will never come
        (Page(3, BACKWARD, 7, 1), Page(3, ENDED, 0, 1), False),  # it was here before
        (Page(3, BACKWARD, 7, 1), Page(3, RAISED, 0, 1), True),  # it takes no further step
        (Page(3, BACKWARD, 7, 1), Page(3, APART, 0, 1), True),
        (Page(3, BACKWARD, 7, 1), Page(2, CONTROL, 5, 2), True),  # it waits for a message that I have not sent
        (Page(3, BACKWARD, 7, 2), Page(2, CONTROL, 5, 2), False),  # I have sent it
        # I am about to send my second control message, of kind 5
        (Page(3, CONTROL, 5, 2), Page(3, CONTROL, 5, 2), False),
        (Page(3, CONTROL, 5, 2), Page(3, CONTROL, 6, 2), True),  # it sends another
        (Page(3, CONTROL, 5, 2), Page(3, CONTROL, 6, 1), False),  # it has not left the last one yet
        (Page(3, CONTROL, 5, 2), Page(4, BACKWARD, 7, 1), True),  # it has begun a backward that comes after mine
        (Page(3, CONTROL, 5, 2), Page(4, RUNS, 7, 1), True),  # so it has, and does not wait, as it has a GPU
        (Page(3, CONTROL, 5, 2), Page(3, BACKWARD, 7, 1), False),  # it has not left the last one yet
        (Page(3, CONTROL, 5, 2), Page(3, ENDED, 0, 1), True),
        (Page(3, CONTROL, 5, 2), Page(3, AVERAGES, 7, 1), False),  # it has not left the last backward yet
        # I am about to send a message inside of my third backward
        (Page(3, INNER, 5, 2), Page(3, BACKWARD, 7, 1), False),  # it is on its way
        (Page(3, INNER, 5, 2), Page(3, INNER, 5, 2), False),
        (Page(3, INNER, 5, 2), Page(3, INNER, 6, 2), True),  # it sends another
        (Page(3, INNER, 5, 2), Page(3, AVERAGES, 7, 1), True),  # its backward has reached the end without that message
        (Page(3, INNER, 5, 2), Page(2, AVERAGES, 7, 1), False),  # it has not left the last backward yet
        (Page(3, INNER, 5, 2), Page(3, CONTROL, 6, 2), True),
        # my third backward has reached its end
        (Page(3, AVERAGES, 7, 1), Page(3, INNER, 5, 2), True),
        (Page(3, AVERAGES, 7, 2), Page(3, INNER, 5, 2), False),  # I have sent it
        (Page(3, AVERAGES, 7, 1), Page(3, BACKWARD, 7, 1), False),
        (page(3, AVERAGES, 7, 1, sets=[7]), page(3, BACKWARD, 8, 1, sets=[8]), True),
        (Page(3, AVERAGES, 7, 1), Page(3, CONTROL, 5, 2), False),  # it has left this backward
        # I run the script after my third backward, and read its loss from my GPU
        (Page(3, RUNS, 7, 1), Page(2, CONTROL, 5, 2), True),
        (Page(3, RUNS, 7, 1), Page(2, BACKWARD, 7, 1), False),  # it is on its way
        (Page(3, RUNS, 7, 1), Page(3, CONTROL, 5, 2), False),  # it has left this backward
    ],
)
def test_two_ranks_can_never_meet(mine, other, expected):
    assert expected is apart(mine, other)


def test_the_error_says_where_all_ranks_of_the_node_are(pages):
    first, second = pages
    second.enter(BACKWARD, 8, "train.py:40")
    with pytest.raises(LockstepError) as caught:
        first.enter(CONTROL, 5, "parwrap.reduce_sum at train.py:52")

    assert (
        "the ranks have come apart:\n"
        "  rank 0 is in parwrap.reduce_sum at train.py:52 (backwards begun: 0)\n"
        "  rank 1 is in the backward at train.py:40 (backwards begun: 1)\n"
        "Every rank must run the same passes, backwards and steps. What waits for all ranks, such as parwrap.gather or a synchronized "
        "batch norm, must run on every rank, not under `if rank == 0:`. If a rank decides by itself to stop or to skip, decide together: "
        "`if parwrap.any_rank(stop): break`."
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "done", "expected"),
    [
        (
            Page(4, BACKWARD),
            Page(3, ENDED),
            ((4, 4), (3, 4)),
            "In its pass over a loader, rank 0 has begun 4 backwards on 4 batches, and rank 1 ",
        ),
        (Page(4, BACKWARD), Page(3, ENDED), ((4, 4), (4, 4)), "If a rank decides by itself to stop or to skip"),
        (
            Page(4, BACKWARD),
            Page(3, CONTROL, place="a check at its end, after train.py:9"),
            ((4, 4), (4, 4)),
            "If a rank decides by itself to",
        ),
        (Page(4, RUNS), Page(3, BACKWARD), ((4, 5), (3, 5)), "If a rank skips what others train on"),
        (Page(4, BACKWARD, 7), Page(4, BACKWARD, 8), ((4, 4), (4, 4)), "If a rank skips what others train on"),
        (
            Page(4, CONTROL, 7, place="parwrap.gather at train.py:9"),
            Page(4, CONTROL, 8),
            ((4, 4), (4, 4)),
            "What waits for all ranks, such as parwrap.gather",
        ),
        (Page(4, BACKWARD), Page(3, RAISED), ((4, 4), (4, 4)), "A rank has raised an error"),
    ],
)
def test_the_error_says_what_parted_and_then_what_to_do(one, other, done, expected):
    said = what_parted({0: one, 1: other}, dict(enumerate(done)))

    assert len(said) == 1 + (done[0] != done[1])
    begins = said[0] if done[0] != done[1] and expected.startswith("In") else said[-1].partition("backwards and steps. ")[2]
    assert begins.startswith(expected), said


def test_a_rank_whose_gpu_still_averages_another_set_is_found(pages):
    first, second = pages
    for number in (7, 9):
        first.enter(BACKWARD, number, "train.py:38")
        first.run()
    second.enter(BACKWARD, 7, "train.py:38")
    second.run()
    with pytest.raises(LockstepError, match=r"rank 0 runs the script; its last step was at train.py:38 \(backwards begun: 2\)"):
        second.enter(BACKWARD, 8, "train.py:40")


def test_so_is_one_whose_gpu_averages_while_another_sends_a_message(pages):
    first, second = pages
    first.enter(BACKWARD, 7, "train.py:38")
    first.run()
    with pytest.raises(LockstepError, match=r"rank 1 is in parwrap.gather at train.py:9 \(backwards begun: 0\)"):
        second.enter(CONTROL, 5, "parwrap.gather at train.py:9")


def test_ranks_that_end_after_the_same_steps_end_together(pages):
    for each in pages:
        each.enter(BACKWARD, 7, "train.py:38")
        each.run()
    other = threading.Thread(target=pages[1].end, args=(10,))
    other.start()
    pages[0].end(10)
    other.join()


def test_a_rank_that_has_ended_raises_if_another_is_blocked_in_a_step(pages):
    first, second = pages
    second.enter(BACKWARD, 7, "train.py:38")
    began = time.monotonic()
    with pytest.raises(LockstepError, match=r"rank 0 has ended; its last step was at its start \(backwards begun: 0\)\n  rank 1 is in the"):
        first.end(10, patience=0.2)

    assert 2 > time.monotonic() - began


def test_a_rank_that_has_ended_waits_for_one_that_computes(pages):
    first, second = pages
    first.enter(BACKWARD, 7, "train.py:38")
    second.enter(BACKWARD, 7, "train.py:38")
    first.run()
    second.run()
    slow = threading.Timer(0.6, second.end, (10,))
    slow.start()
    first.end(10, patience=0.2)
    slow.join()


def test_a_rank_does_not_wait_for_ever(pages):
    with pytest.raises(LockstepError, match=r"because a rank has not ended within 0\.1 s"):
        pages[0].end(0.1)


def test_a_page_that_is_written_is_never_read_in_parts(pages):
    first, second = pages
    stopped, found = threading.Event(), set()

    def write():
        while not stopped.is_set():
            second.enter(BACKWARD, 800, "train.py:38")

    writer = threading.Thread(target=write)
    second.mine = Page(0, RUNS, 800, 0, "train.py:38")
    writer.start()
    for _ in range(20000):
        page = first._read(1)
        found.add((page.what, page.controls))
    stopped.set()
    writer.join()

    assert found <= {(0, 0), (800, 0)}


def test_a_page_whose_numbers_become_visible_in_another_order_is_read_again(pages):
    first, second = pages
    second.enter(BACKWARD, 800, "train.py:38")
    before, numbers = bytes(second._memory[SIZE:]), second._numbers
    second.enter(BACKWARD, 900, "train.py:39")
    whole = bytes(second._memory[SIZE:])
    second._memory[SIZE:] = before
    numbers[WORDS] += 1  # its number of backwards comes first, as on a processor that does not keep the order of writes
    later = threading.Timer(0.1, second._memory.__setitem__, (slice(SIZE, 2 * SIZE), whole))
    later.start()
    page = first._read(1)
    later.join()

    assert (2, 900, [900, 800]) == (page.backwards, page.what, page.sets[:2])


def test_a_rank_that_has_ended_does_not_wait_for_one_that_has_raised(pages):
    first, second = pages
    second.enter(CONTROL, 5, "parwrap.gather at train.py:9")
    second.raised(ValueError())
    with pytest.raises(LockstepError, match=r"rank 1 has raised an error; its last step was at parwrap.gather at train.py:9"):
        first.end(10)


@pytest.mark.parametrize(
    ("first_is", "patience", "is_error"),
    [(BACKWARD, 0.0, True), (BACKWARD, 10.0, False), (CONTROL, 0.0, True), (RUNS, 0.0, False), (RAISED, 10.0, True)],
)
def test_a_wait_for_a_file_of_a_first_rank_that_waits_for_this_one_is_an_error(pages, first_is, patience, is_error):
    first, second = pages
    first.enter(first_is if first_is in (BACKWARD, CONTROL) else BACKWARD, 8, "train.py:40")
    if first_is in (RUNS, RAISED):
        first.run() if first_is == RUNS else first.raised(ValueError())

    if is_error:
        with pytest.raises(LockstepError, match=r"have come apart, because rank 1 waits for a file of rank 0 at train.py:7:\n  rank 0 "):
            second.check_wait(time.monotonic() - 1, "a file of rank 0 at train.py:7", patience)
    else:
        second.check_wait(time.monotonic() - 1, "a file of rank 0 at train.py:7", patience)


def test_a_first_rank_that_is_in_the_same_step_is_no_error(pages):
    for each in pages:
        each.enter(BACKWARD, 8, "train.py:40")

    pages[1].check_wait(time.monotonic() - 1, "a file", patience=0.0)


def test_a_rank_that_only_found_the_others_apart_is_not_said_to_have_failed(pages):
    first, second = pages
    second.enter(CONTROL, 5, "parwrap.gather at train.py:9")
    second.run()
    second.raised(LockstepError())
    with pytest.raises(LockstepError, match=r"rank 1 has stopped, because the ranks have come apart; its last step was at parwrap.gather"):
        first.enter(BACKWARD, 8, "train.py:40")


def test_both_ranks_name_both_places_whichever_finds_first_that_they_are_apart(pages):
    for each in pages:
        each.enter(BACKWARD, 8, "train.py:9")
    pages[0].averages()
    for found in (lambda: pages[1].inner(3, "the gradient of batch norm 1 in the backward at train.py:9").__enter__(), pages[0].compare):
        with pytest.raises(LockstepError) as caught:
            found()
        assert "rank 0 waits for the gradients of the backward at train.py:9 (backwards begun: 1)" in str(caught.value)
        assert "rank 1 is in the gradient of batch norm 1 in the backward at train.py:9 (backwards begun: 1)" in str(caught.value)


def test_a_rank_that_has_found_the_others_apart_does_not_go_on(pages):
    first, second = pages
    first.enter(CONTROL, 1, "parwrap.barrier at train.py:3")
    with pytest.raises(LockstepError, match="the ranks have come apart") as found:
        second.enter(CONTROL, 2, "parwrap.gather at train.py:5")
    second.run()
    assert first.another_raised()

    for go_on in (lambda: second.enter(CONTROL, 1, "parwrap.barrier at train.py:6"), lambda: second.end(1)):
        with pytest.raises(LockstepError) as caught:
            go_on()
        assert str(caught.value) == (
            "the script has caught the error below, but other ranks may still wait for this one there, so this rank cannot go on. Let the "
            f"error end the job. It was: {found.value}"
        )
    with pytest.raises(LockstepError, match=r"rank 1 is in parwrap\.gather at train\.py:5"):
        first.enter(CONTROL, 3, "parwrap.barrier at train.py:9")
