"""A small transformer decoder that learns to continue arithmetic sequences, written for one device.

python examples/fsdp.py
parwrap run --nproc-per-node 2 --strategy fsdp --wrap Block examples/fsdp.py --save decoder.pt
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUMBERS, LENGTH = 23, 10


def sequences(count, seed):
    """Rows of ``a, a + d, a + 2d, ...`` modulo a prime. Two numbers determine all others."""
    draws = torch.randint(NUMBERS, (2, count, 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset((draws[0] + draws[1] * torch.arange(LENGTH)) % NUMBERS)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, NUMBERS)

    def forward(self, numbers):
        length = numbers.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=numbers.device).triu(1)
        x = self.embed(numbers) + self.position[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@torch.no_grad()
def accuracy_of(model, loader):
    """The accuracy on the numbers that two before them determine."""
    model.eval()
    right = 0.0
    for (rows,) in loader:
        rows = rows.to(model.position.device)
        right += (model(rows[:, :-1]).argmax(2) == rows[:, 1:])[:, 1:].float().mean(1).sum().item()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training sequences")
    parser.add_argument("--width", type=int, default=64, help="size of the embeddings")
    parser.add_argument("--blocks", type=int, default=2, help="transformer blocks")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--save", help="file for the weights")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, test = sequences(2000, seed=1), sequences(500, seed=2)
    model = Decoder(args.width, args.blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    print(f"{sum(p.numel() for p in model.parameters())} parameters in a {type(model).__name__}")

    for epoch in range(args.epochs):
        model.train()
        for (rows,) in DataLoader(train, batch_size=32, shuffle=True):
            rows = rows.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.3f}")
    if args.save:
        torch.save(model.state_dict(), args.save)
    print(f"accuracy {accuracy_of(model, DataLoader(test, batch_size=100)):.4f}")


if __name__ == "__main__":
    main()
