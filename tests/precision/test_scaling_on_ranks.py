"""fp16 on several ranks: the same steps are skipped on all, and gradients are those of DDP by hand."""

import copy

import pytest
import torch
from torch import nn

import parwrap
from scaled import FP16, LOW, batches, build, loss_of, same


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
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_loss_is_the_unscaled_mean_over_ranks(dtype):
    """65536 is too large for float16, so the scaled loss is too, and the mean must not be computed from it."""
    weight = nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.0)
    with parwrap.distributed(), parwrap.amp(dtype=dtype):
        loss = (weight * (1 + 2 * parwrap.rank())).half().sum()
        loss.backward()

    assert 2.0 == loss.item()


@pytest.mark.ranks(2)
def test_clipping_sees_the_mean_of_unscaled_gradients():
    weight = nn.Parameter(torch.zeros(1))
    with parwrap.distributed(), parwrap.amp(**LOW):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight * (2.0 + 4 * parwrap.rank())).sum().backward()
        norm = nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    assert (4.0, -1.0) == (norm.item(), pytest.approx(weight.item(), abs=1e-5))


@pytest.mark.ranks(2)
def test_a_script_with_a_scaler_of_its_own_is_left_to_it_on_ranks():
    def train(model, wrapped, number_of_rank):
        scaler, losses = torch.amp.GradScaler("cpu", growth_interval=2), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(8, overflowing=(3,))[number_of_rank::2]:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=FP16):
                loss = loss_of(wrapped, x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return model.state_dict(), scaler.get_scale(), losses

    by_hand, rank = build(), parwrap.rank()
    *expected, losses = train(by_hand, nn.parallel.DistributedDataParallel(by_hand), rank)
    model = build()
    *actual, means = parwrap.distributed(parwrap.amp(dtype="fp16")(train))(model, model, rank)

    assert same(expected, actual)
    for mean, *each in zip(means, *parwrap.gather(losses), strict=True):
        assert sum(each) / 2 == pytest.approx(mean, rel=1e-6)


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


@pytest.mark.ranks(2)
def test_a_block_around_a_distributed_function_does_the_same():
    def train():
        model, losses = build(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches(8, overflowing=(3,))[parwrap.rank() :: 2]):
            optimizer.zero_grad()
            loss = loss_of(model, x, y * (1 + number))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return model.state_dict(), losses, parwrap.amp_state().scale

    expected = parwrap.distributed(parwrap.amp(dtype="fp16")(train))()
    with parwrap.amp(dtype="fp16"):
        actual = parwrap.distributed(train)()

    assert same(expected, actual)
