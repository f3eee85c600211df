"""The hooks that all steps share."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import intercepting
from parwrap.torch_private.optimizer import global_post_hooks, global_pre_hooks

PACKAGE = str(Path(parwrap.__file__).parent)


def calls(function):
    """The result of ``function``, and how many functions of parwrap it has entered."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(note)
    try:
        return function(), count
    finally:
        sys.setprofile(None)


@pytest.mark.ranks(2)
def test_a_steady_step_enters_few_functions_of_parwrap():
    fewest = {"zero_grad": 99, "loss": 99, "step": 99}

    @parwrap.distributed
    def train():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(torch.randn(56, 4), torch.randint(3, (56,))), 4):
            zeroed = calls(optimizer.zero_grad)[1]
            loss, computed = calls(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))
            loss.backward()
            stepped = calls(optimizer.step)[1]
            for name, now in zip(fewest, (zeroed, computed, stepped), strict=True):
                fewest[name] = min(fewest[name], now)

    train()

    assert fewest["zero_grad"] <= 4
    assert fewest["loss"] <= 2
    assert fewest["step"] <= 8


class Notes(Interceptor):
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def step(self, optimizer):
        self.notes.append(f"{self.name} before")

    def stepped(self, optimizer):
        self.notes.append(f"{self.name} after")

    def closure(self, optimizer, closure):
        def noted():
            self.notes.append(f"{self.name} computes")
            return closure()

        return noted


@pytest.mark.parametrize("compiled", [False, True])
def test_all_interceptors_of_a_step_share_one_hook_before_and_one_after_it(compiled):
    hooks, notes = (len(global_pre_hooks), len(global_post_hooks)), []
    w = torch.ones(1, requires_grad=True)
    w.grad = torch.ones(1)
    optimizer = torch.optim.SGD([w], lr=1.0)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    with intercepting([Notes("outer", notes)]), intercepting([Notes("inner", notes)]):
        assert (hooks[0] + 1, hooks[1] + 1) == (len(global_pre_hooks), len(global_post_hooks))
        step()
        optimizer.step(closure=lambda: notes.append("closure"))
    optimizer.step()

    around = ["outer before", "inner before"], ["outer after", "inner after"]
    assert [*around[0], *around[1], *around[0], "outer computes", "inner computes", "closure", *around[1]] == notes
    assert hooks == (len(global_pre_hooks), len(global_post_hooks))
