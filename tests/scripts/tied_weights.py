"""One tensor used twice: a language model whose output layer is its embedding."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

text = "the quick brown fox jumps over the lazy dog. " * 40
chars = sorted(set(text))
stoi = {ch: i for i, ch in enumerate(chars)}
block_size = 8


class CharModel(nn.Module):
    def __init__(self, vocab_size, n_embd=24, n_hidden=64):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.mlp = nn.Sequential(nn.Linear(block_size * n_embd, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_embd))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # weight tying, https://paperswithcode.com/method/weight-tying

    def forward(self, idx, targets=None):
        x = self.mlp(self.wte(idx).flatten(1))
        logits = self.lm_head(x)
        loss = None if targets is None else nn.functional.cross_entropy(logits, targets)
        return logits, loss


def main():
    torch.manual_seed(1337)
    data = torch.tensor([stoi[ch] for ch in text])
    windows = data.unfold(0, block_size + 1, 1)
    dataset = TensorDataset(windows[:, :-1], windows[:, -1])

    model = CharModel(len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for xb, yb in DataLoader(dataset, batch_size=32, shuffle=True):
            _, loss = model(xb, yb)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        logits, _ = model(windows[:, :-1])
    print(f"accuracy {(logits.argmax(-1) == windows[:, -1]).float().mean():.4f}")
    return model


if __name__ == "__main__":
    model = main()
