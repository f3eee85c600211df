"""Sharded training: the numbers of DDP and of a hand-written ``fully_shard`` loop, and a part of the memory."""

from __future__ import annotations

import pytest
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrap", [None, ("Block", nn.Linear)])
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
