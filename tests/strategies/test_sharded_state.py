"""States and copies of sharded models are whole and plain."""

import copy

import pytest
import torch
from torch import nn

import parwrap
from parwrap.errors import UsageError
from sharded_models import close, is_plain


def fit(model, optimizer, data, steps=2):
    for batch in data[:steps]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.ranks(2)
def test_states_are_whole_under_plain_keys_and_load(tmp_path):
    data = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(2))

    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    alone, adam = build()
    fit(alone, adam, data)
    middle = copy.deepcopy((alone.state_dict(), adam.state_dict()))
    fit(alone, adam, data[2:])

    @parwrap.distributed(strategy="fsdp", wrap=12)
    def train():
        model, optimizer = build()
        fit(model, optimizer, data)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "states.pt")
        torch.save([model, optimizer], tmp_path / "whole.pt")
        fit(model, optimizer, data[2:])
        return model, optimizer, copy.deepcopy(model), model[2].state_dict()

    model, optimizer, copied, part = train()
    for each in (model, copied):
        close(alone.state_dict(), each.state_dict())
        assert is_plain(each)
        assert list(vars(alone)) == list(vars(each))
    close(alone[2].state_dict(), part)
    saved = torch.load(tmp_path / "states.pt")
    close(middle[0], saved["model"])
    for number, state in middle[1]["state"].items():
        close(state, saved["optimizer"]["state"][number])
    assert middle[1]["param_groups"] == saved["optimizer"]["param_groups"]
    whole, its_optimizer = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert is_plain(whole)
    close(middle[0], whole.state_dict())
    fit(whole, its_optimizer, data[2:])
    close(alone.state_dict(), whole.state_dict())

    @parwrap.distributed(strategy="fsdp")
    def go_on(before):
        model, optimizer = build()
        if before:
            model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
            model.load_state_dict(saved["model"])
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        else:
            model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        fit(model, optimizer, data[2:])
        with pytest.raises(UsageError, match=r"assign=True.* would put unsharded parameters into a model that strategy='fsdp' has sharded"):
            model.load_state_dict(saved["model"], assign=True)
        return model

    for before in (True, False):
        close(alone.state_dict(), go_on(before).state_dict())

    @parwrap.distributed(strategy="fsdp")
    def train_given(model, optimizer):
        fit(model, optimizer, data[2:])
        model.eval().double()
        assert torch.float64 == model(data[0].double()).dtype == model[0].weight.dtype
        model.float()

    model, optimizer = build()
    fit(model, optimizer, data)
    held = list(model.parameters())
    train_given(model, optimizer)
    close(alone.state_dict(), model.state_dict())
    assert is_plain(model)
    assert [id(p) for p in held] == [id(p) for p in model.parameters()] == [id(p) for p in optimizer.state]


@pytest.mark.ranks(2)
def test_averages_of_weights_are_plain_models():
    data = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(2))

    def train():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        early = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = copy.deepcopy(model)
        swa = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for batch in data:
            fit(model, optimizer, [batch])
            swa.update_parameters(model)
            with torch.no_grad():
                for average in (early, late):
                    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                        mean.mul_(0.5).add_(p, alpha=0.5)
        assert torch.allclose(early(data[0]), late(data[0]))
        return [average.state_dict() for average in (model, early, late, swa)]

    for expected, average in zip(train(), parwrap.distributed(strategy="fsdp")(train)(), strict=True):
        close(expected, average)
        assert all(type(value) is torch.Tensor for value in average.values())
