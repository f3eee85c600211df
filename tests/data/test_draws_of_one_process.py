"""With ``batch="global"``, loaders draw what they draw in one process, in the same order."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap


def read(first, second, model):
    """Two shuffled loaders that are zipped, then one that is looked through; and a number drawn at the end."""
    torch.manual_seed(5)
    batches = []
    for (x,), (y,) in zip(first, second, strict=True):
        model((x + y).float()).sum().backward()
        batches.append([*x.flatten().tolist(), *y.flatten().tolist()])
    with torch.no_grad():
        looked = [x.flatten().tolist() for (x,) in first]
    return batches, looked, torch.rand(1).item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_zipped_loaders_read_what_they_read_in_one_process(workers):
    data = TensorDataset(torch.arange(12)[:, None])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = read(*(DataLoader(data, batch_size=4, shuffle=True, num_workers=workers) for _ in range(2)), model)

    @parwrap.distributed(batch="global")
    def run():
        assert optimizer
        return read(*(DataLoader(data, batch_size=4, shuffle=True, num_workers=workers) for _ in range(2)), model)

    batches, looked, drawn = run()
    parts = parwrap.gather(batches)
    together = [[*a[:2], *b[:2], *a[2:], *b[2:]] for a, b in zip(*parts, strict=True)]

    assert (expected[0], expected[1], expected[2]) == (together, looked, drawn)
