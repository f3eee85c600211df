"""Errors and warnings of divided evaluations."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

import parwrap
from evaluations import Stream, by_own_counter
from parwrap.errors import RankMismatchError, UsageError

pytestmark = pytest.mark.usefixtures("nothing_is_warned_of")


@pytest.mark.ranks(2)
def test_what_cannot_be_exact_says_so():
    def first(loader):
        return next(iter(loader)).sum().item() * 1.0

    def trains(loader):
        for x in loader:
            (x.float() * torch.ones(1, requires_grad=True)).sum().backward()

    def drawn_by_rank(loader):
        return sum(x.sum().item() for x in loader)

    ten = range(10)
    unseeded = DataLoader(ten, sampler=SubsetRandomSampler(ten, torch.Generator().manual_seed(parwrap.rank())))
    cases = [
        (
            "mean",
            first,
            DataLoader(ten),
            UsageError,
            r"was not read to its end in an evaluation at test_evaluate_errors.py:\d+: rank 0 read 1 of its 5",
        ),
        (
            "mean",
            first,
            DataLoader(Stream(10)),
            UsageError,
            r"rank 0 read 1 batches, and it is unknown which ones a single process would have",
        ),
        (
            "mean",
            trains,
            DataLoader(ten),
            UsageError,
            r"test_evaluate_errors.py:\d+ calls backward inside a function decorated with @parwrap.evaluate",
        ),
        ("sum", drawn_by_rank, unseeded, RankMismatchError, "the ranks drew different samples to evaluate .*: seed the generator"),
        ("sum", drawn_by_rank, DataLoader(ten, sampler=DistributedSampler(ten, 2, 0)), UsageError, "has its own DistributedSampler"),
        ("sum", drawn_by_rank, DataLoader(ten, sampler=RandomSampler(ten, True, 10**10)), UsageError, "has more than 10000000 batches"),
        (
            "gather",
            lambda loader: [len(list(loader)), 0, 0],
            DataLoader(Stream(10)),
            UsageError,
            "the function reads a stream, and the ranks have 3, 3 rows",
        ),
        (
            "gather",
            lambda loader: (x for x in loader),
            DataLoader(ten),
            UsageError,
            r"returns a generator, whose body runs after the call has returned, .* Run it inside the function: return list\(\.\.\.\)\.",
        ),
        (
            "gather",
            lambda loader: [*loader] and torch.nn.Linear(1, 1).named_parameters(),
            DataLoader(ten),
            UsageError,
            r"returns a generator, which ranks cannot send to each other: return list\(\.\.\.\) of it\.",
        ),
    ]
    with parwrap.distributed():
        for reduce, function, loader, error, message in cases:
            with pytest.raises(error, match=message):
                parwrap.evaluate(reduce=reduce)(function)(loader)


@pytest.mark.ranks(2)
def test_a_function_that_reads_nothing_or_returns_nothing_is_warned_of():
    with parwrap.distributed():
        with pytest.warns(UserWarning, match=r"reads_nothing \(.*\) did not read a DataLoader, so every rank computed all of it"):
            assert 3 == parwrap.evaluate(reduce="sum")(reads_nothing)()
        with pytest.warns(UserWarning, match=r"it returns nothing, so its output or side effects would cover only a rank's part"):
            assert parwrap.evaluate(reduce="mean")(lambda: [None for _ in DataLoader(range(3))] and None)() is None
        with pytest.raises(UsageError, match="both reads a DataLoader and calls another decorated function"):
            parwrap.evaluate(reduce="mean")(lambda: [parwrap.evaluate(reduce="mean")(reads_nothing)() for _ in DataLoader(range(3))])()


def reads_nothing():
    return 3


@pytest.mark.ranks(2)
def test_a_failure_of_one_rank_ends_the_others_too():
    @parwrap.distributed
    @parwrap.evaluate(reduce="mean")
    def fails():
        for x in DataLoader(range(2)):
            if x == 1 and parwrap.rank() == 1:
                raise KeyError("on purpose")
        return 1.0

    with pytest.raises(KeyError, match="on purpose") as raised:
        fails()
    if parwrap.rank() == 0:
        assert "rank 1 failed with KeyError: 'on purpose' in " in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: parwrap.evaluate(reduce="max"),
            "reduce='max' is not a way to merge results. Choose one of: 'mean': weighted by the samples that each rank has read; 'sum': ",
        ),
        (lambda: parwrap.evaluate(reduce={"loss": "avg"}), "reduce='avg' is not a way to merge results."),
        (
            lambda: parwrap.evaluate(by_own_counter),
            "@parwrap.evaluate does not say how the ranks' results are merged: write @parwrap.evaluate(",
        ),
        (lambda: parwrap.evaluate(reduction="sum"), "parwrap.evaluate has no option 'reduction'; did you mean 'reduce'?"),
        (
            lambda: parwrap.evaluate(reduce="sum").__enter__(),
            "`with parwrap.evaluate():` has no result to merge: decorate the function that returns the result.",
        ),
    ],
)
def test_options_that_cannot_be(use, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        use()


@pytest.mark.ranks(2)
def test_data_of_other_lengths_on_the_ranks_is_an_error_on_all():
    @parwrap.evaluate(reduce="mean")
    def mean(loader):
        return sum(x.sum().item() for x in loader) / len(loader.dataset)

    text = r"mean \(.*\) evaluates datasets of lengths \(10,\) on rank 0 and \(11,\) on rank 1"
    with parwrap.distributed(), pytest.raises(RankMismatchError, match=text):
        mean(DataLoader(range(10 + parwrap.rank()), batch_size=2))
