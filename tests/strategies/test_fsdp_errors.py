"""Refusals of sharded training, and its messages when ranks take different paths."""

import gc
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import parwrap
from parwrap.errors import RankMismatchError, UsageError


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            "steps",
            r"rank 1 waits at the end of its script or function, but other ranks are not there: Rank 0 has been in forward \(Two, "
            r".*_errors.py",
        ),
        (
            "way",
            r"different points at the same time: Rank 0 has been in gradients \(Two, .* Rank 1 has been in gradients \(Two without "
            r"second.w",
        ),
        ("state", r"rank 1 waits at Linear.state_dict\(\) .*Rank 0 has been in forward \(Two"),
    ],
)
def test_ranks_that_part_are_told_where_each_is(part, text, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, both):
            return self.second(self.first(x)) if both else self.first(x)

    @parwrap.distributed(strategy="fsdp")
    def train():
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            other = part if parwrap.rank() == 1 and step == 2 else ""
            if other == "steps":
                break
            if other == "state":
                model.first.state_dict()
            model(torch.ones(1, 2), both=other != "way").sum().backward()
            optimizer.step()

    try:
        train()
    except Exception as error:
        told, found = f"{type(error).__name__}: {error}\n", isinstance(error, RankMismatchError)
    with open(tmp_path / "told", "a") as file:
        file.write(told)
    gc.collect()
    if found:
        torch.distributed.destroy_process_group()  # as when its process ends: the other rank is in a collective, and loses its connection
    else:
        assert re.search(f"RankMismatchError: .*{text}", (tmp_path / "told").read_text())


@pytest.mark.ranks(2)
def test_what_cannot_be_done_is_an_error_that_says_so():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.side = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            hidden = self.body(x)
            self.kept = self.side(hidden).square().mean()
            return hidden.detach()

    x = torch.ones(3, 2)
    with parwrap.distributed(strategy="fsdp"):
        model = Keeps()
        torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model.body.weight
        with pytest.raises(UsageError, match=r"a hook at .*test_fsdp_errors.py:.* on a sharded parameter would never see a gradient"):
            weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(UsageError, match=r"torch.autograd.grad at .* asks for gradients of sharded parameters.* read p.grad"):
            torch.autograd.grad(model.side(x).sum(), weight)
        with pytest.raises(
            UsageError, match=r"of shape \(2, 2\) is sharded by strategy='fsdp' and cannot be assigned a value of shape \(3, 3\)"
        ):
            weight.data = torch.ones(3, 3)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
            weight.add_(torch.ones(2, 2))
        model(x)
        with pytest.raises(UsageError, match=r"reaches a part of a sharded model without going through its outputs: .* return that loss"):
            model.kept.backward()
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(x).add_(1 / 0)

        @parwrap.rank_zero_only
        def look():
            with pytest.raises(UsageError, match=r"forward at .* needs the other ranks, .*: call it outside of that function"):
                model(x)
            with pytest.raises(UsageError, match=r"Keeps.state_dict\(\) at .* needs the other ranks"):
                model.state_dict()

        look()
        with pytest.raises(UsageError, match=r"amp\(level='O2'\) makes a half precision copy of a model, .* use amp\(dtype='bf16'\)"):
            parwrap.amp(level="O2")(look)()
        model.side.bias = nn.Parameter(torch.ones(2))
        with pytest.raises(UsageError, match="the parameter 'bias' of a Linear in Keeps was replaced after the optimizer was built"):
            model(x)
        hooked = nn.Linear(2, 2)
        hooked.weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(UsageError, match=r"a hook on Linear.weight would never see a gradient"):
            torch.optim.SGD(hooked.parameters(), lr=0.1)
        other = nn.Linear(2, 2 + parwrap.rank())
        with pytest.raises(RankMismatchError, match=r"the ranks pass different parameters to an optimizer at .*'Linear.weight', \(2, 2\)"):
            torch.optim.SGD(other.parameters(), lr=0.1)
        alike = nn.Linear(2, 2)
        nn.init.constant_(alike.weight, parwrap.rank())
        with pytest.warns(UserWarning, match="of 2 parameters have different values on different ranks; rank 0's are used"):
            torch.optim.SGD(alike.parameters(), lr=0.1)
        assert 0 == alike.weight.sum().item()
        by_hand = torch.ones(2, requires_grad=True)
        for visit in range(2):
            with pytest.raises(UsageError, match="reaches tensors that are in no optimizer") if visit else nullcontext():
                by_hand.sum().backward()
        model.side.bias = None  # and so the model is left in peace at the end


@pytest.mark.ranks(2)
def test_after_an_error_nothing_hangs_on_a_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @parwrap.distributed(strategy="fsdp", wrap="Linear")
    def train():
        torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2))
        raise KeyError("on purpose")

    for _ in range(2):
        with pytest.raises(KeyError):
            train()
        hooks = [value for module in model.modules() for name, value in vars(module).items() if name.endswith("hooks") and value]
        assert not hooks
        assert vars(nn.Linear(2, 2)).keys() == vars(model[0]).keys()
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_model_of_the_caller_stays_as_it_was_when_its_ranks_fail():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    @parwrap.distributed(strategy="fsdp", nprocs=2)
    def train():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        train()
    assert type(model.weight) is nn.Parameter
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"wrap": 0},
            "wrap=0 does not say which modules to shard as units with strategy='fsdp': use a positive number of parameters, a class, "
            "a class name, or a",
        ),
        ({"wrap": (3, "Block")}, "wrap=\\(3, 'Block'\\) does not say which modules"),
        ({"wrap": "Block", "strategy": "ddp"}, "wrap='Block' has no effect with strategy='ddp': remove it, or choose .* 'fsdp'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "fsdp", **options})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [0, 2])
def test_steps_by_gradients_of_sharded_parameters_that_no_backward_made_are_refused(before):
    @parwrap.distributed(strategy="fsdp")
    def train():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(before):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        for p in model.parameters():
            p.grad = torch.full_like(p, parwrap.rank())
        optimizer.step()

    with pytest.raises(UsageError, match=r"_errors.py:\d+ uses were not computed by backward\(\)\. .*: call loss.backward\(\)"):
        train()


@pytest.mark.ranks(2)
def test_gradients_of_a_backward_may_be_replaced_and_used_twice():
    @parwrap.distributed(strategy="fsdp")
    def train():
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2) + parwrap.rank()).sum().backward()
            for p in model.parameters():
                p.grad = p.grad / 2
            optimizer.step()
            optimizer.step()
        return model.state_dict()["bias"].tolist()

    torch.manual_seed(0)

    assert pytest.approx((nn.Linear(2, 2).bias - 0.3).tolist()) == train()
