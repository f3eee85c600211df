"""Data that the user splits, or has replicated, by hand."""

import io
import itertools
from contextlib import redirect_stderr

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import parwrap
from parwrap.errors import UsageError


@pytest.mark.ranks(2)
def test_a_part_is_of_the_kind_of_the_whole():
    rank = parwrap.rank()
    padded = [[0, 2, 4], [1, 3, 0]][rank]

    assert padded == parwrap.shard([0, 1, 2, 3, 4])
    assert tuple(padded) == parwrap.shard((0, 1, 2, 3, 4))
    assert padded == parwrap.shard(range(5))
    assert padded == list(parwrap.shard(iter(range(5))))
    assert torch.equal(torch.tensor(padded), parwrap.shard(torch.arange(5)))
    assert np.array_equal(np.array(padded), parwrap.shard(np.arange(5)))
    part = parwrap.shard(TensorDataset(torch.arange(5)))
    assert isinstance(part, Subset)
    assert padded == part.indices
    assert [[0, 2, 4], [1, 3]][rank] == parwrap.shard([0, 1, 2, 3, 4], uneven="join")
    assert [[0, 2], [1, 3]][rank] == parwrap.shard([0, 1, 2, 3, 4], uneven="drop")
    assert [rank, rank + 2] == list(itertools.islice(parwrap.shard(itertools.count()), 2))


@pytest.mark.ranks(2)
def test_of_a_table_rows_are_shared_out():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({0: range(5), 1: range(5, 10)}, index=[4, 3, 2, 1, 0])
    rows = [[0, 2, 4], [1, 3, 0]][parwrap.rank()]

    assert table.iloc[rows].equals(parwrap.shard(table))
    assert table[0].iloc[rows].equals(parwrap.shard(table[0]))


@pytest.mark.ranks(2)
def test_a_loader_of_a_part_is_this_ranks_own():
    with parwrap.distributed():
        loader = DataLoader(parwrap.shard(TensorDataset(torch.arange(6.0).view(-1, 1))), batch_size=2, shuffle=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            seen += x.flatten().tolist()

        assert [[0, 2, 4], [1, 3, 5]] == [sorted(each) for each in parwrap.gather(seen)]
        assert 2 == len(loader)


@pytest.mark.ranks(2)
def test_the_start_line_says_that_data_was_shared_out_by_hand():
    heard = io.StringIO()
    with redirect_stderr(heard), parwrap.distributed(seed=3):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in parwrap.shard(torch.ones(6, 1, 1)):
            model(x).sum().backward()
            optimizer.step()

    assert parwrap.rank() > 0 or heard.getvalue().endswith("ddp, batches dealt out, learning rate unchanged, 6 samples / 2 ranks, seed 3\n")


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ("text", r"cannot split a str: pass a sequence, .* for example sorted\(x\) or list\(x.items\(\)\)"),
        ({"a": 1}, "cannot split a dict"),
        ({1, 2}, "cannot split a set"),
        (3, "cannot split a int"),
        (torch.tensor(1), "cannot split a tensor or an array with 0 dimensions"),
        (np.array(1), "cannot split a tensor or an array with 0 dimensions"),
        (DataLoader(range(3)), ("does not take a DataLoader, because parwrap splits training loaders automatically")),
    ],
    ids=["str", "dict", "set", "int", "scalar", "array", "loader"],
)
def test_what_has_no_items_in_an_order_is_refused(x, text):
    with pytest.raises(UsageError, match=text):
        parwrap.shard(x)


def test_unknown_ways_are_refused():
    with pytest.raises(UsageError, match=r"uneven='fill' is not a valid value\. Choose one of: 'pad', 'drop', 'join'"):
        parwrap.shard([1], uneven="fill")
    with pytest.raises(UsageError, match="takes a DataLoader, not a list: data outside of loaders is the same on all ranks anyway"):
        parwrap.replicate([1])


class Numbers(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(6).tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dataset", [range(6), Numbers()], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_replicated_loader_is_the_same_on_every_rank_in_training_and_shuffled_anew(dataset, workers):
    shuffle = isinstance(dataset, range)
    loader = parwrap.replicate(DataLoader(dataset, batch_size=2, shuffle=shuffle, num_workers=workers))
    with parwrap.distributed():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        passes = []
        for _ in range(3):
            passes.append([])
            for batch in loader:
                optimizer.zero_grad()
                model(batch.float().view(-1, 1)).mean().backward()
                optimizer.step()
                passes[-1] += batch.tolist()
        first, second = parwrap.gather(passes)

    assert first == second
    assert [list(range(6))] * 3 == [sorted(each) for each in first]
    assert first[0] != first[1] or first[1] != first[2]
    assert not shuffle or 3 == len(loader)
