"""Classes whose evaluating methods are divided over ranks, and whose batches have samples of similar length."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import parwrap

DATA = TensorDataset(torch.arange(10.0))
TEXTS = TensorDataset(torch.tensor([[5, 3, 8, 1], [7, 0, 0, 0], [6, 2, 9, 9], [4, 0, 0, 0]] * 2), torch.arange(8))


class Evaluating:
    """A plain trainer, whose evaluation its training calls."""

    def __init__(self):
        self.loader = DataLoader(DATA, batch_size=2)
        self.read = self.runs = 0

    def fit(self):
        weight = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([weight], lr=0.0)
        weight.sum().backward()
        return [self.evaluate(self.loader) for _ in range(3)]

    @torch.no_grad()
    def evaluate(self, loader):
        batches = [batch for (batch,) in loader]
        return {"mean": torch.cat(batches).mean().item(), "read": sum(map(len, batches)) * 1.0}


class Trainer(parwrap.DistributedMixin, parwrap.EvaluateMixin, Evaluating, reduce={"mean": "mean", "read": "sum"}):
    pass


class Overriding(Trainer):
    def evaluate(self, loader):
        result = super().evaluate(loader)
        return {**result, "mean": result["mean"] * 2}


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)])
def test_an_evaluation_within_training_is_that_of_one_process(size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [{"mean": 4.5, "read": 10.0}] * 3 == Trainer().fit()
        assert [{"mean": 9.0, "read": 10.0}] * 3 == Overriding().fit()


@pytest.mark.ranks(2)
def test_the_first_evaluation_of_an_instance_is_checked_and_later_ones_read_a_part():
    class Counting(parwrap.DistributedMixin, parwrap.EvaluateMixin, parwrap_evaluate_methods=("check",)):
        def fit(self, loader):
            weight = torch.nn.Parameter(torch.zeros(1))
            torch.optim.SGD([weight], lr=0.0)
            weight.sum().backward()
            return [self.check(loader) for _ in range(3)]

        def check(self, loader):
            values = [value.item() for (batch,) in loader for value in batch]
            return sum(values) / len(values)

    data = Counted()
    assert [4.5] * 3 == Counting().fit(DataLoader(data, batch_size=2))
    assert 10 + 3 * 5 == parwrap.reduce_mean(float(data.read))


class Counted(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read += 1
        return (torch.tensor(float(index)),)


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)])
def test_uniform_lengths_for_a_class(size):
    class Reading(parwrap.DistributedMixin, parwrap.UniformLengthMixin, pad_value=0):
        def train(self):
            return sorted({tokens.shape[1] for tokens, _ in DataLoader(TEXTS, batch_size=2, shuffle=True)})

    assert [1, 4] == sorted({width for widths in parwrap.gather(Reading().train()) for width in widths})
