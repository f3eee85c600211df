"""States and copies of sharded models are whole and plain."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import parwrap
from test_fsdp import close, is_plain

pytestmark = pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")

DATA = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(2))


def fit(model, optimizer, data, steps=2):
    for batch in data[:steps]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.fixture
def alone():
    """A model and the states of one process after two steps, and after four."""
    model, adam = build()
    fit(model, adam, DATA)
    middle = copy.deepcopy((model.state_dict(), adam.state_dict()))
    fit(model, adam, DATA[2:])
    return middle, model.state_dict()


@pytest.mark.ranks(2)
def test_states_are_whole_under_plain_keys_wherever_they_are_saved(tmp_path, alone):
    (weights, state), end = alone

    @parwrap.distributed(strategy="fsdp", wrap=12)
    def train():
        model, optimizer = build()
        fit(model, optimizer, DATA)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "states.pt")
        torch.save([model, optimizer], tmp_path / "whole.pt")
        fit(model, optimizer, DATA[2:])
        return model, copy.deepcopy(model), model[2].state_dict()

    model, copied, part = train()
    for each in (model, copied):
        close(end, each.state_dict())
        assert is_plain(each)
        assert list(vars(build()[0])) == list(vars(each))
    close({"weight": end["2.weight"], "bias": end["2.bias"]}, part)
    saved = torch.load(tmp_path / "states.pt")
    close(weights, saved["model"])
    for number, values in state["state"].items():
        close(values, saved["optimizer"]["state"][number])
    assert state["param_groups"] == saved["optimizer"]["param_groups"]
    whole, its_optimizer = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert is_plain(whole)
    fit(whole, its_optimizer, DATA[2:])
    close(end, whole.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before the optimizer", "before the first forward", "after it"])
def test_a_state_of_one_process_is_loaded(when, alone):
    (weights, state), end = alone

    @parwrap.distributed(strategy="fsdp")
    def go_on():
        model = build()[0]
        if when == "before the optimizer":
            model.load_state_dict(weights)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if when == "after it":
            fit(model, optimizer, DATA)
        if when != "before the optimizer":
            model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        fit(model, optimizer, DATA[2:])
        return model.state_dict()

    close(end, go_on())


@pytest.mark.ranks(2)
def test_the_models_of_a_caller_are_the_same_objects_and_whole_again(alone):
    @parwrap.distributed(strategy="fsdp")
    def train_given(model, optimizer):
        fit(model, optimizer, DATA[2:])
        model.eval().double()
        assert torch.float64 == model(DATA[0].double()).dtype == model[0].weight.dtype
        model.float()

    model, optimizer = build()
    fit(model, optimizer, DATA)
    held = list(model.parameters())
    train_given(model, optimizer)

    close(alone[1], model.state_dict())
    assert is_plain(model)
    assert [id(p) for p in held] == [id(p) for p in model.parameters()] == [id(p) for p in optimizer.state]
    assert all(type(value) is torch.Tensor for state in optimizer.state.values() for value in state.values())


@pytest.mark.ranks(2)
def test_averages_of_weights_are_plain_models():
    def train():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        early = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = copy.deepcopy(model)
        swa = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for batch in DATA[:3]:
            fit(model, optimizer, [batch])
            swa.update_parameters(model)
            with torch.no_grad():
                for average in (early, late):
                    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                        mean.mul_(0.5).add_(p, alpha=0.5)
        assert torch.allclose(early(DATA[0]), late(DATA[0]))
        return [average.state_dict() for average in (model, early, late, swa)]

    for expected, average in zip(train(), parwrap.distributed(strategy="fsdp")(train)(), strict=True):
        close(expected, average)
        assert all(type(value) is torch.Tensor for value in average.values())


def by_pickle(both):
    return pickle.loads(pickle.dumps(both))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_model_and_its_optimizer_that_are_copied_together_train_on_together(copied, model_first, alone):
    _, end = alone

    @parwrap.distributed(strategy="fsdp", wrap=12)
    def train():
        model, optimizer = build()
        fit(model, optimizer, DATA)
        both = [model, optimizer] if model_first else [optimizer, model]
        model, optimizer = copied(both) if model_first else reversed(copied(both))
        fit(model, optimizer, DATA[2:])
        return model

    close(end, train().state_dict())
