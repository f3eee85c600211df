"""Which package of Python's standard library is a function from: a transformer encoder reads its source, written for one device.

The functions differ much in length, and every sample is padded to the longest.
"""

import argparse
import ast
import re
import sysconfig
import time
import tokenize
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

PACKAGES = ["asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml"]
PADDING, UNKNOWN = 0, 1


def functions(package):
    """The words of each function in the sources of a package."""
    for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        with tokenize.open(path) as file:
            source = file.read()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield re.findall(r"[a-z]+|[A-Z][a-z]*|\d|[^\sA-Za-z\d]", "\n".join(lines[node.lineno - 1 : node.end_lineno]))


def read_dataset(longest, vocabulary, most):
    """Words as numbers, in rows that are padded to ``longest``, and the number of the package, which gives ``most`` functions."""
    samples = [(words[:longest], label) for label, package in enumerate(PACKAGES) for words in islice(functions(package), most)]
    counts = Counter(word for words, _ in samples for word in words)
    numbers = {word: UNKNOWN + 1 + i for i, (word, _) in enumerate(counts.most_common(vocabulary - 2))}
    texts = torch.full((len(samples), longest), PADDING)
    for text, (words, _) in zip(texts, samples, strict=True):
        text[: len(words)] = torch.tensor([numbers.get(word, UNKNOWN) for word in words])
    return TensorDataset(texts, torch.tensor([label for _, label in samples]))


class Classifier(nn.Module):
    def __init__(self, vocabulary, longest, width, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.position = nn.Parameter(torch.randn(longest, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, texts):
        padding = texts == PADDING
        x = self.embed(texts) + self.position[: texts.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(2), 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


@torch.no_grad()
def accuracy_of(model, loader):
    model.eval()
    correct = sum((model(texts).argmax(1) == labels).sum().item() for texts, labels in loader)
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the functions")
    parser.add_argument("--until", type=float, default=1.0, help="accuracy at which to stop")
    parser.add_argument("--functions", type=int, default=300, help="the most of a package")
    parser.add_argument("--batch-size", type=int, default=16, help="functions per step")
    parser.add_argument("--longest", type=int, default=256, help="words of a function that are read")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()

    vocabulary = 4096
    dataset = read_dataset(args.longest, vocabulary, args.functions)
    torch.manual_seed(args.seed)
    train_set, held_out = random_split(dataset, [0.85, 0.15])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(held_out, batch_size=64)

    model = Classifier(vocabulary, args.longest, width=32, layers=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    begin = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        model.train()
        tokens = padding = 0
        for texts, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(texts), labels)
            loss.backward()
            optimizer.step()
            tokens, padding = tokens + texts.numel(), padding + (texts == PADDING).sum().item()
        accuracy = accuracy_of(model, test_loader)
        seconds = time.perf_counter() - begin
        print(f"epoch {epoch}  {seconds:.1f} s  padding {padding / tokens:.3f}  test accuracy {accuracy:.4f}")
        if accuracy >= args.until:
            break
    print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
