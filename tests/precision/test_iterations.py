"""When an iteration is over, for the ways in which loops use their optimizers."""

import pytest
import torch
from torch import nn

from parwrap.precision.loss_scale import Iterations


def ends(steps, known=""):
    """After which of ``steps`` an iteration is over, and how many; a step in capitals was skipped."""
    optimizers = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))]) for name in "abc"}
    over, seen = [], []
    iterations = Iterations(over.append)
    for name in known:
        iterations.expect(optimizers[name])
    for step in steps:
        optimizer = optimizers[step.lower()]
        iterations.expect(optimizer)
        iterations.stepped(optimizer, step.isupper())
        seen.append("".join("X" if found else "." for found in over))
        over.clear()
    return seen


@pytest.mark.parametrize(
    ("steps", "known", "seen"),
    [
        ("aaAa", "", [".", ".", "X", "."]),
        ("ababAb", "ab", ["", ".", "", ".", "", "X"]),
        ("abaB", "", [".", "", ".", ""]),  # the second was not known before: from then on they take turns
        ("aaabaaab", "ab", ["", "..", ".", "", ".", ".", ".", ""]),  # a critic that has three steps to the generator's one
        ("Aaa", "ab", ["", "X.", "."]),  # another that never steps costs one late update
    ],
)
def test_when_an_iteration_is_over(steps, known, seen):
    assert seen == ends(steps, known)


def test_an_optimizer_that_is_gone_is_not_waited_for():
    over = []
    iterations = Iterations(over.append)
    stays, goes = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    iterations.expect(stays)
    iterations.expect(goes)
    del goes
    import gc

    gc.collect()
    iterations.stepped(stays, False)

    assert [False] == over
