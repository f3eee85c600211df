"""Sharded training: the numbers of DDP and of a hand-written ``fully_shard`` loop, and a part of the memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import DefaultDeviceType, checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from drawn_order import DrawnOrder
from parwrap.errors import UsageError
from parwrap.ranks import group
from parwrap.torch_private import fsdp

pytestmark = pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")


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

    def forward(self, x):
        x = self.embedding(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x)

    @staticmethod
    def data():
        return torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


def train(kind=Transformer, optimizer="sgd", epochs=1, clip=None):
    torch.manual_seed(0)
    model = kind()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(0)
    losses = []
    for _ in range(epochs):
        for (batch,) in DataLoader(TensorDataset(kind.data()), batch_size=2, shuffle=True):
            chosen.zero_grad()
            loss = kind.loss(model, batch)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            chosen.step()
            losses.append(loss.item())
    model.eval()
    return model, chosen, losses


def is_plain(model):
    """Whether nothing but parameters is left on a model."""
    hooks = [value for module in model.modules() for name, value in vars(module).items() if name.endswith("hooks") and value]
    extra = [name for module in model.modules() for name in vars(module) if "fsdp" in name or "composable" in name]
    return not hooks and not extra and all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrap", "optimizer"),
    [
        pytest.param(wrap, optimizer, marks=[] if (wrap is None) == (optimizer == "sgd") else pytest.mark.slow)
        for wrap in (None, ("Block", nn.Linear))
        for optimizer in OPTIMIZERS
    ],
)
def test_losses_weights_gradients_and_states_are_bit_for_bit_those_of_ddp(wrap, optimizer):
    expected, with_ddp, losses = parwrap.distributed()(train)(optimizer=optimizer, epochs=2)
    model, with_fsdp, actual = parwrap.distributed(strategy="fsdp", wrap=wrap)(train)(optimizer=optimizer, epochs=2)

    assert losses == actual
    assert is_plain(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in with_fsdp.param_groups[0]["params"]]
    for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.equal(p.grad, q.grad), name
        assert all(torch.equal(value, with_fsdp.state[q][key]) for key, value in with_ddp.state[p].items()), name


def close(expected, actual, atol=1e-6):
    assert list(expected) == list(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))

    @staticmethod
    def data():
        return torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(model, batch):
        return F.mse_loss(model(batch), batch.mean((1, 2, 3)).unsqueeze(1))


def by_hand(kind, optimizer, clip, mesh=None):
    """The same with torch's ``fully_shard`` and nothing of parwrap, in the process group that is open; gives whole weights."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = kind()
    scalars = [p for p in model.parameters() if not p.dim()]
    fully_shard(model, mesh=mesh, ignored_params=set(scalars))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    share = DrawnOrder(range(12), num_replicas=parwrap.world_size(), rank=parwrap.rank(), seed=0)
    for batch in DataLoader(kind.data(), batch_size=2, sampler=share):
        chosen.zero_grad()
        kind.loss(model, batch).backward()
        for p in scalars:
            torch.distributed.all_reduce(p.grad)
            p.grad /= parwrap.world_size()
        squares = [p.grad.full_tensor().square().sum() if hasattr(p.grad, "full_tensor") else p.grad.square() for p in model.parameters()]
        factor = min(1.0, clip / (torch.stack(squares).sum().sqrt().item() + 1e-6))
        for p in model.parameters():
            p.grad.mul_(factor)
        chosen.step()
    return {name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", [pytest.param(Transformer, marks=pytest.mark.ranks(2)), pytest.param(ConvNet, marks=pytest.mark.ranks(3))])
def test_clipped_steps_are_those_of_ddp_and_of_a_loop_by_hand(kind):
    expected, *_ = parwrap.distributed()(train)(kind, clip=0.5)
    model, *_ = parwrap.distributed(strategy="fsdp", wrap="Linear")(train)(kind, clip=0.5)

    close(expected.state_dict(), model.state_dict())
    assert kind is type(model)
    assert is_plain(model)
    with parwrap.distributed(strategy="none"):
        close(by_hand(kind, "sgd", 0.5), dict(model.named_parameters()))


@contextmanager
def on_nodes(nodes, folder):
    """Makes these warm ranks those of several nodes, each with a folder of its own."""
    here = group.current()
    node = next(node for node, ranks in enumerate(nodes) if here.world.rank in ranks)
    place = {"node_rank": node, "local_rank": nodes[node].index(here.world.rank), "local_size": len(nodes[node]), "node_ranks": nodes[node]}
    own = folder / f"node{node}"
    own.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "_current", replace(here, world=replace(here.world, **place), folder=own))
        yield


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=["in blocks", "in turn"])
def test_shards_within_nodes_train_what_one_process_trains_and_what_a_loop_by_hand_does(nodes, tmp_path):
    options = {"strategy": "fsdp", "wrap": "Block", "shard_within_node": True}

    with on_nodes(nodes, tmp_path):
        close(global_batches(), parwrap.distributed(batch="global", **options)(global_batches)())
        model, *_ = parwrap.distributed(**options)(train)(clip=0.5)
    with parwrap.distributed(strategy="none"):
        mesh = DeviceMesh("cpu", nodes, mesh_dim_names=("replicas", "shards"))
        close(by_hand(Transformer, "sgd", 0.5, mesh), dict(model.named_parameters()))
        for each in mesh.get_all_groups():
            torch.distributed.destroy_process_group(each)


@pytest.mark.ranks(4)
def test_each_node_holds_a_whole_model_in_shards(tmp_path):
    with on_nodes(((0, 1), (2, 3)), tmp_path), parwrap.distributed(strategy="fsdp", shard_within_node=True):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.full((2, 8), float(parwrap.rank()))).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        whole = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
        kept = [p.data for p in model.parameters()] + [optimizer.state[p]["exp_avg"] for p in model.parameters()]

    assert sum(part.numel() for part in kept) == 2 * sum(part.to_local().numel() for part in kept)
    torch.testing.assert_close(whole.norm(), norm)


@pytest.mark.ranks(3)
def test_nodes_of_unequal_size_cannot_each_hold_a_model(tmp_path):
    with (
        on_nodes(((0, 1), (2,)), tmp_path),
        pytest.raises(UsageError, match="as many ranks on each node, and these nodes have 2, 1 ranks"),
    ):
        parwrap.distributed(strategy="fsdp", shard_within_node=True)(train)()


def global_batches():
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for (batch,) in DataLoader(TensorDataset(Transformer.data()), batch_size=5):  # 5, 5 and 2 samples
        optimizer.zero_grad()
        loss = Transformer.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": torch.tensor(losses), **model.state_dict()}


@pytest.mark.ranks(2)
def test_a_global_batch_trains_what_one_process_trains():
    close(global_batches(), parwrap.distributed(strategy="fsdp", batch="global")(global_batches)())


@pytest.mark.ranks(2)
def test_the_work_of_a_backward_grows_with_the_units_and_not_with_their_square(monkeypatch):
    seen, original, counts = [], fsdp.unsharded_parameter, []
    monkeypatch.setattr(fsdp, "unsharded_parameter", lambda param: seen.append(param) or original(param))
    for units in (8, 16):
        with parwrap.distributed(strategy="fsdp", wrap="Linear"):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(units)))
            torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model(torch.ones(2, 4)).sum()
            seen.clear()
            loss.backward()
            counts.append(len(seen))

    assert counts[1] < 3 * counts[0]


@pytest.mark.ranks(2)
def test_a_rank_holds_its_part_of_parameters_gradients_and_states():
    with parwrap.distributed(strategy="fsdp", wrap="Linear"):
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        whole = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        kept = [p.data for p in model.parameters()] + [p.grad for p in model.parameters()]
        kept += [value for p in model.parameters() for value in optimizer.state[p].values() if value.dim()]

        assert 4 * whole == sum(part.numel() for part in kept)
        assert 2 * whole == sum(part.to_local().numel() for part in kept)
        with torch._C.DisableTorchFunctionSubclass():
            assert 0 == sum(p.untyped_storage().size() for p in model.parameters())


class Parts(nn.Module):
    """No forward of its own, tied weights, a scalar, a frozen part, a sparse embedding and a layer that no loss reaches."""

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


def train_parts():
    words = torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(4))
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
    """A generator and a critic with a parametrization, groups and a schedule."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(4))
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", ["Linear", None])
@pytest.mark.parametrize("each", [train_parts, train_two])
def test_models_of_all_sorts_train_as_with_ddp(each, wrap):
    close(parwrap.distributed()(each)(), parwrap.distributed(strategy="fsdp", wrap=wrap)(each)())


class Branches(nn.Module):
    """The way through it depends on what is in the batch."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x, way):
        return self.ways[way](x)


@pytest.mark.ranks(2)
def test_ranks_may_reach_different_parameters_of_a_unit():
    def train(penalty):
        torch.manual_seed(1)
        model = Branches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2), way=parwrap.rank() % parwrap.world_size() if step else 0).sum()
            (loss + penalty * model.ways[2].weight.square().sum() if penalty else loss).backward()
            gone = [p.grad is None for p in model.ways[2].parameters()]
            optimizer.step()
        return gone, model.state_dict()

    for penalty, gone in ((0, [True, True]), (0.1, [False, True])):
        expected, actual = parwrap.distributed()(train)(penalty), parwrap.distributed(strategy="fsdp")(train)(penalty)

        assert gone == expected[0] == actual[0]
        close(expected[1], actual[1])


DATA = torch.randn(15, 4, generator=torch.Generator().manual_seed(5))


def fit(optimizer="sgd"):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    for x, y in DataLoader(TensorDataset(DATA, DATA.sum(1, keepdim=True)), batch_size=5):
        chosen.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(DATA), DATA.sum(1, keepdim=True))
    return {"loss": loss, "skipped": torch.tensor(parwrap.amp_state().skipped_steps), **model.state_dict()}


def fit_by_hand():
    """Accumulates by hand, inside of ``no_sync``."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    for x in DATA[:12].split(6):
        optimizer.zero_grad()
        share = x[parwrap.rank() :: parwrap.world_size()]
        with parwrap.no_sync():
            model(share).square().mean().backward()
        model(share + 1).square().mean().backward()
        optimizer.step()
    return model.state_dict()


FEATURES = {
    "global batches of unequal parts": ({"batch": "global"}, fit),
    "join": ({"uneven": "join"}, fit),
    "accumulate": ({}, parwrap.accumulate(2)(fit)),
    "accumulate and join": ({"uneven": "join"}, parwrap.accumulate(3)(fit)),
    "no_sync": ({}, fit_by_hand),
    "bf16": ({}, parwrap.amp(dtype="bf16")(fit)),
    "fp16": ({}, parwrap.amp(dtype="fp16", init_scale=2.0**18)(fit)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("feature", FEATURES)
def test_it_composes_with_other_features(feature):
    options, function = FEATURES[feature]
    expected = parwrap.distributed(**options)(function)()

    close(expected, parwrap.distributed(strategy="fsdp", **options)(function)(), atol=1e-5)
    assert feature != "fp16" or 0 < expected["skipped"] < 3


class Careful(nn.Module):
    """Its last layer computes with autocast off; its norm and its table are no weights that autocast casts."""

    def __init__(self, careful=True):
        super().__init__()
        self.table, self.norm, self.body = nn.Embedding(11, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 12), nn.GELU())
        self.head, self.careful = nn.Linear(12, 1), careful

    def forward(self, x):
        x = self.body(self.norm(self.table(x)).mean(1))
        with torch.autocast("cpu", enabled=not self.careful):
            return self.head(x.float()).float()


def train_under_autocast(careful, seen=None, wide=False):
    torch.manual_seed(0)
    model = Careful(careful)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for (x,) in DataLoader(TensorDataset(Transformer.data()), batch_size=2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(Transformer.data()).sum().item() if wide else 0.0)
    if seen is not None:
        seen += [p.dtype for p in model.parameters()]
    return {"losses": torch.tensor(losses), **model.state_dict()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [None, "Linear"], ids=["one unit", "units"])
@pytest.mark.parametrize(
    ("careful", "wide"), [(False, False), (True, False), (False, True)], ids=["under it", "head outside", "evaluation outside"]
)
def test_autocast_trains_the_weights_of_ddp_bit_for_bit_and_sends_what_it_casts_in_its_dtype(careful, wide, wrap, monkeypatch):
    expected = parwrap.distributed()(train_under_autocast)(careful, wide=wide)
    gathered, dtypes = [], fsdp.unsharded_parameter
    monkeypatch.setattr(fsdp, "unsharded_parameter", lambda param: gathered.append(dtypes(param)) or gathered[-1])
    seen = []
    actual = parwrap.distributed(strategy="fsdp", wrap=wrap)(train_under_autocast)(careful, seen, wide=wide)
    last = {tuple(leaf.shape): leaf.dtype for leaf in gathered if leaf is not None}

    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name
    assert {torch.float32} == set(seen)
    low = {False: torch.bfloat16, True: torch.float32}
    assert {(11, 16): low[True], (16,): low[True], (12, 16): low[wide], (12,): low[wide], (1, 12): low[careful], (1,): low[careful]} == last


@pytest.mark.ranks(2)
def test_a_layer_that_leaves_autocast_before_a_backward_is_refused():
    with parwrap.distributed(strategy="fsdp"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = model(torch.ones(2, 4)).sum()
        second = model(torch.ones(2, 4)).sum()
        with pytest.raises(UsageError, match="under autocast, and then for the first time with autocast off"):
            (first.float() + second).backward()


class Recurrent(nn.Module):
    """Called twice before a backward; its scalar stays whole, so optimizers have parameters of both kinds."""

    def __init__(self, body, reentrant=False):
        super().__init__()
        self.body, self.scale, self.reentrant = body, nn.Parameter(torch.tensor(1.5)), reentrant
        self.mlp = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))

    def forward(self, x):
        hidden = self.body(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.scale * checkpoint(self.mlp, hidden[:, -1], use_reentrant=self.reentrant)


def step_with(make, scaler=None, body=nn.Linear, reentrant=False):
    data = torch.randn(5, 8, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM(4, 6, batch_first=True) if body is nn.LSTM else nn.Linear(4, 6), reentrant)
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
    return model.state_dict()


STEPS = {
    "foreach of an LSTM": lambda: step_with(lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, foreach=True), body=nn.LSTM),
    "fused": lambda: step_with(lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True)),
    "partial sums in the step": lambda: step_with(lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "own scaler": lambda: step_with(lambda p: torch.optim.SGD(p, lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)),
    "re-entrant checkpoint": lambda: step_with(lambda p: torch.optim.SGD(p, lr=0.1), reentrant=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", STEPS)
def test_optimizers_of_all_sorts_step_as_with_ddp(kind, monkeypatch):
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", "cpu")  # the first checkpoint of a process sets it
    expected = parwrap.distributed()(STEPS[kind])()

    wrap = "LSTM" if "LSTM" in kind else None

    close(expected, parwrap.distributed(strategy="fsdp", wrap=wrap)(STEPS[kind])(), atol=1e-5)


@pytest.mark.ranks(2)
def test_parts_that_are_called_before_the_whole_train_as_with_ddp():
    def train():
        torch.manual_seed(2)
        encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        with torch.inference_mode():
            encoder(DATA[:2])
        both = nn.Sequential(encoder, decoder)
        for x in DATA[: 12 + parwrap.rank()][parwrap.rank() :: parwrap.world_size()].split(3)[:2]:
            optimizer.zero_grad()
            (both(x).square().mean() + encoder(x).mean() + decoder(encoder(x)).mean()).backward()
            optimizer.step()
        return both.state_dict()

    close(parwrap.distributed()(train)(), parwrap.distributed(strategy="fsdp")(train)())


@pytest.mark.ranks(2)
def test_no_sync_sends_gradients():
    with parwrap.distributed(strategy="fsdp"):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        grads = []
        for _ in range(2):
            optimizer.zero_grad()
            with parwrap.no_sync():
                model(torch.full((1, 1), 1.0 + parwrap.rank())).sum().backward()
            grads.append(model.weight.grad.sum().item())

    assert [1.5, 1.5] == grads
