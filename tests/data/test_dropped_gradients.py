"""A pass whose gradients are looked at and dropped is said, with what gives those of one process; one that accumulates is not."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from test_batches_drawn_ahead import Trained, numbers


def fisher(trained, loader, gradients):
    """The mean of squared gradients over batches, as for elastic weight consolidation."""
    squares = [torch.zeros_like(p) for p in trained.model.parameters()]
    for x, y in loader:
        trained.model.zero_grad()
        for square, gradient in zip(squares, gradients(trained, trained.criterion(trained.model(x), y)), strict=True):
            square += gradient**2 / 24
    return torch.cat([square.flatten() for square in squares]).tolist()


def by_backward(trained, loss):
    loss.backward()
    return [p.grad for p in trained.model.parameters()]


def by_grad(trained, loss):
    return torch.autograd.grad(loss, list(trained.model.parameters()))


def loader(shuffle=True):
    return DataLoader(numbers(24), batch_size=1, shuffle=shuffle)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_backwards_without_a_step_whose_gradients_are_dropped_are_said_once(shuffle):
    with parwrap.distributed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            fisher(Trained(), loader(shuffle), by_backward)

    texts = [str(each.message) for each in said if "called backward() but no optimizer step" in str(each.message)]
    assert 1 == len(texts)
    assert "test_dropped_gradients.py:" in texts[0]
    assert "torch.autograd.grad(loss, parameters)" in texts[0]


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.filterwarnings("ignore:.*Sums and counts equal those of one process")
def test_gradients_by_autograd_grad_are_those_of_one_process(size):
    expected = fisher(Trained(), loader(), by_grad)
    with parwrap.distributed():
        assert expected == pytest.approx(fisher(Trained(), loader(), by_grad), abs=1e-12)


@pytest.mark.ranks(2)
def test_a_function_of_one_rank_finds_what_one_process_finds():
    expected = fisher(Trained(), loader(), by_backward)
    with parwrap.distributed():
        found = parwrap.rank_zero_only(fisher)(Trained(), loader(), by_backward)

    assert parwrap.rank() > 0 or expected == pytest.approx(found, abs=1e-12)


def in_a_window_over_passes(trained):
    for step in range(24):
        for x, y in DataLoader(numbers(24), batch_size=4):
            nn.functional.mse_loss(trained.model(x), y).backward()
        if step % 2:
            trained.optimizer.step()
            trained.optimizer.zero_grad()


@parwrap.accumulate(16)
def in_a_long_window(trained):
    for _ in range(4):
        for x, y in DataLoader(numbers(24), batch_size=4):
            trained.step(x, y)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("train", [in_a_window_over_passes, in_a_long_window])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_gradients_that_are_accumulated_over_a_pass_are_nothing_to_say(train):
    with parwrap.distributed():
        train(Trained())


class WithoutVersions(torch.optim.Optimizer):
    """As fused kernels do, it changes weights without a trace."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_steps_that_leave_no_trace_on_weights_are_steps():
    @parwrap.distributed
    def train():
        model = torch.nn.Linear(1, 1)
        optimizer = WithoutVersions(model.parameters())
        for _ in range(2):
            for (x,) in DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2, shuffle=True):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    train()
