"""Manual changes to parameters and optimizers while servers hold them: states, other optimizers, other models."""

import gc
import weakref

import pytest
import torch
from torch import nn

import parwrap
from parwrap.strategies.parameter_server.server import Server
from served import X, adam, flat


@pytest.mark.ranks(3)
def test_two_optimizers_one_built_later_and_another_model_in_the_next_fold():
    def gan():
        told = []
        for fold in range(2):
            torch.manual_seed(fold)
            one, other = nn.Linear(2, 2), nn.Linear(2, 1)
            first = torch.optim.Adam(one.parameters(), lr=0.01)
            second = torch.optim.SGD(other.parameters(), lr=0.1)
            third = None
            for step in range(3):
                x = X[4 * step : 4 * step + 4]
                other(one(x).detach()).mean().backward()
                second.step()
                second.zero_grad()
                first.zero_grad()
                other(one(x)).square().mean().backward()
                first.step()
                if step == 1:
                    third = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
                if third:
                    third.step() if step == 2 else None
            told.append(torch.cat([flat(one), flat(other)]))
        return torch.cat(told)

    torch.testing.assert_close(gan(), parwrap.distributed(strategy="parameter_server", staleness=0)(gan)(), atol=1e-6, rtol=0)


@pytest.mark.ranks(2)
def test_state_is_asked_of_the_server_and_gone_on_from():
    def train_on(state=None):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for step in range(4):
            if step == 2 and state is not None:
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            (weight * torch.tensor([1.0, step])).sum().backward()
            optimizer.step()
        return weight.detach().clone(), optimizer.state_dict()

    first, state = parwrap.distributed(strategy="parameter_server")(train_on)()
    second, _ = parwrap.distributed(strategy="parameter_server")(train_on)(state)
    alone, own = train_on()

    assert torch.equal(alone, first)
    assert torch.equal(own["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert torch.equal(train_on(own)[0], second)


@pytest.mark.ranks(2)
def test_weights_that_are_changed_by_hand_are_the_servers_too():
    def clipped():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        best = None
        for step in range(4):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            weight.data.clamp_(min=0.85)
            best = weight.detach().clone() if step == 0 else best
        weight.data.copy_(best)
        return weight

    assert torch.equal(clipped(), parwrap.distributed(strategy="parameter_server")(clipped)())


@pytest.mark.ranks(3)
def test_what_is_changed_by_hand_discards_no_training_of_other_parameters():
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    @parwrap.distributed(strategy="parameter_server")
    def train_clamped():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(1 + 9 * parwrap.rank()):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            model.bias.data.clamp_(-0.5, 0.5)
            if step == 0:
                parwrap.gather("the first step is taken")

    train_clamped()

    assert [-11.0] * 3 == parwrap.gather(model.weight.item())


@pytest.mark.ranks(3)
def test_models_of_earlier_folds_are_let_go_of_and_have_their_last_values(monkeypatch):
    held = []
    drop = Server._drop
    monkeypatch.setattr(Server, "_drop", lambda self, numbers: (drop(self, numbers), held.append((len(self._held), len(self._parameters)))))

    @parwrap.distributed(strategy="parameter_server")
    def folds():
        models, gone = [], []
        for fold in range(4):
            model = nn.Linear(1, 1)
            model.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(1)})
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(1 + 2 * parwrap.rank()):
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            models += [model] if fold < 2 else []
            gone.append(weakref.ref(model.weight))
            del optimizer, model
            gc.collect()
        return [model.weight.item() for model in models], [each() is None for each in gone]

    weights, gone = folds()

    told = parwrap.gather(held)
    assert [[-4.0, -4.0], [False, False, True, False]] == [weights, gone]
    assert [] == told[0] == told[1]
    assert {(1, 2)} == set(told[2])


@pytest.mark.ranks(3)
def test_a_model_goes_on_with_another_optimizer_after_the_first_is_gone():
    def goes_on():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adam):
            optimizer = kind(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                optimizer.step()
            del optimizer
            gc.collect()
        return model

    together = parwrap.distributed(strategy="parameter_server", staleness=0)(goes_on)()

    torch.testing.assert_close(flat(goes_on()), flat(together), atol=1e-6, rtol=0)


@pytest.mark.ranks(4)
def test_optimizers_and_schedulers_from_before_or_returned_go_on_on_every_rank():
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    before = adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(before, 1, 0.5)

    @parwrap.distributed(strategy="parameter_server", servers=2, staleness=0, lr="linear")
    def train_both():
        other = nn.Linear(2, 1)
        returned = adam(other.parameters())
        for _ in range(3):
            returned.zero_grad()
            before.zero_grad()
            (model(X) + other(X)).square().mean().backward()
            returned.step()
            before.step()
            schedule.step()
        return other, returned

    other, returned = train_both()

    assert [(0.01 / 8, 3, 0.01)] * 4 == parwrap.gather((before.param_groups[0]["lr"], schedule.last_epoch, returned.param_groups[0]["lr"]))
    for optimizer in (before, returned):
        states = parwrap.gather([(state["step"].item(), state["exp_avg"].tolist()) for state in optimizer.state_dict()["state"].values()])
        assert 3 == states[0][0][0]
        assert states == [states[0]] * 4
    assert other.weight is returned.param_groups[0]["params"][0]


@pytest.mark.ranks(4)
def test_a_group_that_is_added_later_keeps_the_state_of_the_others_and_frozen_parameters_stay():
    def unfreezes():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam([*model[1].parameters(), *model[2].parameters()], lr=0.1)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        return model

    together = parwrap.distributed(strategy="parameter_server", servers=2, staleness=0)(unfreezes)()

    torch.testing.assert_close(flat(unfreezes()), flat(together), atol=1e-6, rtol=0)
