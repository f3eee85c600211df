"""The check that all ranks read the same data."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import parwrap
from parwrap.checks.same_data import data_digits, different_data, held_by
from parwrap.errors import RankMismatchError
from parwrap.places import Place
from training import Training

PARTS = ("shape", "order", "numbers", "texts")


def differing(one, other, seeds=(0, 0)):
    """Which parts of the digits of two loaders differ."""
    digits = [data_digits(loader, held_by(loader), seed) for loader, seed in zip((one, other), seeds, strict=True)]
    return {name for index, name in enumerate(PARTS) if digits[0][2 * index : 2 * index + 2] != digits[1][2 * index : 2 * index + 2]}


class Files(Dataset):
    def __init__(self, paths, labels=()):
        self.paths, self.labels = list(paths), list(labels)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return index


def of_tensor(*numbers):
    return TensorDataset(torch.tensor(numbers))


FORMS = [torch.Tensor.bfloat16, torch.Tensor.cfloat, torch.Tensor.numpy]
WEIGHTED = [1.0, 2.0], [2.0, 1.0]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (of_tensor(1, 2), of_tensor(1, 2), set()),
        (of_tensor(1, 2), of_tensor(2, 1), {"numbers"}),
        (of_tensor(1, 2), of_tensor(1, 2, 3), {"shape", "numbers"}),
        (of_tensor(1.0, float("nan")), of_tensor(1.0, float("nan")), set()),
        (Subset(range(9), [1, 2]), Subset(range(9), [2, 1]), {"order"}),
        (Subset(of_tensor(1, 2, 3), [1, 2]), Subset(of_tensor(1, 2, 4), [1, 2]), {"numbers"}),
        (Subset(range(9), np.array([1, 2])), Subset(range(9), np.array([2, 1])), {"order"}),
        (ConcatDataset([of_tensor(1), of_tensor(2)]), ConcatDataset([of_tensor(2), of_tensor(1)]), {"numbers"}),
        ([1, 2], [2, 1], {"numbers"}),
        (["a", "b"], ["b", "a"], {"texts"}),
        (Files(["a", "b"]), Files(["b", "a"]), {"texts"}),
        (Files(["a", "b"], [0, 1]), Files(["a", "b"], [1, 0]), {"numbers"}),
        (np.zeros(3), np.ones(3), {"numbers"}),
        (list(torch.arange(3.0)), list(torch.arange(3.0) + 1), {"numbers"}),
        ([(torch.ones(2), 0), (torch.ones(2), 1)], [(torch.ones(2), 1), (torch.ones(2), 0)], {"numbers"}),
        ([("a", 0), ("b", 1)], [("b", 0), ("a", 1)], {"texts"}),
        ([{"x": 1}], [{"x": 1}], set()),
        (of_tensor(1 + 2j), of_tensor(1 + 2j), set()),
        (TensorDataset(torch.ones(2, dtype=torch.cfloat).conj()), TensorDataset(torch.ones(2, dtype=torch.cfloat).conj()), set()),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t(), set()),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t() + 1, {"numbers"}),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T + 1, {"numbers"}),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), set()),
        (torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse(), set()),
        (torch.arange(10**6), torch.arange(10**6), set()),
        *(([form(torch.zeros(0, 2))], [form(torch.zeros(0, 2))], set()) for form in FORMS),
        *(([form(torch.tensor(1))], [form(torch.tensor(2))], {"numbers"}) for form in FORMS),
        *(([form(torch.arange(6))], [form(torch.arange(6).view(2, 3))], {"numbers"}) for form in FORMS),
        *(([form(torch.arange(6).view(2, 3).t())], [form(torch.arange(6).view(3, 2))], {"numbers"}) for form in FORMS),
    ],
)
def test_what_of_a_dataset_is_compared(one, other, expected):
    assert expected == differing(DataLoader(one), DataLoader(other))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"batch_size": 1}, {"batch_size": 2}, {"shape"}),
        ({"drop_last": False}, {"drop_last": True}, {"shape"}),
        ({"shuffle": False}, {"shuffle": True}, {"shape"}),
        ({"sampler": WeightedRandomSampler(WEIGHTED[0], 2)}, {"sampler": WeightedRandomSampler(WEIGHTED[1], 2)}, {"order"}),
        ({"sampler": SubsetRandomSampler([0, 1])}, {"sampler": SubsetRandomSampler([1, 0])}, {"order"}),
        ({"batch_sampler": [[0], [1]]}, {"batch_sampler": [[1], [0]]}, {"order"}),
    ],
)
def test_what_of_a_loader_is_compared(one, other, expected):
    assert expected == differing(DataLoader([3, 4], **one), DataLoader([3, 4], **other))


def test_seeds_are_compared():
    loader = DataLoader([3, 4])

    assert {"order"} == differing(loader, loader, seeds=(0, 1))


def test_digits_fit_in_half_a_float16():
    loader = DataLoader(torch.arange(9))
    digits = data_digits(loader, held_by(loader), 3)

    assert 8 == len(digits)
    assert all(0 <= digit < 251 for digit in digits)


@pytest.mark.parametrize(
    ("differ", "text"),
    [
        ({0, 2}, "datasets of different lengths, .* or a share on some ranks"),
        ({1}, "the samples in different orders: .* one pass more"),
        ({2, 3}, "different numbers at the same places of the dataset"),
    ],
)
def test_the_error_names_the_worst(differ, text):
    with pytest.raises(RankMismatchError, match=rf"the ranks have read {text}.* in the pass at train.py:3\. .*parwrap.same_draws\(\)"):
        different_data(differ, Place("train.py", 3))


def test_the_error_names_a_pass_around_that_chooses_what_is_read():
    with pytest.raises(
        RankMismatchError, match=r"in the pass at train.py:3\. .*training pass at train.py:2, .*parwrap.replicate\(loader\)"
    ):
        different_data({1}, Place("train.py", 3), Place("train.py", 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((range(10), range(12)), "datasets of different lengths"),
        ((Subset(range(10), [9, 2, 6, 8]), Subset(range(10), [3, 1, 4, 5])), "the samples in different orders"),
        ((torch.ones(4), torch.zeros(4)), "different numbers"),
    ],
    ids=["lengths", "splits", "numbers"],
)
def test_ranks_that_hold_different_data_stop_at_the_first_backward(data, text):
    with pytest.raises(RankMismatchError, match=f"the ranks have read {text}.* in the pass at training.py"), parwrap.distributed():
        Training().train(DataLoader(data[parwrap.rank()], batch_size=2))


def train_on(loader, training, passes):
    for _ in range(passes):
        training.train(loader)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", [1, 2, 9], ids=["after its first pass", "after its second", "later"])
@pytest.mark.parametrize("kind", ["a tensor", "an attribute"])
def test_a_dataset_that_the_script_changes_in_a_pass_is_compared_again(kind, passes):
    """For example samples that are left out, or labels that are set, by the losses of this rank's share."""
    dataset = torch.arange(8.0) if kind == "a tensor" else Files([""] * 8)
    with parwrap.distributed():
        training, loader = Training(), DataLoader(dataset, batch_size=1)
        train_on(loader, training, passes)
        if kind == "a tensor":
            dataset[4] = parwrap.rank()
        else:
            dataset.labels = [parwrap.rank()]
        with pytest.raises(RankMismatchError, match="different numbers at the same places"):
            train_on(loader, training, passes=9)  # within 32 backwards


@pytest.mark.ranks(2)
def test_a_split_drawn_apart_is_found():
    own = torch.randperm(10, generator=torch.Generator().manual_seed(parwrap.rank()))
    with pytest.raises(RankMismatchError, match="a split, a permutation, the seed or the epoch differs"), parwrap.distributed():
        Training().train(DataLoader(Subset(range(10), own[:6]), batch_size=2, shuffle=True))


@pytest.mark.ranks(2)
def test_folds_drawn_apart_are_found():
    own = torch.randperm(10, generator=torch.Generator().manual_seed(parwrap.rank())).tolist()
    with pytest.raises(RankMismatchError, match="a split, a permutation, the seed or the epoch differs"), parwrap.distributed():
        Training().train(DataLoader(range(10), batch_size=2, sampler=SubsetRandomSampler(own[:6])))


@pytest.mark.ranks(2)
def test_different_texts_are_a_warning():
    paths = ["b", "a"] if parwrap.rank() else ["a", "b"]
    with (
        parwrap.distributed(),
        pytest.warns(
            UserWarning,
            match=r"parwrap: training.py:\d+ reads datasets that hold different texts or paths on different ranks. If these do not name "
            r"the same samples in the same order, sort them: sorted\(os.listdir\(folder\)\).",
        ),
    ):
        Training().train(DataLoader(Files(paths)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("apart", [0, 1])
def test_all_loaders_that_are_zipped_are_compared(apart):
    data = [torch.arange(8.0), torch.arange(8.0)]
    data[apart] += parwrap.rank()
    with pytest.raises(RankMismatchError, match="different numbers at the same places"):
        train_on_zipped(*data)


def train_on_zipped(*data):
    with parwrap.distributed():
        training = Training()
        for _ in zip(*map(DataLoader, data), strict=True):
            training.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("draws", ["by_pass", "per_rank"])
def test_a_whole_pass_that_trains_on_different_data_is_an_error_unless_ranks_draw_their_own(draws):
    """For example a loop over the hardest samples of this rank's share."""
    found = pytest.raises(
        RankMismatchError, match="come from numbers of a training pass, such as each sample's loss, a rank has only those of its share"
    )
    with parwrap.distributed(draws=draws), found if draws == "by_pass" else nullcontext():
        training = Training()
        training.train(DataLoader(range(8), batch_size=2))
        for batch in DataLoader(Subset(range(8), [parwrap.rank(), 2])):
            training.step(batch)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_the_same_data_and_whole_passes_over_different_data_are_nothing_to_say():
    with parwrap.distributed():
        training = Training()
        for _ in range(2):
            training.train(DataLoader(Files(["a", "b"], [1, 2]), shuffle=True))
            with torch.no_grad(), warnings.catch_warnings():
                for _ in DataLoader(range(4 + parwrap.rank())):
                    pass
