"""Data, a model, and loops that evaluate it in the usual ways."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset


def samples(count, **options):
    """A loader of ``count`` samples with 3 classes, in double."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(count) % 3), **{"batch_size": 4, **options})


def model():
    torch.manual_seed(3)
    return nn.Linear(4, 3, dtype=torch.float64)


def by_own_counter(model, loader):
    correct = total = loss = 0
    with torch.no_grad():
        for x, y in loader:
            outputs = model(x)
            loss += F.cross_entropy(outputs, y, reduction="sum").item()
            correct += (outputs.argmax(1) == y).sum().item()
            total += y.size(0)
    return {"loss": loss / total, "accuracy": 100 * correct / total}


def close(expected, actual):
    """The same structure, types and values."""
    assert type(expected) is type(actual)
    if isinstance(expected, dict):
        expected, actual = list(expected.items()), list(actual.items())
    if isinstance(expected, (tuple, list)):
        assert len(expected) == len(actual)
        for one, other in zip(expected, actual, strict=True):
            close(one, other)
    elif isinstance(expected, torch.Tensor):
        assert expected.dtype == actual.dtype
        assert torch.allclose(expected, actual, rtol=1e-12, atol=1e-12)
    elif isinstance(expected, float):
        assert abs(expected - actual) <= 1e-12 * max(1, abs(expected))
    else:
        assert np.array_equal(expected, actual)


class OfVaryingSize(BatchSampler):
    def __iter__(self):
        yield from ([0, 5], [7], [1, 2, 3, 4, 6], [8])

    def __len__(self):
        return 4


class Stream(IterableDataset):
    def __init__(self, count, shuffles=False):
        self.count, self.shuffles = count, shuffles

    def __iter__(self):
        for at in range(self.count):
            yield torch.rand(1).item() if self.shuffles else float(at)
