"""The position of a loop in a window, derived from its calls; no gradients."""

import pytest

from parwrap.accumulation.window import Window


def batches(window, parts):
    """The factors of the losses of batches that are drawn from a loader, the last of which is the last of its epoch."""
    for place, part in enumerate(parts):
        window.drew()
        window.begin(window.full or place == len(parts) - 1, part=part)
        yield window.factor * (1.0 if window.closing else window.steps)
        window.ran_backward(("train.py", 1))
        if window.closing:
            window.begin_window()
        else:
            window.end()


def test_a_full_window_takes_the_mean_of_its_batches():
    assert [1.0, 1.0, 1 / 3, 1.0, 1 / 2] == pytest.approx(list(batches(Window(3), [1.0] * 5)))


def test_a_smaller_last_batch_counts_by_its_samples():
    window = Window(3)

    assert [1.0, 0.2] == pytest.approx(list(batches(window, [1.0, 0.25])))


def test_what_is_counted_stands_for_the_next_batch_alone():
    window = Window(2)
    window.count(30.0)
    window.count(7.0)
    window.begin(closing=False)
    window.ran_backward("first")
    window.count(99.0)
    window.step()
    window.end()
    window.count(10.0)
    window.begin(closing=True)

    assert window.factor == pytest.approx(10 / 40)
    assert window.correction == pytest.approx(2 / (4 / 3))


def test_a_place_whose_backward_a_step_has_followed_begins_another_batch():
    window = Window(4)
    window.begin(closing=False)
    for site in ("real", "fake"):
        window.ran_backward(site)

    assert not window.over("real")
    window.step()
    assert window.over("real")
    assert not window.over("generator")
