"""Loops under ``@accumulate`` whose batches differ, and loops that cannot be accumulated."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parwrap
from accumulated import SIZES, accumulated_in, batch_of, loss_of, parwrap_loader, stepped, train_by_rank, weight
from parwrap.errors import UsageError


def after(model):
    """The same weights on all ranks, to compare with a reference."""
    for other in parwrap.gather(model.data):
        assert torch.equal(other, model.data)
    return model


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loader", [True, False])
@pytest.mark.parametrize("way", ["set to none", "zeroed", "dropped by hand", "zeroed by hand"])
def test_whatever_a_loop_does_with_gradients_that_were_used(size, loader, way):
    def to_zero(optimizer):
        if way in ("set to none", "zeroed"):
            optimizer.zero_grad(set_to_none=way == "set to none")
            return
        for p in optimizer.param_groups[0]["params"]:
            if way == "dropped by hand":
                p.grad = None
            elif p.grad is not None:
                p.grad.data.zero_()

    @parwrap.distributed
    def train():
        return after(accumulated_in(3, train_by_rank)(range(7), to_zero, loader))

    expected = stepped([[(rank, number) for rank in range(size) for number in window] for window in ([0, 1, 2], [3, 4, 5], [6])])

    assert (train() - expected).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_batch_that_is_left_before_its_step_counts_for_nothing():
    def train(numbers):
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in parwrap_loader(numbers):
            optimizer.zero_grad()
            loss_of(w, batch_of(parwrap.rank(), int(number))).backward()
            if number == 6:
                break
            optimizer.step()
        return w

    expected = stepped([[(rank, number) for rank in range(2) for number in window] for window in (range(4), range(4, 6))])

    assert (parwrap.distributed(accumulated_in(4, train))(range(9)) - expected).abs().max() < 1e-12


def test_norms_that_are_asked_for_inside_a_window_are_those_of_its_batch():
    w = nn.Parameter(torch.tensor([1.0]))
    norms = []

    @parwrap.accumulate(2)
    def train():
        optimizer = torch.optim.SGD([w], lr=1.0)
        for batch in (3.0, 5.0):
            optimizer.zero_grad()
            (batch * w).sum().backward()
            norms.append(nn.utils.clip_grad_norm_((p for p in [w]), 1.0).item())
            optimizer.step()

    train()

    assert [1.5, 4.0] == norms
    assert w.item() == pytest.approx(0.0, abs=1e-5)


def test_a_step_that_is_left_out_at_the_end_of_a_window_is_said():
    @parwrap.accumulate(2)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in map(int, parwrap_loader(range(4))):
            optimizer.zero_grad()
            loss_of(w, batch_of(0, number)).backward()
            if number != 1:
                optimizer.step()
        return w

    with pytest.warns(UserWarning, match="the loop skipped the optimizer step"):
        actual = train()

    assert (actual - stepped([[(0, 2), (0, 3)]])).abs().max() < 1e-12


@pytest.mark.parametrize("in_place", [True, False])
def test_a_loop_that_begins_to_zero_gradients_in_another_way(in_place):
    @parwrap.accumulate(3)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in range(9):
            loss_of(w, batch_of(0, number)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number < 6 or not in_place)
        return w

    if not in_place:
        assert (train() - stepped([[(0, number) for number in range(begin, begin + 3)] for begin in (0, 3, 6)])).abs().max() < 1e-12
        return
    with pytest.raises(
        UsageError,
        match=r"a gradient was changed in place after optimizer.step\(\) was called on it, but parwrap\.accumulate still needs it",
    ):
        train()


def test_gradients_that_are_kept_after_they_were_dropped():
    @parwrap.accumulate(3)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for number in range(9):
            if number != 4:
                optimizer.zero_grad()
            loss_of(w, batch_of(0, number)).backward()
            optimizer.step()
        return w

    again = [(0, 3), (0, 3), (0, 4), (0, 5)]
    w = stepped([[(0, 0), (0, 1), (0, 2)]])
    gradient = sum(torch.autograd.grad(loss_of(w, batch_of(*each)), w)[0] for each in again) / 3
    w = nn.Parameter(w.detach() - 0.5 * gradient)
    last = sum(torch.autograd.grad(loss_of(w, batch_of(0, number)), w)[0] for number in (6, 7, 8)) / 3

    assert (train() - (w - 0.5 * last)).abs().max() < 1e-12


@pytest.mark.parametrize("error", [True, False])
def test_what_outlives_the_function_does_nothing_any_more(error):
    w, kept = weight(), []

    @parwrap.accumulate(4)
    def train():
        optimizer = torch.optim.SGD([w], lr=0.5)
        kept.append(iter(parwrap_loader(range(10))))
        for number in kept[0]:
            optimizer.zero_grad()
            loss_of(w, batch_of(0, int(number))).backward()
            optimizer.step()
            if number == 1:
                break
        if error:
            raise KeyError("on purpose")

    with pytest.raises(KeyError) if error else contextlib.nullcontext():
        train()
    kept.clear()

    assert (w - stepped([] if error else [[(0, 0), (0, 1)]])).abs().max() < 1e-12


def test_a_batch_that_cannot_be_read_fails_where_it_is_drawn():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index == 2:
                raise KeyError("broken")
            return batch_of(0, index)

    drawn = []

    @parwrap.accumulate(4)
    def train():
        w = weight()
        optimizer = torch.optim.SGD([w], lr=0.5)
        for x in DataLoader(Broken(), batch_size=None):
            optimizer.zero_grad()
            loss_of(w, x).backward()
            optimizer.step()
            drawn.append(x)

    with pytest.raises(KeyError, match="broken"):
        train()
    assert 2 == len(drawn)


def by_hand():
    w = weight()
    for number in range(5):
        loss_of(w, batch_of(0, number)).backward()
        w.data -= w.grad
        w.grad = None


def with_closure():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(w, batch_of(0, 0))
        loss.backward()
        return loss

    optimizer.step(closure)


def with_gradients_of_its_own():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    (w.grad,) = torch.autograd.grad(loss_of(w, batch_of(0, 0)), w)
    optimizer.step()


def seldom():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for number in parwrap_loader(range(8)):
        loss_of(w, batch_of(0, int(number))).backward()
        if number == 6:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (by_hand, r"accumulate\(2\) is for a loop that calls optimizer.step\(\) after each backward, but none was called in 1 batch: the"),
        (seldom, r"accumulate\(2\) is for a loop that calls optimizer.step\(\) after each backward, but none was called in 2 batches: the"),
        (
            with_closure,
            r"optimizer.step\(closure\) at .*test_accumulate_loops.py:\d+ cannot be accumulated: the closure computes the gradients",
        ),
        (
            with_gradients_of_its_own,
            r"SGD.step\(\) at .*test_accumulate_loops.py:\d+ uses gradients that backward\(\) did not compute, but",
        ),
    ],
)
def test_loops_that_cannot_be_accumulated(function, text):
    with pytest.raises(UsageError, match=text):
        accumulated_in(2, function)()
