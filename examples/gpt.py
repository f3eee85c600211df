"""A small GPT that learns a module of Python's standard library, character by character, written for one device.

python examples/gpt.py
parwrap run --nproc-per-node 2 --batch global examples/gpt.py
parwrap run --nproc-per-node 2 --batch global --strategy fsdp --wrap Block examples/gpt.py --save gpt.pt
"""

import argparse
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CONTEXT = 32


class Characters(Dataset):
    """Pieces of a text, each with the piece that is one character further on."""

    def __init__(self, text):
        self.vocabulary = sorted(set(text))
        self.codes = torch.tensor([self.vocabulary.index(character) for character in text])

    def __len__(self):
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index):
        piece = self.codes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, width=64, depth=2, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, codes):
        x = self.tokens(codes) + self.positions(torch.arange(codes.shape[1], device=codes.device))
        return self.head(self.norm(self.blocks(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = Characters(Path(textwrap.__file__).read_text("utf-8"))
    model = GPT(len(dataset.vocabulary)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    for epoch in range(arguments.epochs):
        running = 0.0
        for codes, following in loader:
            logits = model(codes.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), following.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()  # after its backward, the mean of all ranks
        print(f"epoch {epoch + 1}: loss {running / len(loader):.3f}")
    if arguments.save:
        torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()
