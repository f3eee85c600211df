"""Gradients that are not finite are found however they got there, with no look more than is needed."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import parwrap
from parwrap.precision import finite
from parwrap.precision.finite import Found

LARGE = {"dtype": "fp16", "init_scale": 1024.0}


def weight(*grad):
    p = nn.Parameter(torch.ones(len(grad)))
    p.grad = torch.tensor(grad)
    return p


@pytest.fixture
def looks(monkeypatch):
    """How many gradients were looked at, each time."""
    seen, kernel = [], finite.check_finite_and_unscale_

    def counted(grads, *rest):
        seen.append(len(grads))
        kernel(grads, *rest)

    monkeypatch.setattr(finite, "check_finite_and_unscale_", counted)
    return seen


def exchanged(p):
    p.grad = p.grad * torch.nan


def in_place(p):
    p.grad.fill_(torch.inf)


@pytest.mark.parametrize("change", [exchanged, in_place])
def test_what_is_set_or_changed_afterwards_is_looked_at(change):
    p = weight(1.0, 2.0)
    found = Found([p])

    assert not found.any
    change(p)
    found.look_again([p])

    assert found.any


@pytest.mark.parametrize("imaginary", [1.0, torch.inf])
def test_complex_gradients(imaginary):
    p = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    p.grad = torch.tensor([complex(1.0, imaginary)])

    assert (imaginary == torch.inf) is Found([p]).any


def test_what_was_found_stands_until_the_step():
    p = weight(1.0, torch.inf)
    found = Found([p])
    p.grad.clamp_(max=1.0)
    found.look_again([p])

    assert found.any
    found.counted = True
    p.grad = torch.ones(2)
    found.look_again([p])

    assert (False, False) == (found.any, found.counted)


def test_gradients_that_are_the_same_are_looked_at_once(looks):
    several = [weight(1.0), weight(2.0), nn.Parameter(torch.ones(1))]
    found = Found(several)
    found.look_again(several)
    several[0].grad.mul_(2)
    found.accept(several)
    found.look_again(several)

    assert [2] == looks
    assert not Found(several, later=True).any
    assert [2] == looks


def test_a_loop_that_clips_has_one_look_for_each_backward(looks):
    with parwrap.amp(**LARGE):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    assert [2] * 3 == [each for each in looks if each != 1]


def test_many_tensors_that_no_optimizer_owns_are_waited_for_once(monkeypatch):
    with parwrap.amp(**LARGE):
        body, head = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]), nn.Linear(4, 1)
        torch.optim.SGD(head.parameters())
        loss = head(body(torch.ones(2, 4))).sum()
        waits, item = [], torch.Tensor.item
        monkeypatch.setattr(torch.Tensor, "item", lambda tensor: (waits.append(1), item(tensor))[1])
        loss.backward()

    assert 2 == len(waits)  # the scale, which is on the CPU, is the other


@pytest.mark.parametrize("clip", ["", "clip_grad_norm_", "clip_grad_value_"])
def test_an_open_window_that_has_overflowed_is_not_stepped_with(clip):
    @parwrap.amp(dtype="fp16")
    @parwrap.accumulate(4)
    def train():
        model = nn.Linear(4, 1)
        before = model.weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (1e9, 0.5):
            optimizer.zero_grad()
            (model(torch.ones(8, 4)).float().mean() * factor).backward()
            if clip:
                getattr(nn.utils, clip)(model.parameters(), 0.1)
            optimizer.step()
        return before, model.weight, parwrap.amp_state()

    before, after, state = train()

    assert torch.equal(before, after)
    assert (32768.0, 1) == (state.scale, state.skipped_steps)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("clip", ["", "clip_grad_value_"])
@pytest.mark.parametrize("leaves_early", [False, True])
def test_an_overflow_in_an_open_window_of_one_rank_skips_the_step_on_all(leaves_early, clip, size):
    @parwrap.distributed
    @parwrap.amp(**LARGE)
    @parwrap.accumulate(2)
    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3 if leaves_early and not parwrap.rank() else 3 + leaves_early):
            if number == 2:
                before = model.weight.clone()
            optimizer.zero_grad()
            overflows = number == 2 + leaves_early and parwrap.rank() == 1
            (model(torch.ones(8, 4)).float().mean() * (1e9 if overflows else 0.5)).backward()
            if clip:
                getattr(nn.utils, clip)(model.parameters(), 0.1)
            optimizer.step()
        kept.append((before, model, parwrap.amp_state()))

    kept = []
    train()
    before, model, state = kept[0]

    for after, steps in parwrap.gather((model.weight, state.skipped_steps)):
        assert torch.equal(before, after)
        assert 1 == steps


@pytest.mark.ranks(2)
def test_an_overflow_that_no_step_was_asked_for_with_is_forgotten():
    """One rank breaks out of its loop because of it: the step on what is in the open window is taken by both."""

    @parwrap.distributed
    @parwrap.amp(**LARGE)
    @parwrap.accumulate(4)
    def train():
        model = nn.Linear(4, 1)
        before = model.weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            optimizer.zero_grad()
            (model(torch.ones(8, 4)).float().mean() * (1e9 if number and parwrap.rank() else 0.5)).backward()
            if number and parwrap.rank():
                break
            optimizer.step()
        kept.append((before, model))

    kept = []
    train()
    before, model = kept[0]

    one, other = parwrap.gather(model.weight)
    assert torch.equal(one, other)
    assert one.isfinite().all()
    assert not torch.equal(before, one)


class CopiesToTheHost(TorchDispatchMode):
    """Counts what makes the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_step_asks_a_device_once_whether_gradients_are_finite_as_gradscaler_does():
    @parwrap.amp(**LARGE)
    def train():
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for _ in range(4):
            with CopiesToTheHost() as copies:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            counts.append(copies.count)
        return counts

    of_the_scale = 1  # which lies on the CPU
    assert [1 + of_the_scale] * 4 == train()
