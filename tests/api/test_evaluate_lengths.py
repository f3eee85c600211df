"""The lengths that a divided evaluation sees."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from tqdm import tqdm

import parwrap
import parwrap.coordination.sync_points
from evaluations import Stream
from parwrap.errors import UsageError

pytestmark = pytest.mark.usefixtures("nothing_is_warned_of")


@pytest.mark.ranks(3)
def test_several_loaders_in_one_function():
    def counts(*loaders):
        return [sum(len(x) for x in loader) for loader in loaders]

    sums = parwrap.evaluate(reduce="sum")(counts)
    with parwrap.distributed():
        assert [20, 9] == sums(DataLoader(range(20)), DataLoader(range(9)))
        assert [2, 20] == sums(DataLoader(range(2)), DataLoader(range(20)))  # rank 2 stands in for both
        assert [0, 20] == sums(DataLoader([]), DataLoader(range(20)))
        with pytest.raises(
            UsageError, match=r"reads a DataLoader of 2 batches on 3 ranks after a larger one.*read the smallest loader first"
        ):
            sums(DataLoader(range(20)), DataLoader(range(2)))


@pytest.mark.ranks(2)
def test_the_length_of_a_list_is_that_of_the_part_too():
    @parwrap.evaluate
    def mean(loader):
        assert list(loader.dataset) == list(range(9))
        return sum(x.sum().item() for x in loader) / len(loader.dataset)

    @parwrap.evaluate
    def by_name():
        return sum(x.sum().item() for x in DataLoader(data, batch_size=2)) / len(data)

    @parwrap.evaluate
    def of_a_variable():
        numbers = list(range(9))
        return sum(x.sum().item() for x in DataLoader(numbers, batch_size=2)) / len(numbers)

    @parwrap.evaluate
    def of_the_tensors():
        return sum(x.sum().item() for (x,) in DataLoader(TensorDataset(tensor), batch_size=2)) / len(tensor)

    @parwrap.evaluate
    def by_sampler(loader):
        return sum(x.sum().item() for x in loader) / len(loader.sampler)

    data, tensor = list(range(9)), torch.arange(9)
    with parwrap.distributed():
        assert 3.0 == by_sampler(DataLoader(data, batch_size=2, sampler=[1, 3, 5]))
        assert [4.0] * 3 == [mean(DataLoader(each, batch_size=2)) for each in (data, range(9), torch.arange(9))]
        for asks, kind in [(by_name, "list"), (of_a_variable, "list"), (of_the_tensors, "Tensor")]:
            with pytest.raises(UsageError, match=rf"the length of a dataset that is a {kind}, which counts all samples, but"):
                asks()


class WithTheNext(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return float(index), float((index + 1) % len(self))


class InOrder(Sampler):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        return iter(range(len(self.dataset)))


class OfKnownLength(Stream):
    def __len__(self):
        return 9

    def __iter__(self):
        return map(float, range(len(self)))


@pytest.mark.ranks(2)
def test_datasets_and_samplers_that_ask_for_a_length_while_they_are_read_see_the_whole():
    def by_length(loader):
        return sum(following.sum().item() for _, following in loader) / len(loader.dataset)

    def by_count(loader):
        seen = [x for batch in loader for x in batch.tolist()]
        return sum(seen) / len(seen)

    data = WithTheNext()
    with parwrap.distributed():
        for options in (
            {},
            {"shuffle": True},
            {"num_workers": 1},
            {"sampler": InOrder(data)},
            {"sampler": InOrder(data), "num_workers": 1},
        ):
            assert 4.0 == parwrap.evaluate(by_length)(DataLoader(data, batch_size=2, **options))
        assert 4.0 == parwrap.evaluate(by_count)(DataLoader(OfKnownLength(9), batch_size=2))


@pytest.mark.ranks(2)
def test_what_is_filled_in_by_length_is_gathered_once():
    def filled(loader):
        outputs, at = np.zeros(len(loader.dataset)), 0
        for x in loader:
            outputs[at : at + len(x)], at = x, at + len(x)
        return {"outputs": outputs}

    loader = DataLoader(range(9), batch_size=2)
    with parwrap.distributed():
        assert list(range(9)) == parwrap.evaluate(reduce="gather")(filled)(loader)["outputs"].tolist()
        with pytest.raises(
            UsageError, match=r"\['outputs'\] has 9 rows on each rank, as many as there are samples on all ranks together. It seems to be"
        ):
            parwrap.evaluate(reduce=({"outputs": "gather"}, sum))(lambda loader: (filled(loader), 1))(loader)


class Squares(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return float(index)


@pytest.mark.ranks(2)
def test_the_length_of_a_dataset_that_is_asked_for_by_name_and_only_inside():
    data = Squares()
    loaders = {"test": DataLoader(data, batch_size=2)}

    @parwrap.evaluate
    def mean():
        size = len(data)
        return sum(x.sum().item() for x in loaders["test"]) / size

    with parwrap.distributed():
        assert [4.0, 9] == [mean(), len(data)]


@pytest.mark.ranks(2)
def test_the_mean_of_batch_means_is_warned_of_where_batches_differ():
    @parwrap.evaluate(check=False)
    def loss(loader):
        return sum(x.mean().item() for x in loader) / len(loader)

    data = torch.arange(8.0)
    with parwrap.distributed():
        assert 3.5 == loss(DataLoader(data, batch_size=2))
        with pytest.warns(
            UserWarning, match=r"the function asked for the number of batches \(.*test_evaluate_lengths.py:\d+\), which is smaller on one"
        ):
            loss(DataLoader(data, batch_size=3))
        with pytest.warns(UserWarning, match=r"the function asked for the length of a dataset .*which is 8, but a pass reads 6 samples"):
            parwrap.evaluate(check=False)(by_length)(DataLoader(data, batch_size=3, drop_last=True))


@pytest.mark.ranks(2)
def test_lengths_are_the_parts_for_each_entry_unless_one_is_a_sum():
    def evaluate(loader):
        seen = torch.cat(list(loader))
        return {"mean": seen.sum().item() / len(loader.dataset), "seen": seen, "count": float(len(seen))}

    loader = DataLoader(torch.arange(8), batch_size=2)
    with parwrap.distributed():
        exact = parwrap.evaluate(reduce={"mean": "mean", "seen": "gather", "count": "mean"}, check=False)(evaluate)(loader)
        with pytest.warns(
            UserWarning,
            match=r"the function asked for a length \(.*\)\. It is the length of all the data, because an entry of reduce is 'sum' or a",
        ):
            parwrap.evaluate(reduce={"mean": "mean", "seen": "gather", "count": "sum"}, check=False)(evaluate)(loader)

    assert [3.5, list(range(8))] == [exact["mean"], exact["seen"].tolist()]


def by_length(loader):
    return sum(x.sum().item() for x in loader) / len(loader.dataset)


@pytest.mark.ranks(2)
def test_a_bar_shows_the_part_and_lengths_are_whole_for_a_sum():
    @parwrap.evaluate(reduce="sum", check=False)
    def count(loader):
        bar = tqdm(loader, disable=True)
        return len(list(bar)), [bar.total], len(loader) + len(loader.dataset)

    with parwrap.distributed():
        assert (10, [10], 40) == count(DataLoader(range(10)))
