"""The position of a loop in a window, derived from its calls; no gradients."""

import pytest

from parwrap.accumulation.position import Position


def batches(position, parts):
    """The factors of the losses of batches that are drawn from a loader, the last of which is the last of its epoch."""
    for place, part in enumerate(parts):
        position.drew()
        position.begin(position.full or place == len(parts) - 1, part=part)
        yield position.factor * (1.0 if position.closing else position.steps)
        position.ran_backward(("train.py", 1))
        if position.closing:
            position.begin_window()
        else:
            position.end()


def test_a_full_window_takes_the_mean_of_its_batches():
    assert [1.0, 1.0, 1 / 3, 1.0, 1 / 2] == pytest.approx(list(batches(Position(3), [1.0] * 5)))


def test_a_smaller_last_batch_counts_by_its_samples():
    position = Position(3)

    assert [1.0, 0.2] == pytest.approx(list(batches(position, [1.0, 0.25])))


def test_what_is_counted_stands_for_the_next_batch_alone():
    position = Position(2)
    position.count(30.0)
    position.count(7.0)
    position.begin(closing=False)
    position.ran_backward("first")
    position.count(99.0)
    position.step()
    position.end()
    position.count(10.0)
    position.begin(closing=True)

    assert position.factor == pytest.approx(10 / 40)
    assert position.correction == pytest.approx(2 / (4 / 3))


def test_a_place_whose_backward_a_step_has_followed_begins_another_batch():
    position = Position(4)
    position.begin(closing=False)
    for site in ("real", "fake"):
        position.ran_backward(site)

    assert not position.over("real")
    position.step()
    assert position.over("real")
    assert not position.over("generator")
