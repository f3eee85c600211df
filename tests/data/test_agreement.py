"""Data that differs between ranks: rank 0's is used where that is safe, and a warning names it otherwise."""

import os
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import parwrap
from parwrap.data import dataset_agreement
from parwrap.errors import RankMismatchError
from parwrap.group.group import Group


class Setup:
    """A model and optimizer, so that there is something to train."""

    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self, loader):
        """The batches of a pass that trains."""
        seen = []
        for batch in loader:
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 1)).sum().backward()
            self.optimizer.step()
            seen.append(batch)
        return seen


def everyones(batches):
    return sorted(sample for each in parwrap.gather([sample for batch in batches for sample in batch.tolist()]) for sample in each)


def own_rng():
    """What ``np.random.default_rng()`` is to a rank: its own."""
    return np.random.default_rng(parwrap.rank())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_subset_of_a_fresh_permutation_in_each_epoch_is_rank_zeros(batch):
    rng, reference = own_rng(), np.random.default_rng(0)
    with parwrap.distributed(batch=batch):
        setup = Setup()
        for _ in range(3):
            loader = DataLoader(Subset(range(100), rng.permutation(100)[:10]), batch_size=2)
            with pytest.warns(UserWarning, match=r"the indices of a Subset differ between ranks, so all ranks use rank 0's"):
                seen = everyones(setup.train(loader))

            assert sorted(reference.permutation(100)[:10].tolist()) == seen


@pytest.mark.ranks(3)
def test_nested_subsets_each_get_rank_zeros_indices():
    outer, inner = own_rng().permutation(9)[:6].tolist(), own_rng().permutation(20)[:9].tolist()
    expected = sorted(parwrap.broadcast([inner[index] for index in outer]))
    with parwrap.distributed(), pytest.warns(UserWarning, match="indices of a Subset differ"):
        seen = everyones(Setup().train(DataLoader(Subset(Subset(range(20), inner), outer), shuffle=True)))

    assert expected == seen


@pytest.mark.ranks(2)
def test_a_subset_whose_indices_are_drawn_anew_for_the_same_loader_is_compared_anew():
    rng, reference = own_rng(), np.random.default_rng(0)
    with parwrap.distributed():
        setup, subset = Setup(), Subset(range(100), list(range(10)))
        loader = DataLoader(subset, batch_size=2)
        assert list(range(10)) == everyones(setup.train(loader))
        for _ in range(3):
            subset.indices = rng.permutation(100)[:10]
            with pytest.warns(UserWarning, match="indices of a Subset differ"):
                seen = everyones(setup.train(loader))
            assert sorted(reference.permutation(100)[:10].tolist()) == seen
        subset.indices = list(range(10))
        setup.train(loader)
        rng.shuffle(subset.indices)  # in place: the same list as before
        with pytest.warns(UserWarning, match="indices of a Subset differ"):
            setup.train(loader)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batched", [False, True])
def test_sampler_indices_that_differ_are_rank_zeros(batched):
    indices = own_rng().permutation(100)[: 12 + 2 * parwrap.rank()].tolist()
    expected = sorted(parwrap.broadcast(indices))
    with parwrap.distributed():
        sampler = SubsetRandomSampler(indices)
        options = {"batch_sampler": BatchSampler(sampler, 2, False)} if batched else {"sampler": sampler, "batch_size": 2}
        setup, loader = Setup(), DataLoader(range(100), **options)
        with pytest.warns(UserWarning, match="the indices of a SubsetRandomSampler differ between ranks, so all ranks use rank 0's"):
            assert expected == everyones(setup.train(loader))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert expected == everyones(setup.train(loader))


@pytest.mark.ranks(2)
def test_weights_of_a_sampler_that_differ_are_rank_zeros():
    weights = torch.zeros(10)
    weights[: 2 + 3 * parwrap.rank()] = 1
    with parwrap.distributed(), pytest.warns(UserWarning, match="the weights of a WeightedRandomSampler differ"):
        seen = everyones(Setup().train(DataLoader(range(10), sampler=WeightedRandomSampler(weights, 20))))

    assert {0, 1} == set(seen)


class OwnOrder(Sampler):
    """Draws from a generator that nobody has seeded."""

    def __init__(self, samples, seed):
        self.samples, self.rng = samples, np.random.default_rng(seed)

    def __iter__(self):
        while True:
            yield from self.rng.permutation(self.samples).tolist()
            if not self.endless:
                return

    endless = False


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_draws_that_differ_are_rank_zeros_in_every_pass(workers):
    with parwrap.distributed():
        setup = Setup()
        loader = DataLoader(range(12), batch_size=2, sampler=OwnOrder(12, parwrap.rank()), num_workers=workers)
        with pytest.warns(UserWarning, match="a OwnOrder draws different samples on different ranks, so all ranks use rank 0's"):
            assert list(range(12)) == everyones(setup.train(loader))
        reference = np.random.default_rng(0)
        reference.permutation(12)
        mine = [sample for batch in setup.train(loader) for sample in batch.tolist()]
        batches = np.split(reference.permutation(12), 6)[parwrap.rank() :: 2]

        assert np.concatenate(batches).tolist() == mine


@pytest.mark.ranks(2)
def test_draws_without_end_that_differ_are_refused():
    dataset_agreement.MOST_DRAWS = 100
    with parwrap.distributed():
        sampler = OwnOrder(12, parwrap.rank())
        sampler.endless = True
        with (
            pytest.warns(UserWarning, match="draws different samples"),
            pytest.raises(RankMismatchError, match=r"is endless, so rank 0's cannot be sent to the others\. Seed its generator"),
        ):
            Setup().train(DataLoader(range(12), sampler=sampler))


class Files(Dataset):
    """As people write it: files in the order in which the disk gives them, classes numbered in that order."""

    def __init__(self, root):
        self.classes = os.listdir(root)
        self.number = {name: number for number, name in enumerate(self.classes)}
        self.files = [os.path.join(root, name, file) for name in self.classes for file in os.listdir(os.path.join(root, name))]
        self.labels = torch.tensor([self.number[os.path.basename(os.path.dirname(file))] for file in self.files])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return int(os.path.basename(self.files[index])), self.labels[index]


@pytest.mark.ranks(2)
def test_files_in_another_order_are_in_rank_zeros_with_all_that_goes_by_it(tmp_path):
    for label, name in enumerate("abc"):
        (tmp_path / name).mkdir(exist_ok=True)
        for number in range(label + 2):
            (tmp_path / name / str(10 * label + number)).touch()
    listed = os.listdir
    ordered = {0: sorted, 1: lambda names: sorted(names, reverse=True)}[parwrap.rank()]
    with mock.patch("os.listdir", lambda path: ordered(listed(path))):
        dataset = Files(str(tmp_path))
    with parwrap.distributed(), pytest.warns(UserWarning, match="different orders") as said:
        seen = Setup().train(DataLoader(dataset, batch_size=1, shuffle=True))
    together = [(number.item(), label.item()) for each in parwrap.gather(seen) for number, label in each]

    assert {(10 * label + number, label) for label in range(3) for number in range(label + 2)} == set(together)
    assert 10 == len(together)
    expected = (
        "parwrap: the ranks have the same items in different orders in the classes of a Files and the number of a Files and the files of "
        "a Files and the labels of a Files, so all ranks use rank 0's order. os.listdir and glob return files in any order: sort them."
    )
    assert [expected] == [str(warning.message) for warning in said]
    assert [0, 0, 1, 1, 1, 2, 2, 2, 2] == dataset.labels.tolist()


class Cached(Dataset):
    def __init__(self, names, cache):
        self.names, self.cache = names, cache

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return index


class Opaque:
    pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cache", [[Opaque(), Opaque()], [torch.eye(2).to_sparse()] * 2], ids=["objects", "sparse"])
def test_an_order_is_not_changed_if_something_as_long_would_be_left_in_the_old_one(cache):
    names = ["a", "b"] if parwrap.rank() == 0 else ["b", "a"]
    dataset = Cached(list(names), cache)
    with (
        parwrap.distributed(),
        pytest.warns(UserWarning, match="different data of the same length in the names of a Cached: each rank trains"),
    ):
        Setup().train(DataLoader(dataset))

    assert names == dataset.names


@pytest.mark.ranks(2)
def test_a_list_of_pairs_in_another_order_is_in_rank_zeros():
    pairs = [(number, -number) for number in own_rng().permutation(10).tolist()]
    with parwrap.distributed(), pytest.warns(UserWarning, match="the same items in different orders in a list, so all ranks use rank 0's"):
        seen = Setup().train(DataLoader(pairs, batch_size=1))

    assert list(range(10)) == everyones([first for first, _ in seen])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("samples", [20, 200_000])
def test_other_data_of_the_same_length_is_named(samples):
    dataset = TensorDataset(torch.tensor(own_rng().normal(size=(samples, 4))), torch.zeros(samples))
    before = dataset.tensors[0].clone()
    expected = "different data of the same length in the tensors of a TensorDataset: each rank trains on its own data"
    with parwrap.distributed(), pytest.warns(UserWarning, match=expected) as said:
        Setup().train(DataLoader(dataset, batch_size=samples))

    assert 1 == len(said)
    assert torch.equal(before, dataset.tensors[0])


@pytest.mark.ranks(2)
def test_tensors_shuffled_by_rank_are_in_rank_zeros_order():
    order = own_rng().permutation(10)
    dataset = TensorDataset(torch.arange(10)[order], 2 * torch.arange(10)[order])
    with parwrap.distributed(), pytest.warns(UserWarning, match="the same items in different orders"):
        seen = Setup().train(DataLoader(dataset, batch_size=2))

    assert all(torch.equal(2 * one, other) for one, other in seen)
    assert list(range(10)) == everyones([one for one, _ in seen])


@pytest.mark.ranks(2)
def test_the_same_data_is_compared_once_and_nothing_is_said():
    met, exchange = [], Group.exchange

    def counted(group, topic, value):
        met.append(topic)
        return exchange(group, topic, value)

    with mock.patch.object(Group, "exchange", counted), parwrap.distributed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        setup = Setup()
        subset = Subset(TensorDataset(torch.arange(30)), list(range(20)))
        loaders = [DataLoader(subset, batch_size=5, shuffle=True), DataLoader(range(12), sampler=SubsetRandomSampler(range(4, 12)))]
        for loader in loaders:
            setup.train(loader)
        assert {"training loader", "first draws of a sampler"} < set(met)
        met.clear()
        for loader in loaders * 3:
            setup.train(loader)

    assert {"its first backward pass here"} >= set(met)


@pytest.mark.ranks(2)
def test_large_lists_go_in_pieces_and_do_not_stay_in_the_store():
    dataset_agreement.PIECE = 100
    keys = parwrap.group.group.current().store.num_keys()
    value = list(range(1000))

    assert value == dataset_agreement._from_first(parwrap.group.group.current(), [0, 1], value if parwrap.rank() == 0 else None)
    parwrap.barrier()
    assert parwrap.group.group.current().store.num_keys() - keys < 10
