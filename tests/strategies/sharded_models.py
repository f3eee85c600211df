"""Models and loops that are trained sharded, with ``distributed`` and by hand with ``fully_shard``."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap


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
