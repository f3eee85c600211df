"""``iter(loader)`` inside the decorators is like torch's own iterator: its length, its attributes, and reading on after an error."""

import io
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

import parwrap


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Broken(Dataset):
    """16 samples, of which two cannot be read: one in the share of each rank."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index in (4, 5):
            raise OSError("no such sample")
        return torch.tensor([float(index)])


def read(loader, optimizer):
    """What a loop reads that uses the iterator itself, as on one process."""
    batches, seen, errors = iter(loader), [], 0
    length = len(batches)
    for _ in range(length):
        try:
            x = next(batches)
        except OSError:
            errors += 1
            continue
        seen.append(len(x))
        optimizer.param_groups[0]["params"][0].mul(x).mean().backward()
        optimizer.step()
    assert next(batches, None) is None
    assert batches._num_workers == 0  # after the end too
    return length, seen, errors


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "options"), [("", {}), ("explain", {}), ("progress", {}), ("amp", {"dtype": "bf16"}), ("accumulate", {"steps": 2})]
)
def test_an_iterator_has_length_and_attributes_and_reads_on_after_an_error(name, options, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())  # for the bar
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    alone = read(DataLoader(Broken(), batch_size=4), optimizer)

    decorator = getattr(parwrap, name) if name else nullcontext
    with parwrap.distributed(), decorator(**options):
        shared = read(DataLoader(Broken(), batch_size=2), optimizer)

    assert shared == (4, [2, 2, 2], 1)
    assert alone == (4, [4, 4, 4], 1)
    assert ("epoch 1" in terminal.getvalue()) is (name == "progress" and parwrap.rank() == 0)


class BrokenStream(IterableDataset):
    """16 samples, of which one cannot be read; unlike that of a generator, its iterator goes on."""

    def __iter__(self):
        return Numbers()


class Numbers:
    def __init__(self):
        self.at = -1

    def __next__(self):
        self.at += 1
        if self.at == 16:
            raise StopIteration
        if self.at == 4:
            raise OSError("no such sample")
        return torch.tensor([float(self.at)])


def read_numbers(loader):
    """Every number that can be read, by a loop that uses the iterator itself and goes on after an error."""
    batches, seen = iter(loader), []
    for _ in range(20 if isinstance(loader.dataset, IterableDataset) else len(batches)):
        try:
            seen += [x.flatten() for x in [next(batches, None)] if x is not None]
        except OSError:
            continue
    assert batches._num_workers == 0
    assert next(batches, None) is None
    return torch.cat(seen)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("data", "batch_size"), [(Broken(), 2), (Broken(), 1), (BrokenStream(), 1)])
def test_an_iterator_in_an_evaluation_has_a_length_and_reads_on_after_an_error(data, batch_size, check):
    loader = DataLoader(data, batch_size)
    with parwrap.distributed():
        evaluated = parwrap.evaluate(reduce="gather", check=check)(read_numbers)(loader)

    assert read_numbers(loader).tolist() == evaluated.tolist()
