"""Refusals of sharded training, and what is said when ranks come apart."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

import parwrap
from parwrap.errors import LockstepError, RankMismatchError, UsageError
from parwrap.ranks.group import Group
from parwrap.ranks.world import World
from parwrap.strategies.fsdp import FSDP

pytestmark = pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")

X = torch.ones(3, 2)


class Keeps(nn.Module):
    """Keeps a loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.body, self.side = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.body(x)
        self.kept = self.side(hidden).square().mean()
        return hidden.detach()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, both=True):
        return self.second(self.first(x)) if both else self.first(x)


def test_gloo_on_gpus_is_refused_before_training():
    with pytest.raises(UsageError, match=r"does not work with backend='gloo' on GPUs: .* Leave backend out, with a GPU for each rank; or"):
        FSDP(SimpleNamespace(group=Group(World(0, 2, 0, 2), "gloo", torch.device("cuda:0"))))


@pytest.mark.ranks(2)
def test_what_cannot_be_done_is_an_error_that_says_so():
    with parwrap.distributed(strategy="fsdp"):
        model = Keeps()
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X)
        weight = model.body.weight
        with pytest.raises(
            UsageError, match=r"a hook that test_fsdp_errors.py:\d+ registers on a sharded parameter would not get the gradient"
        ):
            weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(UsageError, match=r"torch.autograd.grad at .* asks for gradients of sharded parameters.* read p.grad"):
            torch.autograd.grad(model.side(X).sum(), weight)
        with pytest.raises(UsageError, match=r"assigns a value of shape \(3, 3\) to a parameter of shape \(2, 2\), which strategy='fsdp'"):
            weight.data = torch.ones(3, 3)
        with pytest.raises(UsageError, match=r"a gradient of shape \(3, 3\) to a parameter of shape \(2, 2\): assign one of the param"):
            weight.grad = torch.ones(3, 3)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
            weight.add_(torch.ones(2, 2))
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(X).add_(1 / 0)
        with pytest.raises(UsageError, match=r"LBFGS, which steps all parameters as one vector, .* other than 'fsdp'"):
            torch.optim.LBFGS(model.parameters())

        @parwrap.rank_zero_only
        def look():
            with pytest.raises(UsageError, match=r"_errors.py:\d+ needs the other ranks for the forward of a Keeps, .*: do this on all"):
                model(X)
            with pytest.raises(UsageError, match=r"needs the other ranks for gathering a sharded tensor of shape \(2, 2\)"):
                model.state_dict()

        look()
        model.load_state_dict({name: torch.zeros(value.shape) for name, value in model.state_dict().items()}, assign=True)
        with pytest.raises(
            UsageError, match=r"'weight' of a Linear was replaced before its forward .* or load_state_dict without assign=True"
        ):
            model(X)
        assert optimizer


@pytest.mark.ranks(2)
def test_a_backward_that_goes_around_the_outputs_is_refused():
    @parwrap.distributed(strategy="fsdp")
    def train():
        model = Keeps()
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X)
        with pytest.raises(UsageError, match=r"reaches weights of a sharded model, but not through the outputs of .* return it"):
            model.kept.backward()
        return optimizer

    assert train()


@pytest.mark.ranks(2)
def test_models_that_differ_are_named():
    def train(model):
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X)
        return model, optimizer

    hooked, alike, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2 + parwrap.rank())
    hooked.weight.register_hook(lambda grad: grad * 2)
    nn.init.constant_(alike.weight, parwrap.rank())
    sharded = parwrap.distributed(strategy="fsdp")(train)
    with pytest.raises(UsageError, match=r"a hook on weight of the Linear that test_fsdp_errors.py:\d+ calls would not get the gradient"):
        sharded(hooked)
    with pytest.warns(UserWarning, match="the weights of the ranks differ at their first forward, so rank 0's are used on all"):
        assert 0 == sharded(alike)[0].weight.sum().item()
    with pytest.raises(RankMismatchError, match=r"different parameters of a Linear at .*'weight', \(2, 2\).* and .*'weight', \(3, 2\)"):
        sharded(other)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("steps", r"rank 0 is in the forward of Linear first at .*_errors.py.*rank 1 is in the last check of weights at its end, after"),
        ("unit", r"rank 0 is in the forward of Linear second at .*rank 1 is in the backward at"),
        ("state", r"rank 0 is in the forward of Linear first at .*rank 1 is in gathering a sharded tensor of shape \(2, 2\) at"),
    ],
)
def test_ranks_that_come_apart_are_told_where_each_is(part, text, tmp_path):
    @parwrap.distributed(strategy="fsdp", wrap="Linear")
    def train():
        model = Two()
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3):
            other = part if parwrap.rank() == 1 and step == 2 else ""
            if other:
                time.sleep(0.3)  # rank 0 waits for this rank, which then finds it there
            if other == "steps":
                break
            if other == "state":
                model.first.state_dict()
            model(X, both=other != "unit").sum().backward()
            optimizer.step()

    try:
        train()
    except Exception as error:
        raised = error
    with open(tmp_path / "said", "a") as file:
        file.write(f"{type(raised).__name__}: {raised}\n")
    if isinstance(raised, LockstepError):
        torch.distributed.destroy_process_group()  # as when its process ends: the other rank is in a collective, and loses its connection
    assert re.search(f"LockstepError: .*{text}", (tmp_path / "said").read_text(), re.DOTALL)


@pytest.mark.ranks(2)
def test_after_an_error_nothing_hangs_on_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @parwrap.distributed(strategy="fsdp", wrap="Linear")
    def train():
        optimizer = SGD(model.parameters(), lr=0.1)
        model(X)
        raise KeyError(optimizer)

    with pytest.raises(KeyError):
        train()
    assert [] == [value for module in model.modules() for name, value in vars(module).items() if name.endswith("hooks") and value]
    assert vars(nn.Linear(2, 2)).keys() == vars(model[0]).keys()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"wrap": 0},
            "wrap=0 does not say which modules strategy='fsdp' gathers one by one: use a positive number of parameters, a class, ",
        ),
        ({"wrap": (3, "Block")}, "wrap=\\(3, 'Block'\\) does not say which modules"),
        ({"wrap": "Block", "strategy": "ddp"}, "wrap='Block' has no effect with strategy='ddp': remove it, or choose .* 'fsdp'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "fsdp", **options})


def trained_with(wrap):
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    with parwrap.distributed(strategy="fsdp", wrap=wrap):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", ["Blok", ("Blok", nn.GRU)])
def test_classes_of_wrap_that_no_model_has_are_an_error_that_lists_those_there(wrap):
    with pytest.raises(UsageError, match=r"wrap names Blok.* trains is one\. There are LayerNorm, Linear\."):
        trained_with(wrap)


@pytest.mark.ranks(2)
def test_one_class_of_wrap_that_no_model_has_is_a_warning():
    with pytest.warns(UserWarning, match=r"wrap names Blok, but no module"):
        trained_with(("Linear", "Blok"))
