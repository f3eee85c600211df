"""Open passes, and the weight of a batch."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from parwrap.errors import UsageError
from parwrap.loop.one_pass import Batch, Pass
from parwrap.loop.passes import Passes
from parwrap.loop.random_streams import ALL, NONE, TRAINING, RandomStreams
from parwrap.places import Place

HERE = Place("train.py", 3)


@pytest.fixture
def streams():
    streams = RandomStreams(rank=1)
    yield streams
    streams.close()


def opened(passes, *, trains=True, weights=None, data=()):
    new = Pass(trains, trains, HERE, data=data, weights=None if weights is None else deque(Batch(0, weight) for weight in weights))
    passes.begin(new)
    return new


def test_passes_nest_and_the_innermost_training_pass_is_the_one_that_trains(streams):
    passes = Passes(streams)
    outer, inner = opened(passes), opened(passes, trains=False)

    assert (outer, inner) == (passes.training, passes.innermost)
    passes.end(outer)
    assert (None, inner) == (passes.training, passes.innermost)
    passes.end(inner)
    passes.end(inner)
    assert (None, None) == (passes.training, passes.innermost)


@pytest.mark.parametrize(
    ("draws", "trains", "backwards", "same_draws", "expected"),
    [
        ("by_pass", False, 1, False, NONE),
        ("by_pass", True, 0, False, TRAINING),
        ("by_pass", True, 0, True, NONE),
        ("per_rank", False, 0, False, NONE),
        ("per_rank", False, 1, False, ALL),
        ("per_rank", True, 0, False, TRAINING),
        ("per_rank", True, 1, True, NONE),
    ],
)
def test_what_draws_on_this_ranks_own_streams(streams, draws, trains, backwards, same_draws, expected):
    passes = Passes(streams, draws)
    opened(passes, trains=trains)
    for _ in range(backwards):
        passes.ran_backward()
    if same_draws:
        passes.same_draws(True)
    passes.draw()

    assert expected == streams.use(NONE)


def test_an_evaluation_inside_a_training_pass_keeps_its_draws(streams):
    passes = Passes(streams)
    opened(passes)
    passes.end(opened(passes, trains=False))
    passes.draw()

    assert TRAINING == streams.use(NONE)


def drawn(passes, training, *sizes):
    for size in sizes:
        passes.drew(training, size)


@pytest.mark.parametrize(
    ("weights", "sizes", "backward_after", "seen", "expected"),
    [
        ([1.0, 1.0], [4, 4], [], set(), Batch(4, 1.0)),  # equal weights: any
        ([1.0, 0.5], [4, 2], [0], set(), Batch(2, 0.5)),  # one at a time: the last
        ([1.0, 0.5], [4, 2], [], {4, 16}, Batch(4, 1.0)),  # ahead: by size
        ([1.0, 0.5], [4, 2], [], {2}, Batch(2, 0.5)),
        ([1.0, 1.0, 1.0, 0.5], [4, 4, 4, 2], [1, 2], {4}, Batch(4, 1.0)),
    ],
)
def test_the_batch_of_a_backward(streams, weights, sizes, backward_after, seen, expected):
    passes = Passes(streams)
    training = opened(passes, weights=weights)
    for index, size in enumerate(sizes):
        drawn(passes, training, size)
        if index in backward_after:
            passes.ran_backward()

    assert expected == passes.batch(lambda: seen)
    assert len(sizes) == passes.batches == training.drawn
    assert sum(sizes) == training.samples


def test_a_pass_that_ends_before_a_backward_on_its_last_batch_keeps_its_weight_until_another_begins(streams):
    passes = Passes(streams)
    training = opened(passes, weights=[0.5])
    drawn(passes, training, 2)
    passes.end(training)

    assert (None, Batch(2, 0.5)) == (passes.training, passes.batch(set))
    passes.ran_backward()
    assert Batch(2, 0.5) == passes.batch(set)
    passes.end(opened(passes))
    assert 1.0 == passes.batch(set).weight


def test_a_dropped_pass_that_repeats_stays_a_training_pass_until_another_begins(streams):
    passes = Passes(streams)
    training = opened(passes)
    training.repeats = True
    drawn(passes, training, 2)
    passes.end(training)

    passes.draw()

    assert training is passes.training
    assert TRAINING == streams.use(NONE)
    passes.begin(Pass(False, False, HERE))
    assert passes.training is None


def test_the_digits_of_all_training_passes_travel_once(streams):
    passes = Passes(streams)
    outer, inner = opened(passes, data=(250, 1)), opened(passes, data=(3, 2))
    opened(passes, trains=False)

    assert (2, 3) == passes.data_to_send()
    passes.data_sent()
    assert ((), (), ()) == (passes.data_to_send(), outer.data, inner.data)
    opened(passes, data=(7, 8))
    assert (7, 8) == passes.data_to_send()


def test_a_dropped_pass_that_repeats_sends_its_digits_too(streams):
    passes = Passes(streams)
    training = opened(passes, data=(7, 8))
    training.repeats = True
    drawn(passes, training, 2)
    passes.end(training)

    assert (7, 8) == passes.data_to_send()
    passes.data_sent()
    assert () == passes.data_to_send()


def test_a_backward_lets_the_loop_draw_as_the_open_passes_say(streams):
    passes = Passes(streams)
    training = opened(passes)
    passes.draw()
    passes.end(training)  # in another thread, which does not switch streams
    passes.ran_backward()

    assert NONE == streams.use(NONE)


def test_without_weights_every_batch_counts_as_one(streams):
    passes = Passes(streams)

    assert 1.0 == passes.batch(set).weight
    drawn(passes, opened(passes), 4, 2)
    assert 1.0 == passes.batch(set).weight


@pytest.mark.parametrize("seen", [set(), {2, 4}])
def test_a_batch_that_no_size_tells_is_refused(streams, seen):
    passes = Passes(streams)
    drawn(passes, opened(passes, weights=[1.0, 0.5]), 4, 2)
    with pytest.raises(
        UsageError,
        match=r"test_passes.py:\d+ trains on a batch of the loader at train.py:3, which has drawn several batches ahead, or skipped some "
        r"\(4, 2 samples\)\. Their weights differ, and parwrap cannot tell which batch this loss belongs to. Call backward on each batch "
        "before the next one is drawn, or choose a batch size that divides the dataset and that the number of ranks divides.",
    ):
        passes.batch(lambda: seen)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({4, 7}, 1.2),
        ({6, 7}, 1.0),
        (set(), 1.0),
        ({4, 6}, r"loaders at train.py:3 and train.py:3, of which this rank has parts of 4, 6 samples"),
    ],
)
def test_of_batches_of_two_loaders_the_one_that_the_graph_shows_counts(streams, seen, expected):
    passes = Passes(streams)
    drawn(passes, opened(passes, weights=[1.2]), 4)
    drawn(passes, opened(passes, weights=[1.0]), 6)

    if isinstance(expected, float):
        assert expected == passes.batch(lambda: seen).weight
    else:
        with pytest.raises(UsageError, match=expected):
            passes.batch(lambda: seen)


def test_torchs_stream_is_where_it_was(streams):
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    passes = Passes(streams)
    first = torch.rand(1)
    opened(passes)
    passes.draw()
    torch.rand(1)
    passes.end(passes.training)
    passes.draw()

    assert torch.equal(expected, torch.cat([first, torch.rand(1)]))
