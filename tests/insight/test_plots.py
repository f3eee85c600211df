"""The picture of ``verify``: what is written in it, and where it draws what."""

import re

import pytest

from parwrap.insight.plots import draw_differences


def drawn(tmp_path, *args):
    draw_differences(*args, str(tmp_path / "plot.svg"))
    return (tmp_path / "plot.svg").read_text()


def test_the_step_that_differs_is_named_and_long_names_are_cut(tmp_path):
    name = "layers." * 20 + "weight[3]"
    text = drawn(tmp_path, [1e-8, 0.1, None], 1e-5, (2, name), "train.py differs")

    title = next(line for line in re.findall(r">(step 2: [^<]+)<", text))
    assert (True, True) == (len(title) < 75, title.endswith("weight[3]"))
    assert all(f">{each}<" in text for each in ("train.py differs", "tolerance", "first step that differs", "not a number"))


@pytest.mark.parametrize("steps", [[0.0] * 3, []])
def test_runs_without_any_difference_are_drawn(steps, tmp_path):
    text = drawn(tmp_path, steps, 0.0, None, "train.py: equal")

    assert "first step that differs" not in text
    assert ">train.py: equal<" in text


def test_the_same_numbers_are_the_same_file(tmp_path):
    assert len({drawn(tmp_path, [1e-8, 2e-8], 1e-5, None, "equal") for _ in range(2)}) == 1
