"""Each rank's part of a stream: every sample once, whoever shards it."""

import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import parwrap
from parwrap.data.iterables import Pick
from parwrap.errors import UsageError


class Numbers(IterableDataset):
    """Knows of no workers and no ranks."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        yield from (float(number) for number in range(self.samples))


class Pairs(Numbers):
    """What a sample is longer than is no number of samples."""

    def __iter__(self):
        yield from ((torch.zeros(7), torch.tensor(number, dtype=torch.float64)) for number in range(self.samples))


class SharedByWorkers(Numbers):
    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from map(float, range(number, self.samples, workers))


class SharedByRanks(Numbers):
    def __iter__(self):
        yield from map(float, range(dist.get_rank(), self.samples, dist.get_world_size()))


class SharedByParwrapsRanks(Numbers):
    def __iter__(self):
        yield from map(float, range(parwrap.rank(), self.samples, parwrap.world_size()))


class ShuffledByWorker(Numbers):
    def __iter__(self):
        info = get_worker_info()
        order = torch.Generator().manual_seed(info.id if info else 0)
        yield from torch.randperm(self.samples, generator=order).double().tolist()


def trained(loader, passes=1, numbers_of=lambda batch: batch):
    """The weights that a plain loop comes to, and the samples of each of its batches."""
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(passes):
        for batch in map(numbers_of, loader):
            optimizer.zero_grad()
            (model(batch.view(-1, 1)) - 1).square().mean().backward()
            optimizer.step()
            seen.append(batch.flatten().tolist())
    return [*model.weight.flatten().tolist(), *model.bias.tolist()], seen


def everyones(batches):
    return sorted(sample for each in parwrap.gather(batches) for batch in each for sample in batch)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [[0, 3, 6, 9, 12], [1, 4, 7, 10, 0], [2, 5, 8, 11, 1]]),
        ({"uneven": "drop"}, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        ({"uneven": "join"}, [[0, 3, 6, 9, 12], [1, 4, 7, 10], [2, 5, 8, 11]]),
    ],
    ids=["pad", "drop", "join"],
)
def test_the_samples_of_a_stream_are_dealt_out(options, shares):
    with warnings.catch_warnings(), parwrap.distributed(**options):
        warnings.simplefilter("ignore")
        _, seen = trained(DataLoader(Numbers(13), batch_size=2))

        assert shares == parwrap.gather([sample for batch in seen for sample in batch])


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("options", "batch_size"), [({"uneven": "join"}, 2), ({"batch": "global"}, 6)], ids=["join", "global"])
def test_ranks_that_join_or_split_come_to_the_weights_of_one_process(options, batch_size):
    expected, _ = trained(DataLoader(Numbers(13), batch_size=6), passes=2)
    with warnings.catch_warnings(), parwrap.distributed(**options):
        warnings.simplefilter("ignore", UserWarning)  # one rank has a batch more
        actual, _ = trained(DataLoader(Numbers(13), batch_size=batch_size), passes=2)

        assert [expected] * 3 == [pytest.approx(each, abs=1e-12) for each in parwrap.gather(actual)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_count_by_their_samples_whatever_collate_fn_makes_of_them(workers):
    def weights(batch_size, **options):
        loader = DataLoader(Pairs(5), batch_size=batch_size, collate_fn=list, **options)
        return trained(loader, numbers_of=lambda batch: torch.stack([number for _, number in batch]))[0]

    expected = weights(batch_size=5)
    with parwrap.distributed(uneven="join"):
        actual = weights(batch_size=4, num_workers=workers, persistent_workers=workers > 0)

    assert expected == pytest.approx(actual, abs=1e-12)


def times_all(batch):
    return torch.tensor(batch, dtype=torch.float64) * get_worker_info().dataset.samples


@pytest.mark.ranks(2)
def test_a_collate_fn_in_a_worker_gets_the_users_own_dataset():
    with parwrap.distributed():
        _, seen = trained(DataLoader(Numbers(2), batch_size=1, num_workers=1, collate_fn=times_all))

        assert [[2.0 * parwrap.rank()]] == seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "uneven", "steps"),
    [({"drop_last": True}, "pad", 1), ({}, "pad", 2), ({}, "drop", 2), ({"batch_size": None}, "join", 20)],
)
def test_the_length_of_a_stream_that_has_one_is_that_of_this_ranks_part(options, uneven, steps):
    class Long(Numbers):
        def __len__(self):
            return self.samples

    with parwrap.distributed(uneven=uneven):
        loader = DataLoader(Long(39 if uneven == "drop" else 40), **{"batch_size": 13, **options})
        _, seen = trained(loader, numbers_of=lambda batch: torch.as_tensor(batch, dtype=torch.float64))

        assert steps == len(seen) == len(loader)


@pytest.mark.ranks(3)
def test_a_global_batch_that_does_not_divide_is_that_of_one_process_in_workers_too():
    expected, batches = trained(DataLoader(Numbers(15), batch_size=5))
    with parwrap.distributed(batch="global"):
        loader = DataLoader(Numbers(15), batch_size=5, num_workers=1)
        actual, seen = trained(loader)

        assert [batch[parwrap.rank() :: 3] for batch in batches] == seen
    assert expected == pytest.approx(actual, abs=1e-12)


def shard_in_worker(number):
    info = get_worker_info()
    info.dataset.samples = range(info.dataset.samples)[number :: info.num_workers]


class Given(Numbers):
    def __iter__(self):
        yield from map(float, self.samples)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (SharedByWorkers(16), {"num_workers": 2}),
        (SharedByWorkers(16), {}),
        (Numbers(16), {"num_workers": 1, "persistent_workers": True}),
        (Given(16), {"num_workers": 2, "worker_init_fn": shard_in_worker}),
        (ShuffledByWorker(16), {"num_workers": 1}),
        (SharedByRanks(16), {}),
        (SharedByRanks(16), {"num_workers": 1}),
        (SharedByParwrapsRanks(16), {}),
    ],
    ids=["workers", "no workers", "persistent", "worker_init_fn", "seeded by worker", "ranks", "ranks in workers", "parwrap's ranks"],
)
def test_every_sample_is_seen_once_in_each_pass_whoever_shards(dataset, options):
    with parwrap.distributed():
        loader = DataLoader(dataset, batch_size=2, **options)
        for _ in range(2):
            _, seen = trained(loader)

            assert [4, 4] == parwrap.gather(len(seen))
            assert list(range(16)) == everyones(seen)


@pytest.mark.ranks(2)
def test_parts_of_unequal_length_are_all_trained_on_and_the_ranks_agree():
    with warnings.catch_warnings(), parwrap.distributed():
        warnings.simplefilter("ignore", UserWarning)
        weights, seen = trained(DataLoader(SharedByWorkers(11), batch_size=1, num_workers=1), passes=2)

        assert [12, 10] == parwrap.gather(len(seen))
        first, second = parwrap.gather(weights)
    assert first == second


class AskingLate(Numbers):
    def __iter__(self):
        yield 0.0
        yield float(parwrap.world_size())
        yield 1.0


@pytest.mark.ranks(2)
def test_a_dataset_that_asks_too_late_is_refused():
    text = (
        r"AskingLate asks for the number of workers or ranks after it has yielded its first sample.*pass its loader to parwrap\.replicate"
    )
    with pytest.raises(UsageError, match=text), parwrap.distributed():
        trained(DataLoader(AskingLate(2), batch_size=1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": "sum"}, 'loss="sum" with batch="global" does not work with an IterableDataset'),
        ({}, "cannot split the batches of an IterableDataset: 1 sample for 2 ranks. Raise batch_size"),
    ],
)
def test_what_cannot_be_split_is_said(options, text):
    with pytest.raises(UsageError, match=text), parwrap.distributed(batch="global", **options):
        trained(DataLoader(Numbers(2), batch_size=1))


class Noise(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for _ in range(0, 4, info.num_workers):
            yield torch.rand(1, dtype=torch.float64)


@pytest.mark.ranks(2)
def test_workers_with_parts_of_their_own_draw_numbers_of_their_own_and_the_same_in_the_same_run():
    def run():
        torch.manual_seed(0)
        with parwrap.distributed():
            _, seen = trained(DataLoader(Noise(), batch_size=1, num_workers=2))
            return everyones(seen)

    drawn = run()

    assert 4 == len(drawn) == len(set(drawn))
    assert drawn == run()


@pytest.mark.ranks(2)
def test_a_stream_is_seen_whole_in_evaluation():
    with parwrap.distributed(), torch.no_grad():
        assert [[0, 1], [2, 3], [4]] == [batch.tolist() for batch in DataLoader(Numbers(5), batch_size=2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("shards", "workers"), [(1, 0), (4, 2)])
def test_a_hugging_face_stream_is_split_by_its_own_library(shards, workers):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    stream = datasets.Dataset.from_dict({"x": [float(number) for number in range(16)]}).to_iterable_dataset(num_shards=shards)
    orders = []
    with parwrap.distributed():
        shuffled = stream.shuffle(seed=0, buffer_size=16)
        loader = DataLoader(shuffled.map(lambda sample: {"x": sample["x"]}).with_format("torch"), batch_size=2, num_workers=workers)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for epoch in range(2):
            loader.dataset.set_epoch(epoch)
            seen = []
            for batch in loader:
                optimizer.zero_grad()
                model(batch["x"].float().view(-1, 1)).mean().backward()
                optimizer.step()
                seen.append(batch["x"].tolist())
            orders.append(seen)

            assert list(range(16)) == everyones(seen)
    assert orders[0] != orders[1]


@given(st.integers(0, 50), st.integers(1, 8), st.integers(1, 9), st.booleans())
def test_parts_of_global_batches_make_up_the_batches_of_one_process(samples, size, batch, drop_last):
    parts = [list(Pick(rank, size, batch=batch, drop_last=drop_last)(range(samples))) for rank in range(size)]
    whole = range(samples - samples % batch if drop_last else samples)

    assert list(whole) == sorted(sample for part in parts for sample in part)
    assert all(sample % batch % size == rank for rank, part in enumerate(parts) for sample in part)
