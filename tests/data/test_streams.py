"""Each rank's share of a stream: together the ranks read each sample once, whoever divides it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import parwrap
from parwrap.errors import UsageError
from training import Training, everyones


class Count(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("uneven", "shares"),
    [
        ("pad", [[0, 3, 6, 9, 12], [1, 4, 7, 10, 0], [2, 5, 8, 11, 1]]),
        ("drop", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        ("join", [[0, 1, 6, 7, 12], [2, 3, 8, 9, 12], [4, 5, 10, 11, 12]]),
    ],
)
def test_the_items_of_a_stream_are_dealt_out(uneven, shares, workers):
    with parwrap.distributed(uneven=uneven):
        assert shares[parwrap.rank()] == Training().train(DataLoader(Count(13), batch_size=2, num_workers=workers))


class Drawn(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(6).tolist()
        yield from (6 + torch.randperm(6)).tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_shuffles_is_dealt_out_without_overlap(batch, workers):
    with parwrap.distributed(batch=batch):
        training, loader = Training(), DataLoader(Drawn(), batch_size=2, num_workers=workers)

        assert [list(range(12))] * 3 == [everyones(training.train(loader)) for _ in range(3)]


class AsksForRanks(IterableDataset):
    def __iter__(self):
        return iter(range(parwrap.rank(), 12, parwrap.world_size()))


class AsksLate(IterableDataset):
    def __iter__(self):
        yield 0
        yield parwrap.world_size()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stream", [AsksForRanks, AsksLate])
def test_a_stream_that_asks_for_the_rank_is_an_error(stream):
    with (
        pytest.raises(
            UsageError,
            match=r"an IterableDataset asks for the rank or the number of ranks while it is read, to divide itself, but parwrap divides it "
            r"too: each rank takes every N-th sample. Wrap its loader in parwrap.replicate\(loader\)",
        ),
        parwrap.distributed(),
    ):
        Training().train(DataLoader(stream(), batch_size=1))


@pytest.mark.ranks(2)
def test_a_worker_init_fn_and_a_collate_fn_see_the_scripts_dataset():
    with parwrap.distributed():
        loader = DataLoader(Count(8), batch_size=2, num_workers=2, worker_init_fn=take_part, collate_fn=times_count)

        assert sorted(4 * each for each in (0, 1, 2, 3) * 2) == everyones(Training().train(loader))


def take_part(worker):
    info = get_worker_info()
    info.dataset.count = info.dataset.count // info.num_workers


def times_count(batch):
    return torch.tensor(batch) * get_worker_info().dataset.count


# streams that divide themselves by workers


class SharedByWorkers(Count):
    def __iter__(self):
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(number, self.count, workers))


class Given(Count):
    def __iter__(self):
        return iter(self.count)


def shard_in_worker(worker):
    info = get_worker_info()
    info.dataset.count = range(info.dataset.count)[worker :: info.num_workers]


class ShuffledByWorker(Count):
    def __iter__(self):
        info = get_worker_info()
        yield from torch.randperm(self.count, generator=torch.Generator().manual_seed(info.seed)).tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (SharedByWorkers(16), {"num_workers": 2}),
        (SharedByWorkers(16), {"num_workers": 2, "persistent_workers": True}),
        (SharedByWorkers(16), {}),
        (Given(16), {"num_workers": 2, "worker_init_fn": shard_in_worker}),
        (ShuffledByWorker(16), {"num_workers": 1}),
    ],
    ids=["workers", "persistent", "no workers", "worker_init_fn", "seeded by worker"],
)
def test_every_sample_is_read_once_if_workers_divide_a_stream(dataset, options, batch):
    with parwrap.distributed(batch=batch):
        training, loader = Training(), DataLoader(dataset, batch_size=2, **options)

        assert [list(range(16))] * 2 == [everyones(training.train(loader)) for _ in range(2)]


# streams that divide themselves by ranks


class SharedByLauncher(Count):
    """As webdataset does it: by the launcher's variables, or else by the process group."""

    def __iter__(self):
        rank, size = 0, 1
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        elif dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        yield from range(rank, self.count, size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("variables", [True, False], ids=["variables", "group"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow)],
    ids=["here", "worker", "spawned"],
)
def test_a_stream_that_parwrap_divides_sees_one_process(options, variables, monkeypatch):
    if variables:
        monkeypatch.setenv("RANK", str(parwrap.rank()))
        monkeypatch.setenv("WORLD_SIZE", "2")
    with parwrap.distributed():
        seen = Training().train(DataLoader(SharedByLauncher(12), batch_size=2, **options))

        assert (2, variables) == (dist.get_world_size(), "RANK" in os.environ)
    assert list(range(parwrap.rank(), 12, 2)) == seen


class AsksTorch(IterableDataset):
    def __iter__(self):
        return iter(range(dist.get_rank(), 12, dist.get_world_size()))


@pytest.mark.ranks(2)
def test_a_stream_that_needs_a_process_group_is_an_error():
    text = r"has not been initialized.* parwrap hides its own .*from streams that it divides: use parwrap\.rank\(\)"
    with pytest.raises(ValueError, match=text), parwrap.distributed():
        Training().train(DataLoader(AsksTorch(), batch_size=1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stream", [AsksForRanks(), AsksTorch(), SharedByLauncher(12)], ids=lambda stream: type(stream).__name__)
def test_a_replicated_stream_divides_itself(stream):
    with parwrap.distributed():
        seen = Training().train(parwrap.replicate(DataLoader(stream, batch_size=2)))

    assert list(range(parwrap.rank(), 12, 2)) == seen


class Blocks(Count):
    """Rank 0 has twice as many samples as rank 1."""

    def __iter__(self):
        first = 2 * self.count // 3
        return iter(range(first) if parwrap.rank() == 0 else range(first, self.count))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("uneven", "shares"),
    [
        ("pad", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 8, 9, 10, 11]]),
        ("drop", [[0, 1, 2, 3], [8, 9, 10, 11]]),
        ("join", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 10, 11, 10, 11]]),
    ],
)
def test_parts_of_different_lengths_end_together(uneven, shares, workers):
    with parwrap.distributed(uneven=uneven):
        training, loader = Training(), parwrap.replicate(DataLoader(Blocks(12), batch_size=2, num_workers=workers))

        assert [shares[parwrap.rank()]] * 2 == [training.train(loader), training.train(loader)]


@pytest.mark.ranks(2)
def test_joined_parts_train_what_one_process_trains_with_the_samples_of_all():
    def steps(batches):
        model = nn.Linear(1, 1).double()
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in batches:
            optimizer.zero_grad()
            (model(batch.double().view(-1, 1)) - 1).square().mean().backward()
            optimizer.step()
        return [model.weight.item(), model.bias.item()]

    with parwrap.distributed(uneven="join"):
        actual = steps(parwrap.replicate(DataLoader(Blocks(9), batch_size=2)))

    assert steps(map(torch.tensor, [[0, 1, 6, 7], [2, 3, 8], [4, 5]])) == pytest.approx(actual, abs=1e-12)


class OnlyOnRankZero(Count):
    def __iter__(self):
        return iter(range(self.count if parwrap.rank() == 0 else 0))


@pytest.mark.ranks(2)
def test_a_rank_without_a_batch_is_an_error():
    with (
        pytest.raises(UsageError, match=r"rank 1 has no batch, because the stream has fewer shards than there are ranks"),
        parwrap.distributed(),
    ):
        Training().train(parwrap.replicate(DataLoader(OnlyOnRankZero(4), batch_size=2)))


# libraries


def hugging_faces(shards, count):
    datasets = pytest.importorskip("datasets")

    def numbers(starts):
        for start in starts:
            yield from ({"x": number} for number in range(start, count, shards))

    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"starts": list(range(shards))}), datasets


def columns(loader):
    return (batch["x"] for batch in loader)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "worker", "kept"]
)
def test_a_stream_of_datasets_is_split_by_its_library(options):
    stream, _ = hugging_faces(shards=4, count=16)
    stream = stream.shuffle(seed=3, buffer_size=4)
    orders = []
    with parwrap.distributed():
        training, loader = Training(), DataLoader(stream, batch_size=2, **options)
        for epoch in range(2):
            stream.set_epoch(epoch)
            orders.append(training.train(columns(loader)))

            assert list(range(16)) == everyones(orders[-1])

    assert orders[0] != orders[1]


@pytest.mark.ranks(2)
def test_each_rank_opens_its_own_shards_of_datasets():
    stream, _ = hugging_faces(shards=2, count=8)
    with parwrap.distributed():
        assert list(range(parwrap.rank(), 8, 2)) == Training().train(columns(DataLoader(stream, batch_size=2)))


@pytest.mark.ranks(2)
def test_shards_of_datasets_that_differ_in_length_end_together():
    stream, _ = hugging_faces(shards=2, count=5)
    with parwrap.distributed(uneven="drop"):
        assert [[0, 2], [1, 3]][parwrap.rank()] == Training().train(columns(DataLoader(stream, batch_size=1)))


@pytest.mark.ranks(2)
def test_a_stream_of_datasets_that_the_script_has_split_stays_so():
    stream, datasets = hugging_faces(shards=2, count=8)
    with parwrap.distributed():
        own = datasets.distributed.split_dataset_by_node(stream, 1 - parwrap.rank(), 2)

        assert list(range(1 - parwrap.rank(), 8, 2)) == Training().train(columns(DataLoader(own, batch_size=2)))

    with pytest.raises(UsageError, match=r"split_dataset_by_node has divided .* Remove the split"), parwrap.distributed(batch="global"):
        Training().train(columns(DataLoader(own, batch_size=2)))


@pytest.mark.ranks(2)
def test_a_batch_of_datasets_is_divided_if_it_is_global():
    stream, _ = hugging_faces(shards=2, count=8)
    with parwrap.distributed(batch="global"):
        seen = Training().train(columns(DataLoader(stream, batch_size=4)))

        assert (4, list(range(8))) == (len(seen), everyones(seen))


@pytest.mark.ranks(2)
def test_a_stream_of_webdataset_is_dealt_or_splits_itself(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    folder = parwrap.broadcast(str(tmp_path))
    if parwrap.rank() == 0:
        for shard in range(4):
            with webdataset.TarWriter(f"{folder}/{shard}.tar") as file:
                for number in range(shard, 16, 4):
                    file.write({"__key__": f"{number:03}", "cls": number})
    parwrap.barrier()

    def loader(**options):
        stream = (
            webdataset.WebDataset(f"{folder}/{{0..3}}.tar", shardshuffle=False, **options)
            .decode()
            .to_tuple("cls")
            .map(lambda each: each[0])
        )
        return DataLoader(stream, batch_size=2, num_workers=1)

    with parwrap.distributed():
        training = Training()

        assert list(range(16)) == everyones(training.train(loader()))
        assert list(range(16)) == everyones(training.train(parwrap.replicate(loader(nodesplitter=webdataset.split_by_node))))


class DividedByWorkers(IterableDataset):
    def __len__(self):
        return 12

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 12, info.num_workers))


@pytest.mark.ranks(2)
def test_the_length_of_a_stream_that_workers_divide_is_the_number_of_its_batches():
    with parwrap.distributed():
        training, loader = Training(), DataLoader(DividedByWorkers(), batch_size=2, num_workers=2)
        batches = 0
        for _ in loader:
            batches, inside = batches + 1, len(loader)
            training.step()

        assert [4, 4, 4] == [batches, inside, len(loader)]
