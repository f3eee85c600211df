"""``@hogwild`` in a plain process: workers train the caller's model, and have ended when the call returns."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError


def zeros():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def counted(model, optimizer, samples):
    """Subtract one from each weight for every sample."""
    for _ in DataLoader(TensorDataset(torch.arange(samples)), batch_size=1):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()


def test_the_caller_s_model_is_trained_on_all_of_the_data_each_sample_once():
    model = zeros()
    weight, place = model.weight, model.weight.data_ptr()

    @parwrap.hogwild(workers=3, lock=True)
    def train(model):
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=30)
        return parwrap.rank(), parwrap.world_size()

    assert (0, 3) == train(model)
    assert model.weight is weight
    assert place == weight.data_ptr()
    assert [[-30.0, -30.0]] == weight.tolist()


def test_an_optimizer_of_the_caller_continues_from_call_to_call_as_its_schedule_does():
    model = zeros()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    @parwrap.hogwild(workers=2)
    def train_epoch():
        counted(model, optimizer, samples=8)
        schedule.step()

    for _ in range(2):
        train_epoch()

    assert 8 == optimizer.state[model.weight]["step"]  # 4 in each call, on worker 0
    assert 0.25e-3 == optimizer.param_groups[0]["lr"]


def test_a_model_that_is_built_inside_comes_back_trained_in_memory_of_the_caller():
    @parwrap.hogwild(workers=2, lock=True)
    def train():
        model = zeros()
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=10)
        return model

    assert [[-10.0, -10.0]] == train().weight.tolist()


class OutOfData(Exception):
    pass


def test_an_error_in_a_worker_is_raised_in_the_caller():
    @parwrap.hogwild(workers=2)
    def train():
        if parwrap.rank() == 1:
            raise OutOfData("no more")
        parwrap.barrier()

    with pytest.raises(OutOfData, match="no more"):
        train()


def test_a_worker_that_dies_is_named():
    @parwrap.hogwild(workers=2)
    def train():
        if parwrap.rank() == 1:
            os._exit(3)
        parwrap.barrier()

    with pytest.raises(RankMismatchError, match="rank 1 of 2 ended with exit code 3"):
        train()


def test_it_stacks_with_other_decorators_and_joins_itself():
    model = zeros()

    @parwrap.hogwild(workers=2, lock=True)
    def inner():
        counted(model, torch.optim.SGD(model.parameters(), lr=1.0), samples=12)
        return torch.is_autocast_enabled("cpu"), parwrap.world_size()

    @parwrap.accumulate(2)
    @parwrap.hogwild(workers=2, lock=True)
    @parwrap.amp(dtype="bf16")
    def outer():
        return inner()

    assert (True, 2) == outer()
    assert [[-6.0, -6.0]] == model.weight.tolist()  # 6 samples a worker are 3 steps


def test_one_worker_is_the_caller_itself():
    assert (os.getpid(), 1) == parwrap.hogwild(workers=1)(lambda: (os.getpid(), parwrap.world_size()))()


@pytest.mark.ranks(2)
def test_inside_another_strategy_it_is_refused():
    with pytest.raises(UsageError, match="strategy='hogwild' is not possible inside of another @distributed, which runs with 'ddp'"):
        parwrap.distributed(lambda: parwrap.hogwild(workers=2)(zeros)())()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers=0 is not a positive integer"),
        ({"workers": 2.0}, "workers=2.0 is not a positive integer"),
        ({"lock": "yes"}, "lock='yes' is neither True nor False"),
        ({"timeout": 0}, "timeout=0 is too small: pass at least 0.001 seconds"),
        ({"seed": -1}, "seed=-1 is not an integer"),
        ({"worker": 2}, r"parwrap.hogwild has no option 'worker'; did you mean 'workers'\?"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.hogwild(**options)


def test_a_block_is_refused():
    with pytest.raises(UsageError, match=r"`with parwrap.hogwild\(\):` has no function that other processes could run"), parwrap.hogwild():
        pass
