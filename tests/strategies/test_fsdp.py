"""Sharded training: the numbers of DDP and of a hand-written ``fully_shard`` loop, and a part of the memory."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from sharded_models import OPTIMIZERS, Transformer, by_hand, close, is_plain, train
from warm_command import run as run_command

ROOT = Path(__file__).parents[2]


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))

    @staticmethod
    def data():
        return torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(model, batch):
        return F.mse_loss(model(batch), batch.mean((1, 2, 3)).unsqueeze(1))


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        pytest.param(Transformer, "sgd", marks=pytest.mark.ranks(2)),
        pytest.param(Transformer, "sgd", marks=[pytest.mark.ranks(3), pytest.mark.slow]),
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

    for each in (train_parts, train_two):
        expected = parwrap.distributed()(each)()
        close(expected, parwrap.distributed(strategy="fsdp", wrap="Linear")(each)(), atol=1e-6)
        close(expected, parwrap.distributed(strategy="fsdp")(each)(), atol=1e-6)


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
    run = run_command([sys.executable, *command, "--epochs", "1"], cwd=ROOT, timeout=100, check=True)

    assert "103575 parameters in a Decoder\n" in run.stdout
    assert re.search(r"^accuracy 0\.\d+$", run.stdout, re.MULTILINE)
    weights = torch.load(tmp_path / "decoder.pt")
    assert 103575 == sum(p.numel() for p in weights.values())
    assert {torch.Tensor} == {type(p) for p in weights.values()}


def loose(kind, strategy):
    """Values of parameters in no module after steps by gradients of ``kind``."""

    def loss(weight, bias, x):
        return (x @ weight + bias - 2 * x.sum(1)).square().mean()

    def train():
        weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight, bias], lr=0.1)
        for step in range(9):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + parwrap.rank()))
            optimizer.zero_grad()
            if kind == "torch.autograd.grad":
                weight.grad, bias.grad = torch.autograd.grad(loss(weight, bias, x), [weight, bias])
            elif kind == "torch.func.grad":
                weight.grad, bias.grad = torch.func.grad(loss, argnums=(0, 1))(weight.detach(), bias.detach(), x)
            else:
                loss(weight, bias, x).backward()
            if kind != "backward without clipping":
                nn.utils.clip_grad_norm_([weight, bias], 0.5)
            optimizer.step()
        return [*weight.tolist(), bias.item()]

    return parwrap.distributed(strategy=strategy)(train)()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["torch.autograd.grad", "torch.func.grad"])
def test_gradients_by_hand_of_what_is_not_sharded_are_averaged(kind):
    expected = loose("backward", "ddp")

    with pytest.warns(UserWarning, match=r"were not computed by backward\(\)"):
        actual = loose(kind, "fsdp")

    assert pytest.approx(expected, abs=1e-6) == actual


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_gradients_of_backwards_of_what_is_not_sharded_are_averaged_once():
    assert pytest.approx(loose("backward", "ddp"), abs=1e-6) == loose("backward", "fsdp")
