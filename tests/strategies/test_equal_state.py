import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import parwrap
from closures import minimized


@pytest.mark.ranks(2)
def test_a_plateau_is_judged_by_the_mean_over_ranks():
    """Alone, rank 0 would see its metric improve and rank 1 would not."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with parwrap.distributed():
        schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
        for epoch in range(6):
            schedule.step(-epoch if parwrap.rank() == 0 else torch.tensor(epoch))

    assert pytest.approx([0.01, 0.01]) == parwrap.gather(optimizer.param_groups[0]["lr"])


@pytest.mark.ranks(2)
def test_a_closures_loss_is_the_mean_so_lbfgs_stops_at_the_same_time():
    weight = nn.Parameter(torch.zeros(2))
    with parwrap.distributed():
        calls, losses = minimized(weight, torch.full((2,), float(parwrap.rank())), max_iter=20)

    assert 1 == len(set(parwrap.gather(calls)))
    assert 1 == len({tuple(each) for each in parwrap.gather(losses)})
    assert 1 == len({tuple(each) for each in parwrap.gather(weight.tolist())})


def optimized(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model):
    model(torch.randn(4, 2) + parwrap.rank()).sum().backward()


@pytest.mark.ranks(2)
def test_every_buffer_of_a_root_becomes_rank_zeros_when_evaluation_starts():
    with parwrap.distributed():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("codes", torch.zeros(1, dtype=torch.int64))
        optimizer = optimized(model)
        step(model)
        model.codes += parwrap.rank()
        local = parwrap.gather(model[1].running_mean)
        assert not torch.equal(*local)
        model.eval()

        assert [local[0].tolist()] * 2 == parwrap.gather(model[1].running_mean.tolist())
        assert [0, 0] == parwrap.gather(model.codes.item())
        assert optimizer


@pytest.mark.ranks(2)
def test_buffers_that_no_collective_can_carry_are_left_alone():
    with parwrap.distributed():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("expanded", torch.arange(3).expand(4, 3))
        model.register_buffer("sparse", torch.eye(3).to_sparse())
        model.register_buffer("short", torch.zeros(2, dtype=torch.int16))
        optimizer = optimized(model)
        step(model)
        model.eval()

        assert 1 == len({tuple(each) for each in parwrap.gather(model[1].running_mean.tolist())})
        assert optimizer


@pytest.mark.ranks(2)
def test_a_frozen_backbones_eval_communicates_nothing():
    """Only rank 0 calls it here, which would hang if it waited for the other."""
    with parwrap.distributed():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = optimized(model)
        step(model)
        if parwrap.rank() == 0:
            model[0].eval()
        parwrap.barrier()
        assert optimizer


@pytest.mark.ranks(2)
def test_rank_zero_may_evaluate_alone():
    @parwrap.rank_zero_only(broadcast=True)
    def evaluate(model):
        model.eval()
        return model(torch.zeros(1, 2)).item()

    with parwrap.distributed():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = optimized(model)
        step(model)

        assert 1 == len(set(parwrap.gather(evaluate(model))))
        assert optimizer
