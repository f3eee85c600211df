"""Latents and perturbations that a script makes anew for each batch: each rank has its own, whose gradients are not averaged."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.group.group import alone

SIZES = [pytest.param(2, marks=pytest.mark.ranks(2)), pytest.param(3, marks=pytest.mark.ranks(3))]


def points():
    return TensorDataset(torch.randn(48, 3, generator=torch.Generator().manual_seed(0)))


def decode_latents(batch, kind=torch.Tensor.requires_grad_):
    """An auto-decoder: three steps on the latents of a batch, by an optimizer of their own, then one on the decoder."""
    torch.manual_seed(0)
    decoder = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    for (x,) in DataLoader(points(), batch):
        z = kind(torch.zeros(len(x), 2))
        inner = torch.optim.SGD([z], lr=float(len(x)))  # the loss is a mean over the part, so that a latent steps as in the whole batch
        for _ in range(3):
            inner.zero_grad()
            F.mse_loss(decoder(z), x).backward()
            inner.step()
        optimizer.zero_grad()
        F.mse_loss(decoder(z.detach()), x).backward()
        optimizer.step()
    return decoder.state_dict()["weight"].clone()


@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, nn.Parameter], ids=["tensor", "parameter"])
@pytest.mark.parametrize("size", SIZES)
def test_an_optimizer_of_latents_that_is_built_for_each_batch_is_each_ranks_own(size, kind):
    with alone():
        expected = decode_latents(8 * size, kind)
    with parwrap.distributed():
        actual = decode_latents(8, kind)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("options", [{"strategy": "zero1"}, {"strategy": "local_sgd", "every": 1}, {"strategy": "fsdp"}], ids=str)
@pytest.mark.ranks(2)
def test_so_it_is_under_other_strategies(options):
    with alone():
        expected = decode_latents(16)
    actual = parwrap.distributed(**options)(decode_latents)(8)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.ranks(3)
def test_so_it_is_beside_a_parameter_server():
    with alone():
        expected = decode_latents(16)
    actual = parwrap.distributed(strategy="parameter_server", staleness=0)(decode_latents)(8)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def meta_learn(kind, tasks_for_each_step):
    """Reptile, or MAML of first order: a copy of the model adapts to each task, by an optimizer of its own."""
    torch.manual_seed(0)
    x = torch.randn(6, 10, 3)
    y = x @ torch.randn(6, 3, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for task, (tx, ty) in enumerate(DataLoader(TensorDataset(x, y), None)):
        if task % tasks_for_each_step == 0:
            optimizer.zero_grad()
        learner = copy.deepcopy(model)
        inner = torch.optim.SGD(learner.parameters(), lr=0.1)
        for _ in range(3):
            loss = F.mse_loss(learner(tx[:5]), ty[:5])
            if kind == "maml by hand":
                with torch.no_grad():
                    for p, gradient in zip(learner.parameters(), torch.autograd.grad(loss, learner.parameters()), strict=True):
                        p -= 0.1 * gradient
            else:
                inner.zero_grad()
                loss.backward()
                inner.step()
        if kind == "reptile":
            found = [p.detach() - q.detach() for p, q in zip(model.parameters(), learner.parameters(), strict=True)]
        else:
            found = torch.autograd.grad(F.mse_loss(learner(tx[5:]), ty[5:]), learner.parameters())
        for p, gradient in zip(model.parameters(), found, strict=True):
            part = gradient / tasks_for_each_step
            p.grad = part if p.grad is None else p.grad + part
        if (task + 1) % tasks_for_each_step == 0:
            optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("kind", ["reptile", "maml", "maml by hand"])
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_of_the_model_adapts_to_the_ranks_own_task(size, kind):
    with alone():
        expected = meta_learn(kind, tasks_for_each_step=size)
    with parwrap.distributed():
        actual = meta_learn(kind, tasks_for_each_step=1)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
def test_so_it_does_under_a_loss_scale():
    def learner_steps():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        outer, is_own = torch.optim.SGD(model.parameters(), lr=0.1), []
        for (x,) in DataLoader(points(), 8):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.1)
            for _ in range(3):
                inner.zero_grad()
                (learner(x) - x.sum(1, keepdim=True) * (1 + parwrap.rank())).square().mean().backward()
                own = torch.autograd.grad((learner(x) - x.sum(1, keepdim=True) * (1 + parwrap.rank())).square().mean(), learner.weight)[0]
                overflowed = not learner.weight.grad.isfinite().all()  # the scale begins too large
                is_own.append(overflowed or torch.allclose(own, learner.weight.grad, rtol=0.05, atol=0.01))
                inner.step()
            outer.zero_grad()
            model(x).square().mean().backward()
            outer.step()
        return is_own

    with parwrap.amp("fp16"), parwrap.distributed():
        assert all(learner_steps())


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.ranks(2)
def test_an_optimizer_that_is_built_anew_within_a_pass_still_trains_what_ranks_share():
    def train(batch):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, (x,) in enumerate(DataLoader(points(), batch)):
            if step == 2:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.zero_grad()
            F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        return model.weight.detach()

    with alone():
        expected = train(16)
    with parwrap.distributed():
        actual = train(8)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def attack(batch):
    """The perturbations of a sign attack on each batch, and the weights after it."""
    torch.manual_seed(0)
    model, found = nn.Linear(3, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(points(), batch):
        y = (x.sum(1) > 0).long()
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            F.cross_entropy(model(x + delta), y, reduction="sum").backward()
            own = torch.autograd.grad(F.cross_entropy(model(x + delta), y, reduction="sum"), delta)[0]
            found.append(torch.equal(own, delta.grad))
            delta.data = delta.data + 0.1 * delta.grad.sign()
            delta.grad.zero_()
        optimizer.zero_grad()
        F.cross_entropy(model(x + delta.detach()), y).backward()
        optimizer.step()
    return found, model.weight.detach()


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_a_perturbation_that_begins_at_zero_is_the_ranks_own_from_the_first_batch_on(size):
    with alone():
        _, expected = attack(8 * size)
    with parwrap.distributed():
        is_own, actual = attack(8)

    assert all(is_own)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
def test_an_optimizer_over_bare_weights_that_is_built_in_the_first_batch_is_shared_from_the_second_on():
    @parwrap.distributed
    def train():
        other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        optimizer = None
        for (x,) in DataLoader(points(), 8):
            if optimizer is None:
                weight = torch.zeros(3, 1, requires_grad=True)
                optimizer = torch.optim.SGD([weight], lr=0.1)
            optimizer.zero_grad()
            F.mse_loss(x @ weight, x.sum(1, keepdim=True)).backward()
            optimizer.step()
            other.step()
        return weight.detach()

    with pytest.warns(UserWarning, match="the weights differ between ranks"):
        weight = train()
    weights = parwrap.gather(weight)

    assert torch.equal(weights[0], weights[1])
