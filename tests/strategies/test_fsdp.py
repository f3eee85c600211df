"""Sharded training: the numbers of DDP and of a hand-written ``fully_shard`` loop, a part of the memory, and plain models in the end."""

import copy
import gc
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import RankMismatchError, UsageError

ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        normed = self.norm(x)
        return x + self.mlp(normed + self.attention(normed, normed, normed, need_weights=False)[0])


class Transformer(nn.Module):
    """Next tokens; the embedding is tied to the head, positions are a parameter of its own, and so is a scalar."""

    def __init__(self, width=8, tokens=11):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.randn(5, width) / 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def encode(self, x):
        x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.scale * self.head(self.encode(x))

    @staticmethod
    def data():
        return torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))

    @staticmethod
    def data():
        return torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(model, batch):
        return F.mse_loss(model(batch), batch.mean((1, 2, 3)).unsqueeze(1))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


def train(kind=Transformer, optimizer="sgd", batch_size=2, epochs=1, around=lambda model: model):
    torch.manual_seed(0)
    model = kind()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    around(model)
    for _ in range(epochs):
        for (batch,) in DataLoader(TensorDataset(kind.data()), batch_size=batch_size):
            chosen.zero_grad()
            kind.loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            chosen.step()
    model.eval()
    return model, chosen


def by_hand(kind, optimizer):
    """The same with torch's fully_shard and nothing of parwrap, in the process group that is open; gives whole weights."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = kind()
    scalars = [p for p in model.parameters() if not p.dim()]
    fully_shard(model, ignored_params=set(scalars))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    data = kind.data()[parwrap.rank() :: parwrap.world_size()]
    for batch in data.split(2):
        chosen.zero_grad()
        kind.loss(model, batch).backward()
        for p in scalars:
            torch.distributed.all_reduce(p.grad)
            p.grad /= parwrap.world_size()
        squares = [p.grad.full_tensor().square().sum() if hasattr(p.grad, "full_tensor") else p.grad.square() for p in model.parameters()]
        factor = min(1.0, 0.5 / (torch.stack(squares).sum().sqrt().item() + 1e-6))
        for p in model.parameters():
            p.grad.mul_(factor)
        chosen.step()
    return {name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}


def close(expected, actual, atol=1e-5):
    assert list(expected) == list(actual)
    for name, value in expected.items():
        assert torch.allclose(value, actual[name], atol=atol), name


def is_plain(model):
    """Whether nothing but parameters is left on a model."""
    hooks = [value for module in model.modules() for name, value in vars(module).items() if name.endswith("hooks") and value]
    extra = [name for module in model.modules() for name in vars(module) if "fsdp" in name or "composable" in name]
    return not hooks and not extra and all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(Transformer, "sgd", marks=pytest.mark.ranks(2)),
        pytest.param(Transformer, "sgd", marks=pytest.mark.ranks(3)),
        pytest.param(Transformer, "adamw", marks=pytest.mark.ranks(2)),
        pytest.param(ConvNet, "sgd", marks=pytest.mark.ranks(3)),
    ],
)
def test_weights_are_those_of_ddp_and_of_a_loop_by_hand(kind, optimizer):
    expected, with_ddp = parwrap.distributed()(train)(kind, optimizer)
    model, with_fsdp = parwrap.distributed(strategy="fsdp", wrap=("Block", nn.Linear))(train)(kind, optimizer)

    close(expected.state_dict(), model.state_dict())
    assert is_plain(model)
    assert kind is type(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in with_fsdp.param_groups[0]["params"]]
    for p, q in zip(expected.parameters(), model.parameters(), strict=True):
        close(with_ddp.state[p], with_fsdp.state[q])
        assert torch.allclose(p.grad, q.grad, atol=1e-5)
    with parwrap.distributed(strategy="none"):
        close(by_hand(kind, optimizer), dict(model.named_parameters()))


@pytest.mark.ranks(2)
def test_a_rank_holds_its_part_of_parameters_gradients_and_states():
    with parwrap.distributed(strategy="fsdp", wrap="Linear"):
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        plain = list(model.parameters())
        whole = sum(p.numel() for p in plain)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        kept = list(model.parameters())
        kept += [p.grad for p in kept] + [value for p in kept for value in optimizer.state[p].values() if value.dim()]

        assert 4 * whole == sum(part.numel() for part in kept)
        assert 2 * whole == sum(part.to_local().numel() for part in kept)
        assert [p.shape for p in plain] == [p.shape for p in model.parameters()]
        with torch._C.DisableTorchFunctionSubclass():
            assert 0 == sum(p.numel() for p in plain)


@pytest.mark.ranks(2)
def test_a_script_sees_whole_numbers_wherever_it_looks(tmp_path):
    def looked_at(model):
        weight, x = model[0].weight, torch.arange(6.0).view(2, 3)
        out = model(x)
        penalty = 0.01 * sum(p.square().sum() for p in model.parameters())
        (out.square().mean() + penalty).backward()
        seen = [repr(weight), f"{weight.norm():.4f}", str(model), type(model).__name__, weight.sum().item() > weight.max().item()]
        seen += [weight.detach().numpy().tolist(), weight.data.tolist(), [weight[0], *weight][0].tolist(), len(weight), weight.shape]
        seen += [sum(p.numel() for p in model.parameters()), isinstance(weight, nn.Parameter), float(weight.grad.abs().max())]
        seen += [torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), model.forward(x).tolist(), model[0](x).tolist()]
        seen += [nn.utils.parameters_to_vector(model.parameters()).tolist(), F.linear(x, weight).tolist(), copy.deepcopy(weight).tolist()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen += [type(norm), float(norm), float(nn.utils.clip_grad_norm_(model.parameters(), 9, norm_type=torch.inf))]
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        seen += [weight.grad.tolist(), [p.grad.norm().item() for p in model.parameters()]]
        with torch.no_grad():
            weight.data = weight.data * 2
            weight[0, 0] = 5
            model[0].bias.copy_(torch.tensor([1.0, 2, 3]))
            model[2].weight += torch.ones(1, 3)
            weight.mul_(torch.full((3, 3), 0.5)).clamp_(max=1.5)
        weight.grad = torch.ones(3, 3)
        return [*seen, weight.tolist(), weight.grad.tolist(), model(x).tolist()]

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))

    alone = build()
    expected = looked_at(alone)
    with parwrap.distributed(strategy="fsdp"):
        model = build()
        held = model[0].weight
        torch.optim.SGD(model.parameters(), lr=0.1)
        seen = looked_at(model)

        with torch.no_grad():
            nn.init.normal_(model[0].weight)
            model[0].bias.uniform_().add_(torch.rand_like(model[0].bias))
        drawn = [*model[0].weight.flatten().tolist(), *model[0].bias.tolist()]

        assert len(drawn) == len(set(drawn))
        assert held.grad.tolist() == model[0].weight.grad.tolist() == 3 * [3 * [1.0]]
        assert repr(held) == repr(model[0].weight)
    for one, other in zip(expected, seen, strict=True):
        if isinstance(one, (str, type, bool)):
            assert one == other
        else:
            assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6)
    assert held is model[0].weight


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
        with pytest.raises(UsageError, match=r"assign=True.* would put whole parameters into a model that strategy='fsdp' has sharded"):
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


class Parts(nn.Module):
    """No forward of its own, tied weights, a scalar, a frozen part, a sparse embedding, a layer that no loss reaches, and an aux. loss."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.body[2].weight = self.body[0].weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.heat = nn.Parameter(torch.tensor(2.0))

    def loss(self, words):
        hidden = self.frozen(self.body(self.words(words)))
        return (self.heat * hidden).square().mean() + hidden.mean()


@pytest.mark.ranks(2)
def test_models_of_all_sorts_train_as_with_ddp():
    words = torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(4))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(4))

    def train_parts():
        torch.manual_seed(1)
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        share = words[parwrap.rank() :: parwrap.world_size()]
        for step in range(3):
            optimizer.zero_grad(set_to_none=step > 1)
            for part in share:
                (model.loss(part) / len(share)).backward()
            optimizer.step()
            if step == 1:
                model.frozen.requires_grad_(True)
        assert model.unused.weight.grad is None
        return model.state_dict()

    def train_two():
        torch.manual_seed(1)
        made, judge = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        torch.nn.utils.parametrizations.weight_norm(judge[0])
        of_made = torch.optim.RMSprop(made.parameters(), lr=0.01)
        of_judge = torch.optim.AdamW([{"params": judge[0].parameters(), "lr": 0.02}, {"params": [judge[2].weight, judge[2].bias]}], lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(of_judge, 1, 0.5)
        share = x[parwrap.rank() :: parwrap.world_size()]
        for _ in range(3):
            fake = made(share)
            of_judge.zero_grad()
            judge(share + 1).mean().backward()
            (-judge(fake.detach()).mean()).backward()
            of_judge.step()
            of_made.zero_grad()
            judge(fake).mean().backward()
            of_made.step()
            schedule.step()
        return {**made.state_dict(), **{f"judge {name}": value for name, value in judge.state_dict().items()}}

    for train in (train_parts, train_two):
        expected = parwrap.distributed()(train)()
        close(expected, parwrap.distributed(strategy="fsdp", wrap="Linear")(train)(), atol=1e-6)
        close(expected, parwrap.distributed(strategy="fsdp")(train)(), atol=1e-6)


@pytest.mark.ranks(2)
def test_it_composes_with_the_other_features():
    """Global batches of unequal parts, windows of batches, mixed precision, BatchNorm over ranks, and evaluations of unequal parts."""
    data = torch.randn(15, 4, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=5)

    def train(optimizer="sgd"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
        chosen = OPTIMIZERS[optimizer](model.parameters())
        for x, y in loader:
            chosen.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            chosen.step()

        @parwrap.evaluate
        def loss(model):
            model.eval()
            with torch.no_grad():
                return sum(F.mse_loss(model(x), y).item() * len(x) for x, y in loader) / len(loader.dataset)

        skipped = parwrap.amp_state().skipped_steps
        return {"loss": torch.tensor(loss(model)), "skipped": torch.tensor(skipped), **model.state_dict()}

    for features, options in (
        ([], {"batch": "global", "loss": "mean"}),
        ([], {"uneven": "join"}),
        ([parwrap.sync_bn()], {"batch": "global"}),
        ([parwrap.accumulate(2)], {}),
        ([parwrap.accumulate(3)], {"uneven": "join"}),
        ([parwrap.accumulate("auto")], {}),
        ([parwrap.amp(dtype="bf16")], {}),
        ([parwrap.amp(dtype="fp16", init_scale=2.0**18)], {}),
    ):
        runs = []
        for strategy in ("ddp", "fsdp"):
            function = parwrap.distributed(strategy=strategy, **options)(train)
            for feature in features:
                function = copy.copy(feature)(function)
            runs.append(function())
        close(*runs)
    assert 0 < runs[0]["skipped"] < 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            "steps",
            r"rank 1 has come to the end of its script or function, and others are not there yet: Rank 0 is in forward \(Two, .*fsdp.py",
        ),
        ("way", r"different points at the same time: Rank 0 is in gradients \(Two, .* Rank 1 is in gradients \(Two without second.w"),
        ("state", r"rank 1 has come to Linear.state_dict\(\) .*Rank 0 is in forward \(Two"),
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
        with pytest.raises(UsageError, match=r"a hook at .*test_fsdp.py:.* on a sharded parameter would never see a gradient"):
            weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(UsageError, match=r"torch.autograd.grad at .* asks for gradients of sharded parameters.* read p.grad"):
            torch.autograd.grad(model.side(x).sum(), weight)
        with pytest.raises(UsageError, match=r"of shape \(2, 2\) is sharded by strategy='fsdp' and cannot get a value of shape \(3, 3\)"):
            weight.data = torch.ones(3, 3)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
            weight.add_(torch.ones(2, 2))
        model(x)
        with pytest.raises(UsageError, match=r"goes through a part of a sharded model that is not behind its outputs: .* return that loss"):
            model.kept.backward()
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(x).add_(1 / 0)

        @parwrap.rank_zero_only
        def look():
            with pytest.raises(UsageError, match=r"forward at .* needs the other ranks, .* Call it outside of that function"):
                model(x)
            with pytest.raises(UsageError, match=r"Keeps.state_dict\(\) at .* needs the other ranks"):
                model.state_dict()

        look()
        with pytest.raises(UsageError, match=r"amp\(level='O2'\) makes half precision copies of a model, .* take amp\(dtype='bf16'\)"):
            parwrap.amp(level="O2")(look)()
        model.side.bias = nn.Parameter(torch.ones(2))
        with pytest.raises(UsageError, match="the parameter 'bias' of a Linear in Keeps was exchanged after the optimizer was built"):
            model(x)
        hooked = nn.Linear(2, 2)
        hooked.weight.register_hook(lambda grad: grad * 2)
        with pytest.raises(UsageError, match=r"a hook on Linear.weight would never see a gradient"):
            torch.optim.SGD(hooked.parameters(), lr=0.1)
        other = nn.Linear(2, 2 + parwrap.rank())
        with pytest.raises(RankMismatchError, match=r"the ranks give other parameters to an optimizer at .*'Linear.weight', \(2, 2\)"):
            torch.optim.SGD(other.parameters(), lr=0.1)
        alike = nn.Linear(2, 2)
        nn.init.constant_(alike.weight, parwrap.rank())
        with pytest.warns(UserWarning, match="of 2 parameters have different values on different ranks; rank 0's are taken"):
            torch.optim.SGD(alike.parameters(), lr=0.1)
        assert 0 == alike.weight.sum().item()
        by_hand = torch.ones(2, requires_grad=True)
        for visit in range(2):
            with pytest.raises(UsageError, match="reaches tensors that no optimizer has") if visit else nullcontext():
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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wrap": 0}, "wrap=0 says which modules are units of strategy='fsdp': a number of parameters from 1 up, a class, its name, or a"),
        ({"wrap": (3, "Block")}, "wrap=\\(3, 'Block'\\) says which modules"),
        ({"wrap": "Block", "strategy": "ddp"}, "wrap='Block' has nothing to act on with strategy='ddp': leave it out, or choose .* 'fsdp'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parwrap.distributed(**{"strategy": "fsdp", **options})


class Recurrent(nn.Module):
    """Called twice before a backward; its scalar stays whole, so optimizers have parameters of both kinds."""

    def __init__(self, body):
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.tensor(1.5))
        self.mlp = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))

    def forward(self, x):
        hidden = self.body(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.scale * checkpoint(self.mlp, hidden[:, -1], use_reentrant=False)


@pytest.mark.ranks(2)
def test_optimizers_of_all_sorts_step_as_with_ddp():
    data = torch.randn(5, 8, 3, 4, generator=torch.Generator().manual_seed(0))

    def train(make, scaler=None, body=nn.Linear):
        torch.manual_seed(0)
        model = Recurrent(nn.LSTM(4, 6, batch_first=True) if body is nn.LSTM else nn.Linear(4, 6))
        optimizer = make(model.named_parameters())
        for x in data[:, parwrap.rank() :: parwrap.world_size()]:
            optimizer.zero_grad()
            loss = model(x).square().mean() + model(x + 1).mean().square()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
        return model

    kinds = torch.optim
    for number, trained in enumerate(
        (
            lambda: train(lambda p: kinds.Adam(p, lr=0.01, eps=1e-3, foreach=True), body=nn.LSTM),
            lambda: train(lambda p: kinds.AdamW(p, lr=0.01, eps=1e-3, fused=True)),
            lambda: train(lambda p: kinds.Adafactor(p, lr=0.01)),
            lambda: train(lambda p: kinds.SGD(p, lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)),
            parwrap.accumulate(2)(parwrap.amp(dtype="fp16", init_scale=64.0)(lambda: train(lambda p: kinds.SGD(p, lr=0.1)))),
        )
    ):
        expected = parwrap.distributed()(trained)()
        model = parwrap.distributed(strategy="fsdp", wrap=("LSTM", "Sequential"))(trained)()

        assert is_plain(model), number
        close(expected.state_dict(), model.state_dict())


def test_the_example_is_trained_and_saved_as_its_page_says(tmp_path):
    page = (ROOT / "docs" / "strategies" / "fsdp.rst").read_text()
    (command,) = re.findall(r"^    python (-m parwrap\.run .* examples/fsdp\.py .*)$", page, re.MULTILINE)
    command = command.replace("decoder.pt", str(tmp_path / "decoder.pt")).split()
    run = subprocess.run([sys.executable, *command, "--epochs", "1"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)

    assert "103575 parameters in a Decoder\n" in run.stdout
    assert re.search(r"^accuracy 0\.\d+$", run.stdout, re.MULTILINE)
    weights = torch.load(tmp_path / "decoder.pt")
    assert 103575 == sum(p.numel() for p in weights.values())
    assert {torch.Tensor} == {type(p) for p in weights.values()}


@pytest.mark.ranks(2)
def test_what_is_written_to_a_copy_of_rows_is_refused_and_not_lost():
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    with parwrap.distributed(strategy="fsdp"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight, expected = model.weight.data, plain.weight.data
        for write in (
            lambda: weight[0].zero_(),
            lambda: weight[1].data.zero_(),
            lambda: weight.view(-1)[3:9].zero_(),
            lambda: [row.mul_(2) for row in weight],
            lambda: [part.mul_(2) for part in weight.chunk(2)],
        ):
            with pytest.raises(UsageError, match=r"would be lost: what it writes to is a copy\. Assign by index to the tensor itself"):
                write()
        for tensor in (weight, expected):
            tensor[0] = 7.0
            tensor[:, 1].fill_(3.0)
            tensor.t().add_(1.0)
        assert optimizer
    assert torch.equal(expected, model.weight.data)
