"""Divided evaluations return what one process would, on real ranks."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import parwrap
from evaluations import OfVaryingSize, Stream, by_own_counter, close, model, samples

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size), id=f"{size} ranks") for size in (2, 3)]
pytestmark = pytest.mark.usefixtures("nothing_is_warned_of")


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


@pytest.mark.parametrize("size", SIZES)
def test_the_usual_shapes_are_exact(size):
    for count in (1, 7, 12, 23):
        of_two, of_three = (model(), samples(count)), (samples(count), model(), F.cross_entropy)
        ways = [("mean", by_own_counter), ("sum", by_length_of_dataset), ("gather", predictions), ("sum", the_tutorials)]
        cases = [(reduce, function, of_three if function is the_tutorials else of_two) for reduce, function in ways]
        expected = [function(*arguments) for _, function, arguments in cases]
        with parwrap.distributed():
            close(expected, [parwrap.evaluate(reduce=reduce)(function)(*arguments) for reduce, function, arguments in cases])


COUNTS = {
    "tensor": torch.sum,
    "histogram": lambda found: torch.histc(found.float(), 4),
    "array": lambda found: np.histogram(found.float(), 4)[0],
    "number": lambda found: np.int64(found.sum()),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_matches_on_some_ranks_only_have_the_type_of_one_process(size, check, count):
    def matches(loader):
        found = 0
        for (x,) in loader:
            if (x > 8).any():
                found = found + COUNTS[count](x > 8)
        return found

    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=3)
    with parwrap.distributed():
        actual = parwrap.evaluate(reduce="sum", check=check)(matches)(loader)

    assert (type(matches(loader)), repr(matches(loader))) == (type(actual), repr(actual))


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_reads_its_part_and_ranks_without_one_stand_in(size):
    read = []

    @parwrap.evaluate(reduce=sum, check=False)
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
            parwrap.evaluate(reduce="mean")(by_own_counter)(model(), DataLoader([]))


class Doubling(DataLoader):
    def __iter__(self):
        for x, y in super().__iter__():
            yield x * 2, y


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
        close(expected, drawn(parwrap.evaluate(reduce="gather")(predictions), parwrap.evaluate(reduce="mean")(by_own_counter)))


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
        assert 3.0 == parwrap.evaluate(reduce="mean")(mean)(DataLoader(Stream(7), batch_size=None))
        assert 3.0 == parwrap.evaluate(reduce="mean")(mean)(DataLoader(range(7), batch_size=None))
