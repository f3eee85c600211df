"""Activation checkpointing (non-reentrant) over residual blocks with dropout."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, p_drop=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.Dropout(p_drop))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class ResMLP(nn.Module):
    def __init__(self, in_dim=10, dim=32, depth=3, n_classes=4):
        super().__init__()
        self.stem = nn.Linear(in_dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, n_classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def get_loaders():
    g = torch.Generator().manual_seed(2)
    centers = 1.5 * torch.randn(8, 10, generator=g)
    cluster = torch.randint(8, (1400,), generator=g)
    x = centers[cluster] + 0.7 * torch.randn(1400, 10, generator=g)
    y = cluster % 4
    return (
        DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(x[1000:], y[1000:]), batch_size=100),
    )


def main():
    train_loader, test_loader = get_loaders()
    model = ResMLP()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            loss_fn(model(x), y).backward()
            opt.step()

        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader)
        accuracy = correct / len(test_loader.dataset)
        print(f"epoch {epoch}: {accuracy:.2%}")

    print(f"accuracy {accuracy:.4f}")
    return model


if __name__ == "__main__":
    model = main()
