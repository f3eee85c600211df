"""Summaries are the same for the same data and differ for other data, other order and other shape."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

from parwrap.data.dataset_summaries import Held, held_by, items_of, summary

rng = np.random.default_rng(0)
LARGE = rng.random((300, 1000))
PAIRS = [(f"{number}.png", number % 3) for number in range(1000)]


def of(value):
    return summary(Held(None, "value", value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PAIRS, PAIRS[::-1]),
        (["a", "b"], ["a", "c"]),
        ([1, 2], [1, 2, 3]),
        ([1], ["1"]),
        (LARGE, LARGE[::-1]),
        (LARGE, LARGE[rng.permutation(300)]),
        (LARGE, LARGE.astype(np.float32)),
        (LARGE.T, LARGE.T[::-1]),
        (torch.tensor(LARGE), torch.tensor(LARGE).flip(0)),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)),
        ((torch.ones(3), torch.zeros(3)), (torch.zeros(3), torch.ones(3))),
        ({"a": 0, "b": 1}, {"a": 1, "b": 0}),
        ([Path("a")], [Path("b")]),
        (np.array(["a", "b"], dtype=object), np.array(["b", "a"], dtype=object)),
        ([None, 1.0], [1.0, None]),
    ],
)
def test_other_data_has_another_summary_and_the_same_data_the_same(one, other):
    import copy

    assert of(copy.deepcopy(one)) == of(one)
    assert None is not of(one) != of(other) is not None


@pytest.mark.parametrize("value", [[object()], [[[[[[[0]]]]]]], torch.eye(2).to_sparse()])
def test_what_cannot_be_looked_into_has_none(value):
    assert of(value) is None
    assert items_of(value, 1000) is None


def test_every_index_of_a_subset_counts():
    indices = list(range(100_000))
    other = [*indices[:77], 5, *indices[78:]]

    assert summary(Held(Subset([], indices), "indices", indices)) != summary(Held(Subset([], other), "indices", other))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (PAIRS, PAIRS[::-1], (True, True)),
        (PAIRS, [(name, 2 - label) for name, label in PAIRS], (True, False)),
        (LARGE, LARGE[::-1], (True, True)),
        (LARGE, LARGE + 1, (True, False)),
        (torch.arange(10), torch.arange(10).flip(0), (True, True)),
        ({"a": 0, "b": 1}, {"b": 0, "a": 1}, (True, True)),
        (["a"], ["b"], (False, True)),
    ],
)
def test_items_are_the_same_in_any_order(one, other, alike):
    one, other = items_of(one, 10**8), items_of(other, 10**8)

    assert alike == (one.strings == other.strings, one.numbers == other.numbers)


def test_too_much_is_not_read():
    assert items_of(LARGE, LARGE.nbytes // 2) is None
    assert items_of(LARGE, LARGE.nbytes * 2).octets >= LARGE.nbytes


class Transformed(Dataset):
    def __init__(self, subset):
        self.subset, self.names, self.root = subset, ["a", "b"], "folder"

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, index):
        return self.subset[index]


def test_datasets_inside_of_others_and_samplers_are_found():
    loader = DataLoader(Transformed(Subset(TensorDataset(torch.ones(4)), [0, 1])), batch_size=2, sampler=SubsetRandomSampler([1, 0]))
    found = [(type(held.holder).__name__, held.name, held.orders) for each in held_by(loader) for held in each]

    assert [
        ("Transformed", "names", False),
        ("SubsetRandomSampler", "indices", True),
        ("Subset", "indices", True),
        ("TensorDataset", "tensors", False),
    ] == found
