"""Evaluations that are shared out return what one process would, on real ranks."""

import io
import re
import runpy
import warnings
from contextlib import nullcontext, redirect_stdout

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import parwrap
import parwrap.meetings
from parwrap.errors import RankMismatchError, UsageError
from parwrap.group import alone

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size), id=f"{size} ranks") for size in (2, 3)]


@pytest.fixture(autouse=True)
def _nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # which torchdata calls
        yield


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


@torch.no_grad()
def by_length_of_dataset(model, loader):
    model.eval()
    size, loss = len(loader.dataset), torch.zeros(())
    for x, y in loader:
        loss = loss + F.cross_entropy(model(x), y, reduction="sum")
    return loss / size, loss.item() / len(loader.sampler)


def the_tutorials(dataloader, model, loss_fn):
    size = len(dataloader.dataset)
    num_batches = len(dataloader)
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for X, y in dataloader:
            pred = model(X)
            test_loss += loss_fn(pred, y).item()
            correct += (pred.argmax(1) == y).type(torch.float).sum().item()
    test_loss /= num_batches
    correct /= size
    return test_loss, correct


@torch.no_grad()
def predictions(model, loader):
    outputs, labels, texts = [], [], []
    for x, y in loader:
        outputs.append(model(x))
        labels += y.tolist()
        texts.extend(f"{value:.6f}" for value in x[:, 0])
    return {"outputs": torch.cat(outputs), "seen": (labels, np.array(texts))}


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


@pytest.mark.parametrize("size", SIZES)
def test_the_usual_shapes_are_exact(size):
    for count in (1, 7, 12, 23):
        of_two, of_three = (model(), samples(count)), (samples(count), model(), F.cross_entropy)
        ways = [("mean", by_own_counter), ("mean", by_length_of_dataset), ("gather", predictions), ("sum", the_tutorials)]
        cases = [(reduce, function, of_three if function is the_tutorials else of_two) for reduce, function in ways]
        expected = [function(*arguments) for _, function, arguments in cases]
        with parwrap.distributed():
            close(expected, [parwrap.evaluate(reduce=reduce)(function)(*arguments) for reduce, function, arguments in cases])


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_reads_its_part_and_ranks_without_one_stand_in(size):
    read = []

    @parwrap.evaluate(reduce=sum)
    def count(loader):
        read.append([x.tolist() for x in loader])
        return len(read[-1])

    with parwrap.distributed():
        assert [7, 1] == [count(DataLoader(range(14), batch_size=2)), count(DataLoader(range(2), batch_size=2))]
        parts = parwrap.gather(read)

    assert [[at, at + 1] for at in range(0, 14, 2)] == [batch for part in parts for batch in part[0]]
    assert max(len(part[0]) for part in parts) == -(-7 // size)
    assert [[[0, 1]]] * size == [part[1] for part in parts]


@pytest.mark.ranks(2)
def test_an_empty_loader_is_what_it_is_in_one_process():
    with parwrap.distributed():
        assert parwrap.evaluate(reduce="gather")(lambda loader: list(loader))(DataLoader([])) == []
        with pytest.raises(ZeroDivisionError):
            parwrap.evaluate(by_own_counter)(model(), DataLoader([]))


class Doubling(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x * 2, y


class OfVaryingSize(BatchSampler):
    def __iter__(self):
        yield from ([0, 5], [7], [1, 2, 3, 4, 6], [8])

    def __len__(self):
        return 4


def collate(items):
    x, y = zip(*items, strict=True)
    return torch.stack(x) + 1, torch.stack(y)


KINDS = {
    "workers": {"num_workers": 2, "persistent_workers": True},
    "collate": {"collate_fn": collate},
    "varying": {"batch_sampler": OfVaryingSize(range(9), 2, False), "batch_size": 1},
    "subset": {"sampler": SubsetRandomSampler([3, 1, 8, 5, 2])},
    "drawn": {"sampler": RandomSampler(range(9), replacement=True, num_samples=11)},
    "dropping": {"drop_last": True},
    "shuffled": {"shuffle": True},
    "user's generator": {"shuffle": True, "generator": torch.Generator()},
    "lists of indices": {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(9)), 2, False)},
    "torchdata's": {"shuffle": True},
}
OF_ANOTHER_CLASS = {"dropping": Doubling, "torchdata's": StatefulDataLoader}


@pytest.mark.ranks(2)
def test_what_is_drawn_and_in_which_order_is_that_of_one_process():
    def drawn(gather, mean):
        results = {}
        for kind, options in KINDS.items():
            if "generator" in options:
                options["generator"].manual_seed(5)
            loader = OF_ANOTHER_CLASS.get(kind, DataLoader)(samples(9).dataset, **{"batch_size": 2, **options})
            torch.manual_seed(1)
            results[kind] = gather(net, loader), mean(net, loader)
        return results

    net = model()
    expected = drawn(predictions, by_own_counter)
    with parwrap.distributed():
        close(expected, drawn(parwrap.evaluate(reduce="gather")(predictions), parwrap.evaluate(by_own_counter)))


class Stream(IterableDataset):
    def __init__(self, count, shuffles=False):
        self.count, self.shuffles = count, shuffles

    def __iter__(self):
        for at in range(self.count):
            yield torch.rand(1).item() if self.shuffles else float(at)


@pytest.mark.parametrize("size", SIZES)
def test_streams_are_exact_in_the_order_of_one_process(size):
    def evaluate(loader, noise=0):
        seen = []
        for x in loader:
            torch.rand(noise)
            seen += x.tolist()
        return {"seen": seen, "mean": sum(seen) / max(1, len(seen)), "count": len(seen)}

    shared = parwrap.evaluate(reduce={"seen": "gather", "mean": "mean", "count": "sum"})(evaluate)
    for count, shuffles in [(0, False), (1, True), (9, False), (9, True)]:
        loader = DataLoader(Stream(count, shuffles), batch_size=2)
        torch.manual_seed(2)
        expected = evaluate(loader)
        with parwrap.distributed(seed=2):
            close(expected, shared(loader, 1))


@pytest.mark.ranks(2)
def test_a_stream_of_items_without_batches():
    def mean(loader):
        seen = [float(x) for x in loader]
        return sum(seen) / len(seen)

    with parwrap.distributed():
        assert 3.0 == parwrap.evaluate(mean)(DataLoader(Stream(7), batch_size=None))
        assert 3.0 == parwrap.evaluate(mean)(DataLoader(range(7), batch_size=None))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_in_the_midst_of_training_in_train_mode_with_gradients_and_noise(batch):
    """Whatever ranks draw in an evaluation, what they draw together afterwards is the same."""

    @parwrap.evaluate
    def noisy(net, loader):
        total = count = 0
        for x, _ in loader:
            torch.rand(3), np.random.rand()
            total, count = total + net(x).square().sum().item(), count + len(x)
        return total / count

    @parwrap.distributed(batch=batch)
    def train():
        net, loader, losses = model(), samples(17), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(2):
            for x, y in samples(16, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                if epoch:
                    losses.append(noisy(net, loader))
            losses.append(noisy(net, loader))
            with alone():
                whole = noisy(net, loader)

            assert abs(whole - losses[-1]) < 1e-12
        return losses, torch.randperm(5).tolist(), np.random.rand()

    results = parwrap.gather(train())

    assert results[0] == results[1]
    assert len(set(results[0][0])) == len(results[0][0]) - 1  # the last two are of the same weights


@pytest.mark.ranks(2)
def test_a_rank_that_has_left_an_epoch_sooner_evaluates_the_same_weights():
    @parwrap.distributed
    def train():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        evaluate(net, held_out)  # from here on nothing has to be agreed on
        for step, (x, y) in enumerate(samples(16)):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            if step == parwrap.rank() - 1:
                break
        return evaluate(net, held_out), net

    evaluate, held_out = parwrap.evaluate(by_own_counter), samples(9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ran fewer batches")
        result, net = train()

    close(by_own_counter(net, samples(9)), result)


@pytest.mark.ranks(2)
def test_methods_in_any_order_of_decorators_with_the_others():
    class Trainer:
        def __init__(self):
            self.net, self.loader = model(), samples(9)

        def evaluate(self):
            return by_own_counter(self.net, self.loader)

    expected = Trainer().evaluate()
    stacks = [
        [parwrap.evaluate, parwrap.distributed],
        [parwrap.distributed, parwrap.evaluate],
        [parwrap.sync_bn, parwrap.evaluate(reduce="mean"), parwrap.accumulate(2), parwrap.distributed(batch="global")],
    ]
    for stack in stacks:
        method = Trainer.evaluate
        for decorator in stack:
            method = decorator(method)

        close(expected, method(Trainer()))

    amp = parwrap.distributed(parwrap.evaluate(parwrap.amp(dtype="bf16")(Trainer.evaluate)))(Trainer())
    assert amp["accuracy"] == parwrap.amp(dtype="bf16")(Trainer.evaluate)(Trainer())["accuracy"]


@pytest.mark.ranks(2)
def test_a_subset_that_differs_by_rank_becomes_rank_zeros():
    loader = DataLoader(Subset(torch.arange(10), [3, 1, 4] if parwrap.rank() == 0 else [2, 7, 8]))
    with parwrap.distributed(), pytest.warns(UserWarning, match="indices of a Subset differ between ranks; rank 0's are used"):
        assert [3, 1, 4] == parwrap.evaluate(reduce="gather")(lambda: [x.item() for x in loader])()


@pytest.mark.ranks(2)
def test_an_evaluation_that_calls_others_returns_what_they_do():
    accuracy = parwrap.evaluate(by_own_counter)

    @parwrap.evaluate(reduce="sum")
    def both(net):
        return {"val": accuracy(net, samples(9)), "test": accuracy(net, samples(30))}

    expected = {"val": by_own_counter(model(), samples(9)), "test": by_own_counter(model(), samples(30))}
    with parwrap.distributed():
        close(expected, both(model()))


@pytest.mark.ranks(3)
def test_several_loaders_in_one_function():
    def counts(*loaders):
        return [sum(len(x) for x in loader) for loader in loaders]

    sums = parwrap.evaluate(reduce="sum")(counts)
    with parwrap.distributed():
        assert [20, 9] == sums(DataLoader(range(20)), DataLoader(range(9)))
        assert [2, 20] == sums(DataLoader(range(2)), DataLoader(range(20)))  # rank 2 stands in for both
        assert [0, 20] == sums(DataLoader([]), DataLoader(range(20)))
        with pytest.raises(UsageError, match=r"reads a DataLoader of 2 batches on 3 ranks after a larger one.*read the smallest first"):
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
            with pytest.raises(UsageError, match=rf"the length of a dataset that is a {kind}, which is that of all samples, while"):
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
            UsageError, match=r"\['outputs'\] has 9 rows on each rank, as many as there are samples on all, so it was made for"
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
    @parwrap.evaluate
    def loss(loader):
        return sum(x.mean().item() for x in loader) / len(loader)

    data = torch.arange(8.0)
    with parwrap.distributed():
        assert 3.5 == loss(DataLoader(data, batch_size=2))
        with pytest.warns(UserWarning, match=r"the number of batches was asked for \(.*test_evaluate.py:\d+\), and those of one"):
            loss(DataLoader(data, batch_size=3))
        with pytest.warns(UserWarning, match=r"the length of a dataset was asked for .*which is 8, and a pass reads 6 samples"):
            parwrap.evaluate(by_length)(DataLoader(data, batch_size=3, drop_last=True))


@pytest.mark.ranks(2)
def test_lengths_are_the_parts_for_each_entry_unless_one_is_a_sum():
    def evaluate(loader):
        seen = torch.cat(list(loader))
        return {"mean": seen.sum().item() / len(loader.dataset), "seen": seen, "count": float(len(seen))}

    loader = DataLoader(torch.arange(8), batch_size=2)
    with parwrap.distributed():
        exact = parwrap.evaluate(reduce={"mean": "mean", "seen": "gather", "count": "mean"})(evaluate)(loader)
        with pytest.warns(UserWarning, match=r"a length was asked for \(.*\), which is that of the whole, since reduce has a 'sum' or a"):
            parwrap.evaluate(reduce={"mean": "mean", "seen": "gather", "count": "sum"})(evaluate)(loader)

    assert [3.5, list(range(8))] == [exact["mean"], exact["seen"].tolist()]


def by_length(loader):
    return sum(x.sum().item() for x in loader) / len(loader.dataset)


@pytest.mark.ranks(2)
def test_a_bar_shows_the_part_and_lengths_are_whole_for_a_sum():
    @parwrap.evaluate(reduce="sum")
    def count(loader):
        bar = tqdm(loader, disable=True)
        return len(list(bar)), [bar.total], len(loader) + len(loader.dataset)

    with parwrap.distributed():
        assert (10, [10], 40) == count(DataLoader(range(10)))


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
    varying = DataLoader(ten, batch_sampler=OfVaryingSize(ten, 2, False))
    cases = [
        (
            "mean",
            first,
            DataLoader(ten),
            UsageError,
            r"was not read to its end in an evaluation \(.*\): rank 0 has read 1 of its 5",
        ),
        (
            "mean",
            first,
            DataLoader(Stream(10)),
            UsageError,
            r"rank 0 has read 1 batches, and which a single process would have",
        ),
        ("mean", trains, DataLoader(ten), UsageError, "a backward was called inside of a function decorated with @parwrap.evaluate"),
        ("sum", drawn_by_rank, unseeded, RankMismatchError, "the ranks have drawn different samples to evaluate .*: seed the generator"),
        ("sum", drawn_by_rank, DataLoader(ten, sampler=DistributedSampler(ten, 2, 0)), UsageError, "has a DistributedSampler of"),
        ("sum", drawn_by_rank, DataLoader(ten, sampler=RandomSampler(ten, True, 10**10)), UsageError, "has more than 10000000 batches"),
        (
            "mean",
            lambda loader: len(loader.dataset) + first(loader),
            varying,
            UsageError,
            "asks for a length before it is known",
        ),
        (
            "gather",
            lambda loader: [len(list(loader)), 0, 0],
            DataLoader(Stream(10)),
            UsageError,
            "the function reads a stream, and the res",
        ),
    ]
    with parwrap.distributed():
        for reduce, function, loader, error, message in cases:
            with pytest.raises(error, match=message):
                parwrap.evaluate(reduce=reduce)(function)(loader)


@pytest.mark.ranks(2)
def test_a_function_that_reads_nothing_or_returns_nothing_is_warned_of():
    with parwrap.distributed():
        with pytest.warns(UserWarning, match=r"reads_nothing \(.*\) has read no DataLoader, so every rank has computed all of it"):
            assert 3 == parwrap.evaluate(reduce="sum")(reads_nothing)()
        with pytest.warns(UserWarning, match=r"returns nothing, and what it prints is of rank 0's part: return the numbers"):
            assert parwrap.evaluate(lambda: [None for _ in DataLoader(range(3))] and None)() is None
        with pytest.raises(UsageError, match="both reads a DataLoader and calls another such function"):
            parwrap.evaluate(lambda: [parwrap.evaluate(reads_nothing)() for _ in DataLoader(range(3))])()


def reads_nothing():
    return 3


@pytest.mark.ranks(2)
def test_a_failure_of_one_rank_ends_the_others_too(monkeypatch):
    monkeypatch.setattr(parwrap.meetings, "GRACE", 0.5)

    @parwrap.distributed
    @parwrap.evaluate
    def fails():
        for x in DataLoader(range(2)):
            if x == 1:
                raise KeyError("on purpose")
        return 1.0

    error, message = (KeyError, "on purpose") if parwrap.rank() else (RankMismatchError, "rank 1 has failed with KeyError: 'on purpose'")
    with pytest.raises(error, match=message):
        fails()


@pytest.mark.ranks(2)
def test_without_distributed_in_a_process_group_of_the_scripts_own():
    close(by_own_counter(model(), samples(9)), parwrap.evaluate(by_own_counter)(model(), samples(9)))


@pytest.mark.ranks(2)
def test_on_one_rank_alone_it_is_as_in_one_process():
    mean = parwrap.evaluate(by_own_counter)
    with parwrap.distributed():
        result = parwrap.rank_zero_only(mean)(model(), samples(9))

    assert (by_own_counter(model(), samples(9)) if parwrap.is_rank_zero() else None) == result


@pytest.mark.parametrize("scope", [parwrap.distributed, lambda function: function])
def test_in_one_process_it_changes_nothing(scope):
    result = {"count": 3, "model": object()}

    assert result is scope(parwrap.evaluate(lambda: result))()
    assert [result] == scope(parwrap.evaluate(reduce=list)(lambda: result))()
    assert {"count": 3} == scope(parwrap.evaluate(reduce={"count": max})(lambda: {"count": 3}))()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: parwrap.evaluate(reduce="max"),
            "reduce='max' is not one of the ways to put results together. 'mean': weighted by the samples that each rank has read; 'sum': ",
        ),
        (lambda: parwrap.evaluate(reduce={"loss": "avg"}), "reduce='avg' is not one of the ways to put results together."),
        (lambda: parwrap.evaluate(reduction="sum"), "parwrap.evaluate has no option 'reduction'; did you mean 'reduce'?"),
        (
            lambda: parwrap.evaluate().__enter__(),
            "`with parwrap.evaluate():` has no result to put together: decorate the function that returns it.",
        ),
    ],
)
def test_options_that_cannot_be(use, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        use()


@pytest.mark.ranks(2)
def test_everything_is_put_back():
    kinds = DataLoader, TensorDataset, SequentialSampler, BatchSampler, torch.autograd
    before = [dict(vars(kind)) for kind in kinds]

    @parwrap.distributed
    @parwrap.evaluate
    def evaluate(loader, fails):
        assert "dataset" in vars(DataLoader)
        assert len(loader.dataset) < 9
        if fails:
            raise KeyError("on purpose")
        return by_own_counter(model(), loader)

    for expected in (nullcontext(), pytest.raises(KeyError, match="on purpose")):
        with expected:
            evaluate(samples(9), fails=not isinstance(expected, nullcontext))
        for kind, names in zip(kinds, before, strict=True):
            assert [] == [name for name, value in vars(kind).items() if names.get(name) is not value]
            assert names.keys() == vars(kind).keys()


SCRIPT = """
import torch, parwrap
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(101, 4, dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Linear(4, 2, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

@parwrap.evaluate
def evaluate(model, loader):
    model.eval()
    correct = loss = 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = model(inputs)
            loss += nn.functional.cross_entropy(outputs, targets, reduction="sum").item()
            correct += (outputs.argmax(1) == targets).sum().item()
    return loss / len(loader.dataset), correct / len(data)

for epoch in range(3):
    model.train()
    for inputs, targets in DataLoader(data, batch_size=12, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    print(*(f"{value:.9f}" for value in evaluate(model, DataLoader(data, batch_size=10))))
"""


@pytest.mark.ranks(2)
def test_a_script_prints_on_two_ranks_what_it_does_alone(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def printed(scope):
        with redirect_stdout(io.StringIO()) as text, scope:
            runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
        return text.getvalue()

    expected, actual = printed(alone()), printed(parwrap.distributed.script_scope(batch="global"))

    if parwrap.is_rank_zero():
        assert expected == actual
    assert 3 == len(expected.splitlines())
