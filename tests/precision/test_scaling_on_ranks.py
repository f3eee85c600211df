"""fp16 on several ranks: the same steps are skipped on all, and gradients are those of DDP by hand."""

import copy

import pytest
import torch
from torch import nn

import parwrap
from scaled import FP16, LOW, batches, build, loss_of, same

pytestmark = pytest.mark.usefixtures("not_warned_yet")


@pytest.mark.ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        weights = []
        for number, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad()
            loss_of(model, x, y * (1e4 if (number, parwrap.rank()) == (2, 1) else 1)).backward()
            before = copy.deepcopy(model.state_dict())
            optimizer.step()
            weights.append(same(before, model.state_dict()))
        return weights, parwrap.amp_state().scale, parwrap.amp_state().skipped_steps, model.state_dict()

    def both():
        return parwrap.gather(train())

    one, other = parwrap.distributed(parwrap.amp(**LOW)(both))()

    assert same(one, other)
    assert ([False, False, True, False, False, False], 512.0, 1) == one[:3]


@pytest.mark.ranks(2)
def test_gradients_are_bit_for_bit_those_of_ddp_by_hand():
    """Each rank has its own data, and accumulates; the scale is a power of two, which changes no bit."""
    data = batches(8)[parwrap.rank() :: 2]
    model = build()
    ddp = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=FP16):
            loss = loss_of(ddp, x, y)
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    @parwrap.amp(dtype="fp16")
    @parwrap.distributed
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(data):
            loss_of(model, x, y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return model

    assert same(model.state_dict(), train().state_dict())


@pytest.mark.ranks(2)
def test_ranks_that_leave_early_and_come_back_have_the_state_of_the_others():
    @parwrap.distributed
    @parwrap.amp(**LOW)
    def train():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches(6 if parwrap.rank() else 3, overflowing=(4,)):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        parwrap.barrier()
        return model.state_dict(), parwrap.amp_state().scale, parwrap.amp_state().skipped_steps

    one, other = parwrap.gather(train())

    assert same(one, other)
    assert (512.0, 1) == one[1:]


@pytest.mark.ranks(2)
def test_branches_that_differ_by_rank_average_true_scale_gradients():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with parwrap.distributed(), parwrap.amp(**LOW):
        optimizer = torch.optim.SGD([first, second], lr=0.0)
        for times in (1, 2, 3, 4):
            mine = first if parwrap.rank() == 0 else second
            (mine * 2).sum().backward()

            assert ([1.0 * times] * 3, [1.0 * times] * 3) == (first.grad.tolist(), second.grad.tolist())
            optimizer.step()
