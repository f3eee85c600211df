"""Apex's levels O2 and O3 for a plain loop, against copies by hand."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import parwrap

HALF = torch.float16


class Net(nn.Module):
    """Tied weights that are read past their module, a recurrent layer, a buffer that its forward changes, BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.seen = []

    def forward(self, tokens, gain):
        hidden = self.recurrent(self.embedding(tokens) * gain)[0][:, -1]
        self.seen.append((gain.dtype, hidden.dtype, self.linear.weight.dtype, self.norm.weight.dtype))
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0), 0.5)
        hidden = self.linear(self.norm(hidden - self.mean))
        return {"logits": [nn.functional.linear(hidden, self.embedding.weight)]}


def data():
    tokens = torch.randint(7, (60, 8, 4), generator=torch.Generator().manual_seed(1))
    return [(each, torch.ones(8, 1, 1), each[:, 0]) for each in tokens]


def train(model=None, batches=60):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for tokens, gain, target in data()[:batches]:
        optimizer.zero_grad()
        logits = model(tokens, gain)["logits"][0]
        loss = nn.functional.cross_entropy(logits, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((logits.dtype, loss.item()))
    return model, losses, optimizer


def mean(losses):
    return sum(loss for _, loss in losses) / len(losses)


def o2_by_hand():
    """Master weights, their copies and the scaler, all by hand."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu")
    for tokens, gain, target in data():
        optimizer.zero_grad()
        copies = {name: p.to(HALF) for name, p in model.named_parameters() if not name.startswith("norm")}
        copies["mean"] = model.mean.to(HALF)
        logits = functional_call(model, copies, (tokens, gain.to(HALF)))["logits"][0].float()
        model.mean.copy_(copies["mean"])
        scaler.scale(nn.functional.cross_entropy(logits, target)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model


def test_o2_is_bit_for_bit_master_weights_and_a_scaler_by_hand():
    expected = o2_by_hand()
    actual, losses, _ = parwrap.amp(level="O2")(train)()

    for name, value in expected.state_dict().items():
        assert torch.equal(value, actual.state_dict()[name]), name
    assert {torch.float32} == {dtype for dtype, _ in losses} == {p.dtype for p in actual.parameters()}
    assert {(HALF, HALF, HALF, torch.float32)} == set(actual.seen)
    assert actual.mean.any()


def test_o2_learns_as_float32_does():
    plain, halved = train()[1], parwrap.amp(level="O2")(train)()[1]

    assert mean(plain[-10:]) < mean(plain[:10])
    assert mean(halved[-10:]) < mean(plain[-10:]) + 0.1


class Assigning(nn.Module):
    """A moving average, a counter and a loss that its forward assigns; a part of it has another."""

    def __init__(self, inner=None):
        super().__init__()
        self.linear, self.inner = nn.Linear(2, 2), inner
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("loss", torch.zeros(()))

    def forward(self, x):
        x = self.linear(self.inner(x) if self.inner else x)
        self.mean = 0.5 * self.mean + 0.5 * torch.ones(2).to(x)
        self.count = self.count + 1
        self.loss = x.mean()
        return x


def test_o2_keeps_buffers_that_a_forward_assigns():
    with parwrap.amp(level="O2", init_scale=64.0):
        model = Assigning(Assigning())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2))
            model.loss.backward()
            assert model.inner.linear.weight.grad.any()
            optimizer.step()

    for each in (model, model.inner):
        assert ([0.875] * 2, 3) == (each.mean.tolist(), each.count.item())
        assert {torch.float32} == {each.mean.dtype, each.loss.dtype}
        assert ["mean", "count", "loss"] == list(each._buffers)


def test_o2_keeps_what_a_forward_changes_of_a_weight_and_no_less_of_the_rest():
    with parwrap.amp(level="O2", init_scale=64.0):
        embedding = nn.Embedding(3, 4, max_norm=1.0)
        torch.optim.SGD(embedding.parameters(), lr=0.1)
        with torch.no_grad():
            embedding.weight.fill_(1 / 3)
            embedding.weight[1] = 2.0
        embedding(torch.tensor([0, 1]))

    assert [1 / 3, 0.5, 1 / 3] == pytest.approx(embedding.weight[:, 0].tolist(), abs=1e-3)
    assert torch.equal(torch.tensor(1 / 3), embedding.weight[2, 0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_o2_with_checkpoints(use_reentrant):
    def gradients(checkpointed):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

        class DiLoCo(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.inner = nn.Linear(6, 6), inner

            def forward(self, x):
                x = self.first(x)
                return checkpoint(self.inner, x, use_reentrant=use_reentrant) if checkpointed else self.inner(x)

        with parwrap.amp(level="O2", init_scale=64.0):
            model = DiLoCo()
            torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(2, 6)).sum().backward()
        return [p.grad for p in model.parameters()]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    logits: torch.Tensor | None = None


class Writes(nn.Linear):
    """Writes into its inputs, which are a dict, a list and a dataclass."""

    def forward(self, batch, hidden, *, more):
        batch["logits"] = super().forward(batch["x"])
        batch["inner"]["y"] = batch["inner"].pop("x")
        batch["counts"][0] += 1
        hidden.append(batch["logits"].relu())
        more.logits = super().forward(more.x)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_a_forward_writes_into_its_inputs_reaches_the_script(level):
    def called():
        torch.manual_seed(0)
        model, x, hidden = Writes(8, 2), torch.ones(4, 8), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch, more = {"x": x, "inner": {"x": x}, "counts": [0, x]}, Batch(x)
        model(batch, hidden, more=more)
        nn.functional.cross_entropy(batch["logits"] + more.logits, torch.zeros(4).long()).backward()
        optimizer.step()

        assert batch["x"] is more.x is x
        assert ["x", "inner", "counts", "logits"] == [*batch]
        assert [("y", x)] == [*batch["inner"].items()]
        assert (1, True) == (batch["counts"][0], batch["counts"][1] is x)
        return [batch["logits"], *hidden, more.logits, model.weight.detach().float()]

    expected = called()
    with parwrap.amp(level=level):
        found = called()

    assert [torch.float32] * 4 == [each.dtype for each in found]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_a_model_that_no_optimizer_trains_stays_in_float32():
    with parwrap.amp(level="O2"):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_o3_makes_the_model_and_the_state_of_its_optimizer_half_and_scales_nothing():
    model, losses, optimizer = parwrap.amp(level="O3")(train)()

    assert {HALF} == {tensor.dtype for tensor in (*model.parameters(), model.mean, model.norm.running_mean)}
    assert {torch.float32} == {dtype for dtype, _ in losses}
    assert {HALF} == {state["momentum_buffer"].dtype for state in optimizer.state.values()}
    assert 1.0 == parwrap.amp_state().scale
    assert mean(losses[-10:]) < mean(losses[:10])


def test_o3_takes_up_a_training_in_float32():
    def go_on():
        state = before.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        optimizer.load_state_dict(state)
        tokens, gain, target = data()[0]
        nn.functional.cross_entropy(model(tokens, gain)["logits"][0], target).backward()
        optimizer.step()
        return optimizer

    model, _, before = train(batches=2)

    assert {HALF} == {state["momentum_buffer"].dtype for state in parwrap.amp(level="O3")(go_on)().state.values()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_ranks(level):
    model, losses, _ = parwrap.distributed(parwrap.amp(level=level)(train))()

    assert mean(losses[-10:]) < mean(losses[:10])
    for each in parwrap.gather(dict(model.named_parameters())):
        assert all(torch.equal(p, each[name]) for name, p in model.named_parameters())


def test_the_model_in_a_wrapper_is_the_model():
    with parwrap.amp(level="O2", init_scale=64.0):
        model = nn.DataParallel(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((1, 2), 1 / 3)).sum().backward()
        optimizer.step()

    assert {torch.tensor(1 / 3, dtype=HALF).item()} == set(model.module.weight.grad.flatten().tolist())


def test_tracing_which_exchanges_the_call_of_modules_itself_leaves_nothing_behind():
    before = vars(nn.Module)["__call__"], vars(nn.Module)["_call_impl"]
    with parwrap.amp(level="O2"):
        model = nn.Sequential(nn.Linear(2, 2))
        torch.fx.symbolic_trace(model)
        torch.compile(model, backend="eager")(torch.ones(1, 2))

    assert before == (vars(nn.Module)["__call__"], vars(nn.Module)["_call_impl"])
