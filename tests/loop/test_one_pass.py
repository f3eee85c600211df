"""What one pass has drawn, and what has trained on it."""

from __future__ import annotations

from collections import deque

import pytest

from parwrap.loop.one_pass import Batch, Pass
from parwrap.places import Place


@pytest.mark.parametrize(
    ("loop", "untrained", "ahead", "depth"),
    [
        ("", 0, False, 0),
        ("db db db", 0, False, 0),
        ("dbb db", 0, False, 0),  # two losses of one batch
        ("d db db d", 2, True, 1),  # reads one batch ahead
        ("d d db db db", 2, True, 2),
        ("db d db", 1, True, 0),  # skips a batch
        ("bdb", 0, False, -1),  # a backward while its first batch is read
    ],
)
def test_batches_that_are_drawn_ahead_are_those_without_a_backward(loop, untrained, ahead, depth):
    one = Pass(True, True, Place("train.py", 3), weights=deque([Batch(0, 1.0)] * 9))
    backwards = 5  # of other passes
    for each in loop.replace(" ", ""):
        if each == "d":
            one.drew(2, backwards)
            one.weigh(2, None)
        else:
            one.ran_backward(backwards)
            backwards += 1

    assert (untrained, ahead, depth) == (one.untrained, one.ahead, one.depth)
    assert (loop.count("b"), 2 * loop.count("d")) == (one.backwards, one.samples)
