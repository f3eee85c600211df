"""Noise on weights or gradients, drawn on each rank: all ranks have one process's noise; and models that differ by rounding."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap


def loader():
    x = torch.linspace(-1, 1, 64).view(-1, 1)
    return DataLoader(TensorDataset(torch.cat([x, x**2], dim=1), x**3), batch_size=8)


def on_weights(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)


def on_data(model):
    for p in model.parameters():
        p.data.add_(torch.randn_like(p.data), alpha=0.05)


def on_gradients(model):
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.05)


def trained(noise, noisy_from=0, seen=None, steps=24):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = 0
    while step < steps:
        for x, y in loader():
            if seen is not None:
                seen.append(parwrap.gather(model.weight.flatten().tolist()))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if step >= noisy_from and noise is on_gradients:
                noise(model)
            optimizer.step()
            if step >= noisy_from and noise is not on_gradients:
                noise(model)
            step += 1
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("noise", [on_weights, on_data, on_gradients])
def test_every_batch_is_computed_with_the_same_weights(size, noise):
    seen = []
    with parwrap.distributed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        weights = trained(noise, seen=seen)
        parwrap.barrier()
        last = parwrap.gather(weights)

    # Adam's first step goes by signs, which noise on gradients seldom changes
    assert all(len({tuple(each) for each in weights}) == 1 for weights in seen[8:])
    assert size == len(last)
    if parwrap.rank() == 0:
        assert ("in-place change" if noise is on_gradients else "(SGLD)") in " ".join(str(each.message) for each in said)
        assert "test_noise_on_weights.py" in " ".join(str(each.message) for each in said)


@pytest.mark.ranks(2)
def test_noise_that_begins_late_is_found_by_the_end():
    seen = []
    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(on_data, noisy_from=70, seen=seen, steps=160)

    assert all(len({tuple(each) for each in weights}) == 1 for weights in seen[-8:])


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_models_that_differ_by_rounding_are_made_the_same_without_a_word():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.mul_(1 + parwrap.rank() * 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parwrap.distributed():
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        assert 1 == len({tuple(each) for each in parwrap.gather(model.weight.flatten().tolist())})


@pytest.mark.ranks(2)
def test_models_that_do_differ_are_said_without_blaming_the_seed():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(parwrap.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        nn.functional.mse_loss(model(torch.ones(4, 2)), torch.ones(4, 1)).backward()
        optimizer.step()

    with parwrap.distributed(), pytest.warns(UserWarning, match="1 of 2 parameters have different values .* If you already do, look for"):
        step()


@pytest.mark.ranks(3, timeout=60)
@pytest.mark.parametrize("has_more", [[0], [1, 2]])
@pytest.mark.parametrize("noise", [on_data, None])
def test_ranks_that_have_let_go_of_a_model_follow_too(has_more, noise):
    """A model whose optimizer is gone lives until its garbage is collected, which is not at the same time on all ranks."""
    kept, seen = [], []

    def train_another():
        another = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(another.parameters(), lr=0.1)
        another(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return another

    with parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = train_another()
        if parwrap.rank() in has_more:
            with torch.no_grad():
                model.weight.add_(parwrap.rank())
            kept.append(model)
        del model
        trained(noise, noisy_from=0 if noise else 99, seen=seen)
        assert kept or parwrap.rank() not in has_more

    assert all(len({tuple(each) for each in weights}) == 1 for weights in seen[8:])


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_learning_rates_that_each_rank_sets_by_its_own_loss_are_named_and_become_rank_0s(size, as_tensor):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    seen = []
    with parwrap.distributed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01) if as_tensor else 0.01)
        for _ in range(6):
            for x, y in loader():
                seen.append(parwrap.gather(model.weight.flatten().tolist()))
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                rate = 0.01 / (1 + loss.item())
                optimizer.param_groups[0]["lr"] = torch.tensor(rate) if as_tensor else rate
                optimizer.step()
        for _ in loader():
            seen.append(parwrap.gather(float(optimizer.param_groups[0]["lr"])))
            break

    texts = [str(each.message) for each in said if "because the learning rates differ" in str(each.message)]
    assert 1 == len(texts)
    assert "test_noise_on_weights.py:" in texts[0]
    assert " on rank 0, " in texts[0]
    assert not [each for each in said if "adds its own noise" in str(each.message)]
    assert all([first[0]] * size == first for first in seen[-4:]), seen[-4:]
