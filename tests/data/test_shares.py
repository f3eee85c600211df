"""What a training pass yields: by ``DistributedSampler``, every N-th batch or item, or a part of each batch; and how parts are weighed."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

import parwrap
from drawn_order import DrawnOrder
from parwrap.errors import RankMismatchError, UsageError
from training import Training, everyones, samples


def batches_of(loader, training):
    """The samples of each batch of a training pass."""
    return [samples(batch) for batch in loader if not training.step()]


def training_then_seed(seed):
    """A model that trains, which has drawn its weights before the streams are seeded."""
    training = Training()
    torch.manual_seed(seed)
    return training


# per rank: DistributedSampler


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_a_plain_loader_is_read_by_distributed_sampler(shuffle, drop_last, uneven):
    with parwrap.distributed(seed=3, uneven=uneven):
        training, loader = training_then_seed(3), DataLoader(range(20), batch_size=3, shuffle=shuffle, drop_last=drop_last)
        epochs = [batches_of(loader, training) for _ in range(3)]

        assert [len(loader)] * 3 == list(map(len, epochs))
    sampler = DrawnOrder(range(20), shuffle=shuffle, seed=3, drop_last=uneven == "drop")

    assert [list(BatchSampler(sampler, 3, drop_last)) for _ in epochs] == epochs


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_ranks_read_in_turn_what_one_process_reads(options):
    def read(train):
        shuffled = [DataLoader(range(12), batch_size=2, shuffle=True, **options) for _ in range(2)]
        seen = [train(loader) for loader in (*shuffled, shuffled[0])]
        return seen, torch.rand(1)

    torch.manual_seed(5)
    expected, drawn = read(lambda loader: [sample for batch in loader for sample in batch.tolist()])
    with parwrap.distributed(seed=5):
        seen, drawn_after = read(training_then_seed(5).train)

    assert [each[parwrap.rank() :: 2] for each in expected] == seen
    assert drawn == drawn_after


@pytest.mark.ranks(2)
def test_the_order_goes_on_in_the_next_call_and_from_a_state_of_the_stream():
    @parwrap.distributed
    def epoch():
        return Training().train(DataLoader(range(12), batch_size=2, shuffle=True))

    torch.manual_seed(5)
    seen = [epoch()]
    state = torch.get_rng_state()
    seen += [epoch(), epoch()]
    torch.manual_seed(1)
    torch.set_rng_state(state)

    assert seen[1:] == [epoch(), epoch()]
    assert 3 == len({str(each) for each in seen})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_rank_that_has_drawn_more_reads_in_another_order_which_is_an_error(batch):
    with parwrap.distributed(batch=batch):
        training = Training()
        torch.rand(1 + parwrap.rank())
        with pytest.raises(RankMismatchError, match="the samples in different orders"):
            training.train(DataLoader(range(12), batch_size=2, shuffle=True))


@pytest.mark.ranks(2)
def test_a_stream_that_draws_nothing_does_not_mind_what_a_rank_has_drawn():
    with parwrap.distributed():
        training = Training()
        torch.rand(1 + parwrap.rank())

        assert list(range(8)) == everyones(training.train(DataLoader(Numbers(), batch_size=2)))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.ranks(2)
def test_numbers_that_a_fork_of_the_stream_draws_in_a_pass_do_not_repeat_the_order():
    def train(training):
        loader, seen = DataLoader(range(12), batch_size=2, shuffle=True), []
        for _ in range(3):
            for batch in loader:
                training.step()
                seen += samples(batch)
                with torch.random.fork_rng():
                    torch.manual_seed(42), torch.manual_seed(43), torch.randn(1)
        return seen

    training = Training()
    torch.manual_seed(5)
    expected = train(training)
    with parwrap.distributed(seed=5):
        assert [*expected[:12][parwrap.rank() :: 2], *expected[12:24][parwrap.rank() :: 2], *expected[24:][parwrap.rank() :: 2]] == train(
            training_then_seed(5)
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_persistent_workers_follow_the_epochs_of_the_scripts_distributed_sampler(batch):
    with parwrap.distributed(batch=batch):
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        training = Training()
        loader = DataLoader(range(12), batch_size=2, sampler=sampler, num_workers=1, persistent_workers=True)
        seen = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            seen.append(training.train(loader))
        del loader

    assert 3 == len({str(each) for each in seen})
    assert 0 == sampler.seed


@pytest.mark.ranks(2)
def test_the_order_is_drawn_from_the_loaders_generator_if_it_has_one():
    with parwrap.distributed(seed=3):
        loader = DataLoader(range(20), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(11))
        seen = Training().train(loader)

    assert list(DrawnOrder(range(20), seed=11)) == seen


@pytest.mark.ranks(2)
def test_the_seed_is_that_of_the_script():
    with parwrap.distributed():
        seen = training_then_seed(11).train(DataLoader(range(20), batch_size=2, shuffle=True))

    assert list(DrawnOrder(range(20), seed=11)) == seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("same", [False, True], ids=["two loaders", "one loader"])
def test_zipped_loaders_never_pair_a_sample_with_itself(same):
    with parwrap.distributed(seed=0):
        training = Training()
        loader, other = DataLoader(range(100), shuffle=True), DataLoader(range(100), shuffle=True)
        pairs = [(one.item(), two.item()) for one, two in zip(loader, other, strict=True) if not training.step()]

    assert sum(one == two for one, two in pairs) < 10


@pytest.mark.ranks(2)
def test_a_dataset_that_grows_is_shared_out_whole():
    memory = list(range(8))
    with parwrap.distributed():
        training, loader, seen = Training(), DataLoader(memory, batch_size=2), []
        for _ in range(2):
            seen.append(everyones(training.train(loader)))
            memory += range(8, 16)

    assert [list(range(8)), list(range(16))] == seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_distributed_sampler_of_the_script_is_copied_for_this_rank(replicas, batch):
    with parwrap.distributed(batch=batch):
        sampler = DistributedSampler(range(12), num_replicas=replicas, rank=0)
        training, loader = Training(), DataLoader(range(12), batch_size=2, sampler=sampler)
        seen = []
        for epoch in (0, 0, 3):
            sampler.set_epoch(epoch)
            seen.append(training.train(loader))
            if batch == "per_rank":
                expected = DistributedSampler(range(12), parwrap.world_size(), parwrap.rank())
                expected.set_epoch(epoch)

                assert list(expected) == seen[-1]
            assert list(range(12)) == everyones(seen[-1])
    assert (1, 0) == (replicas, sampler.rank) if replicas == 1 else (2, 0) == (sampler.num_replicas, sampler.rank)
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_batch_sampler_of_a_distributed_sampler_keeps_its_batch_size(replicas, batch):
    with parwrap.distributed(batch=batch):
        sampler = DistributedSampler(range(16), num_replicas=replicas, rank=0, shuffle=False)
        loader = DataLoader(range(16), batch_sampler=BatchSampler(sampler, 4, False))
        batches = batches_of(loader, Training())

        assert ([4, 4] if batch == "per_rank" else [2] * 4) == [len(each) for each in batches]
        assert len(batches) == len(loader)
        assert list(range(16)) == everyones([sample for each in batches for sample in each])


class Pairs:
    """A batch sampler that puts each sample beside its follower."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return ([index, index + 1] for index in self.sampler if index % 2 == 0)

    def __len__(self):
        return len(self.sampler) // 2


@pytest.mark.ranks(2)
def test_the_batches_of_another_batch_sampler_over_a_distributed_sampler_are_dealt_out():
    with parwrap.distributed():
        sampler = DistributedSampler(range(8), num_replicas=2, rank=0, shuffle=False)
        loader = DataLoader(range(8), batch_sampler=Pairs(sampler))

        assert [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][parwrap.rank()] == batches_of(loader, Training())
        assert 2 == len(loader)


@pytest.mark.ranks(2)
def test_the_length_of_a_distributed_sampler_is_that_of_a_share():
    with parwrap.distributed():
        loader = DataLoader(range(12), batch_size=2, sampler=DistributedSampler(range(12), num_replicas=2, rank=0))

        assert len(loader) == len(batches_of(loader, Training())) == len(loader) == 3


class Small(DistributedSampler):
    """Leaves out what is not small."""

    def __iter__(self):
        return (index for index in super().__iter__() if index < 8)


@pytest.mark.ranks(2)
def test_the_batches_of_the_scripts_own_kind_of_distributed_sampler_are_dealt_out():
    with parwrap.distributed():
        loader = DataLoader(range(16), batch_size=2, sampler=Small(range(16), num_replicas=1, rank=0, shuffle=False))

        assert [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][parwrap.rank()] == batches_of(loader, Training())


class Weighted(BatchSampler):
    """Has an attribute of its own that a queue of parwrap's samplers has, too."""

    weights = (0.5, 0.5)


@pytest.mark.ranks(2)
def test_attributes_of_the_scripts_own_batch_sampler_are_its_own():
    with parwrap.distributed():
        sampler, training = Small(range(16), num_replicas=2, rank=parwrap.rank(), shuffle=False), Training()
        loader = DataLoader(range(16), batch_sampler=Weighted(sampler, 2, False), num_workers=1, persistent_workers=True)

        assert batches_of(loader, training) == batches_of(loader, training)


def divided(options):
    """A loader with a sampler that gives this rank its share."""
    sampler = Small(range(16), num_replicas=2, rank=parwrap.rank(), shuffle=False)
    with parwrap.distributed(**options):
        loader = DataLoader(range(16), batch_size=2, sampler=sampler)
        return len(loader), batches_of(loader, Training())


@pytest.mark.ranks(2)
def test_unless_it_gives_each_rank_its_share():
    length, batches = divided({})

    assert 4 == length
    assert [[[0, 2], [4, 6]], [[1, 3], [5, 7]]][parwrap.rank()] == batches


@pytest.mark.ranks(2)
def test_the_batches_of_such_a_share_are_not_divided_again():
    with pytest.raises(UsageError) as error:
        divided({"batch": "global"})

    assert re.sub(r"\w+\.py:\d+", "PLACE", str(error.value)) == (
        'PLACE reads a DataLoader whose Small has divided the dataset already, but batch="global" divides each batch of the whole dataset. '
        "Make every rank draw the whole batches: pass num_replicas=1 and rank=0 to that sampler if it takes them, or write another sampler."
    )


# per rank: every N-th batch


def kept_samplers():
    return {
        "weighted": DataLoader(range(10), batch_size=2, sampler=WeightedRandomSampler([0.0] * 5 + [1.0] * 5, 8)),
        "subset": DataLoader(range(10), batch_size=2, sampler=SubsetRandomSampler([1, 3, 5, 7])),
        "replacement": DataLoader(range(10), batch_size=2, sampler=RandomSampler(range(10), replacement=True, num_samples=8)),
        "fewer": DataLoader(range(20), batch_size=2, sampler=SequentialSampler(range(6))),
        "custom": DataLoader(range(20), batch_size=2, sampler=Backwards(range(8))),
        "batch sampler": DataLoader(range(16), batch_sampler=BatchSampler(RandomSampler(range(16)), 4, False)),
        "custom batches": DataLoader(range(16), batch_sampler=Chunks(range(16))),
        "drawn batches": DataLoader(range(16), batch_sampler=DrawnChunks(range(16))),
        "ready batches": DataLoader(torch.arange(16.0).view(8, 2), batch_size=None, sampler=Backwards(range(8))),
    }


class Backwards(Sampler):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(range(len(self.data) - 1, -1, -1))

    def __len__(self):
        return len(self.data)


class Chunks(Backwards):
    def __iter__(self):
        return iter([list(self.data[start : start + 2]) for start in range(0, len(self.data), 2)])

    def __len__(self):
        return len(self.data) // 2


class DrawnChunks(Chunks):
    """Draws from torch for every batch."""

    def __iter__(self):
        for _ in range(len(self)):
            yield torch.randint(len(self.data), (2,)).tolist()


KEPT = ("weighted", "subset", "replacement", "fewer", "custom", "batch sampler", "custom batches", "drawn batches", "ready batches")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KEPT)
def test_batches_of_other_samplers_are_those_of_one_process_dealt_out(kind):
    torch.manual_seed(1)
    Training()
    loader = kept_samplers()[kind]
    expected = [[samples(batch) for batch in loader] for _ in range(2)]
    with parwrap.distributed(seed=1):
        training, loader = Training(), kept_samplers()[kind]
        for batches in expected:
            size = len(loader)
            actual = batches_of(loader, training)

            assert batches[parwrap.rank() :: 2] == actual[: len(batches[parwrap.rank() :: 2])]
            assert math.ceil(len(batches) / 2) == len(actual) == len(loader)
            assert kind == "fewer" or size == len(actual)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("uneven", "expected"),
    [("pad", [[[0, 1], [6, 7]], [[2, 3], [0, 1]], [[4, 5], [2, 3]]]), ("drop", [[[0, 1]], [[2, 3]], [[4, 5]]])],
)
def test_the_last_batches_are_padded_from_the_first_or_dropped(uneven, expected):
    with parwrap.distributed(uneven=uneven):
        loader = DataLoader(range(8), batch_sampler=Chunks(range(8)))

        assert expected[parwrap.rank()] == batches_of(loader, Training())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_items_without_batches_are_dealt_out(batch):
    with parwrap.distributed(seed=3, batch=batch):
        training, loader = training_then_seed(3), DataLoader(torch.arange(16.0).view(8, 2), batch_size=None, shuffle=True)
        seen = [int(batch[0] / 2) for batch in loader if not training.step()]

        assert 4 == len(loader)
    assert list(DrawnOrder(range(8), seed=3)) == seen


@pytest.mark.ranks(2)
def test_an_endless_sampler_is_drawn_lazily():
    with parwrap.distributed(seed=0):
        training = Training()
        loader = DataLoader(range(1000), batch_size=4, sampler=RandomSampler(range(1000), replacement=True, num_samples=10**10))
        batches = [tuple(samples(batch)) for batch in itertools.islice(loader, 5) if not training.step()]

        assert math.ceil(10**10 / 8) == len(loader)
        assert 10 == len({batch for each in parwrap.gather(batches) for batch in each})


@pytest.mark.ranks(2)
def test_fewer_samples_than_ranks():
    with parwrap.distributed():
        training = Training()
        assert [[0], [parwrap.rank()]] == [training.train(loader) for loader in (DataLoader([0]), DataLoader(range(2), batch_size=4))]


KEEP = re.escape(', or batch="global", which divides each batch, or start fewer ranks.')
DROPS, DROPS_LAST = 'because uneven="drop" skips what does not divide evenly', "drop_last=True drops a batch of fewer than 4 samples"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("uneven", "samples", "options", "text"),
    [
        (
            "drop",
            1,
            {},
            f'one process reads 1 batch of this loader of 1 sample in a pass, but each of 2 ranks reads none, {DROPS}. Use uneven="pad"',
        ),
        (
            "drop",
            1,
            {"batch_sampler": [[0]]},
            f'one process reads 1 batch of this loader in a pass, but each of 2 ranks reads none, {DROPS}. Use uneven="pad"',
        ),
        (
            "pad",
            5,
            {"batch_size": 4, "drop_last": True},
            f"one process reads 1 batch of this loader of 5 samples in .* because {DROPS_LAST}. Use drop_last=False",
        ),
        ("join", 5, {"batch_size": 4, "drop_last": True}, f"because {DROPS_LAST}. Use drop_last=False"),
        ("drop", 7, {"batch_size": 4, "drop_last": True}, f'{DROPS} and {DROPS_LAST}. Use uneven="pad" and drop_last=False'),
    ],
)
def test_a_pass_that_would_train_on_nothing_is_refused(uneven, samples, options, text):
    with pytest.raises(UsageError, match=rf"training.py:\d+ would train on nothing: .*{text}{KEEP}"), parwrap.distributed(uneven=uneven):
        Training().train(DataLoader(range(samples), **options))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"batch_size": 4, "drop_last": True}, {"batch_sampler": [[0, 1, 2, 3]]}])
def test_a_divided_batch_trains_on_something(options):
    with parwrap.distributed(batch="global", uneven="drop"):
        assert [0, 1, 2, 3][2 * parwrap.rank() :][:2] == Training().train(DataLoader(range(5), **options))


# batch="global"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=["0", "1", "persistent"])
def test_a_global_pass_takes_the_batches_of_one_process(workers):
    def loader():
        return DataLoader(range(11), batch_size=4, shuffle=True, **workers)

    torch.manual_seed(1)
    Training()
    alone = loader()
    expected = [[sorted(samples(batch)) for batch in alone] for _ in range(3)]
    with parwrap.distributed(batch="global", seed=1):
        training, together = Training(), loader()
        actual = []
        for _ in range(3):
            parts = parwrap.gather(batches_of(together, training))
            actual.append([sorted(one + two) for one, two in zip(*parts, strict=True)])

        assert 3 == len(together)
    assert expected == actual


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [each for each in KEPT if each != "ready batches"])
def test_a_global_pass_of_another_sampler_takes_the_batches_of_one_process(kind):
    torch.manual_seed(1)
    Training()
    loader = kept_samplers()[kind]
    expected = [[sorted(samples(batch)) for batch in loader] for _ in range(2)]
    with parwrap.distributed(batch="global", seed=1):
        training, loader = Training(), kept_samplers()[kind]
        for batches in expected:
            parts = parwrap.gather(batches_of(loader, training))

            assert batches == [sorted(one + two) for one, two in zip(*parts, strict=True)]


# weights


def numbers(count):
    x = torch.linspace(-1, 1, count, dtype=torch.float64).view(-1, 1)
    return TensorDataset(torch.cat([x, x**2], dim=1), x**3)


def trained(loader, reduction="mean", scale=1.0, epochs=2):
    """The weights that a plain loop comes to."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scale)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y, reduction=reduction).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def alone(function, *args, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return function(*args, **kwargs)


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.data = dataset

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


def by_own_batches(count, size, **options):
    return DataLoader(numbers(count), batch_sampler=BatchSampler(SequentialSampler(range(count)), size, False), **options)


BUILDS = {
    "in order": lambda count, size: DataLoader(numbers(count), batch_size=size),
    "workers": lambda count, size: DataLoader(numbers(count), batch_size=size, num_workers=1, persistent_workers=True),
    "shuffled": lambda count, size: DataLoader(numbers(count), batch_size=size, shuffle=True),
    "drop_last": lambda count, size: DataLoader(numbers(count), batch_size=size, drop_last=True),
    "stream": lambda count, size: DataLoader(Stream(numbers(count)), batch_size=size),
    "stream in a worker": lambda count, size: DataLoader(Stream(numbers(count)), batch_size=size, num_workers=1),
    "batch sampler": by_own_batches,
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", BUILDS)
def test_global_batches_give_the_weights_of_one_process(kind):
    expected = alone(trained, BUILDS[kind](98, 32))
    with parwrap.distributed(batch="global", seed=0):
        actual = trained(BUILDS[kind](98, 32))

    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [each for each in BUILDS if each != "batch sampler"])
def test_joined_ranks_give_the_weights_of_one_process_with_batches_of_all(kind):
    expected = alone(trained, BUILDS[kind](98, 96))
    with parwrap.distributed(uneven="join", seed=0):
        actual = trained(BUILDS[kind](98, 32))

    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(3)
def test_joined_batches_of_a_batch_sampler_count_by_their_samples():
    expected = alone(trained, by_own_batches(50, 24))
    with parwrap.distributed(uneven="join"):
        actual = trained(by_own_batches(50, 8))

    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", [{"batch": "global"}, {"uneven": "join"}], ids=["global", "join"])
def test_a_loss_that_is_a_sum_is_summed_over_a_global_batch_and_averaged_over_joined_ones(options):
    together = "batch" in options
    expected = alone(trained, BUILDS["in order"](194, 32 if together else 96), "sum", 0.01 if together else 0.01 / 3)
    with parwrap.distributed(loss="sum", **options):
        actual = trained(BUILDS["in order"](194, 32), "sum", 0.01)

    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("options", "reduction", "warns"), [({}, "sum", True), ({}, "mean", False), ({"loss": "sum"}, "sum", False)])
def test_a_loss_that_is_a_sum_without_the_option_is_named_once(options, reduction, warns):
    with parwrap.distributed(batch="global", **options), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(BUILDS["in order"](64, 16), reduction, 0.01)

    named = [str(each.message) for each in said if 'trains on a loss with reduction="sum"' in str(each.message)]
    assert [True] * warns == ['Write loss="sum" (--loss sum)' in each for each in named]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["built late", "replicated", "without a loader"])
def test_a_loss_that_is_a_sum_is_not_summed_over_ranks_that_read_everything(how):
    def built_late():
        model, optimizer = nn.Linear(2, 1).double(), None
        nn.init.constant_(model.weight, 0.5), nn.init.zeros_(model.bias)
        loader = BUILDS["in order"](64, 16)
        batches = list(loader) if how == "without a loader" else parwrap.replicate(loader) if how == "replicated" else loader
        for _ in range(3):
            for x, y in batches:
                optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.001)  # so the first pass is whole
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y, reduction="sum").backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    expected = alone(built_late)
    with parwrap.distributed(batch="global", loss="sum"):
        actual = built_late()

    assert expected == pytest.approx(actual, abs=1e-12)


class WithBadSamples(Dataset):
    """Numbers, some of which cannot be read."""

    def __init__(self):
        self.data = numbers(48)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index] if index % 5 and index != 1 else None


def without_bad(batch):
    return default_collate([sample for sample in batch if sample is not None])


LEFT_OUT = {
    "in order": lambda: DataLoader(WithBadSamples(), 12, collate_fn=without_bad),
    "workers": lambda: DataLoader(WithBadSamples(), 12, collate_fn=without_bad, num_workers=1),
    "stream": lambda: DataLoader(Stream(WithBadSamples()), 12, collate_fn=without_bad),
}


@pytest.mark.ranks(3, fresh=True)
@pytest.mark.parametrize("options", [{"batch": "global"}, {"uneven": "join"}], ids=str)
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_samples_that_the_collate_function_leaves_out_are_an_error_at_the_line_of_the_backward(kind, options):
    with pytest.raises(UsageError, match=r"test_shares\.py:\d+ trains on a batch of \d+, for which .* \d+ samples .*mean_over_ranks"):
        parwrap.distributed(**options)(trained)(LEFT_OUT[kind]())


COUNTING = {
    "cross entropy": lambda output, y: nn.functional.cross_entropy(output, (y > 0).long()[:, 0]),
    "mean_over_ranks": lambda output, y: parwrap.mean_over_ranks((output[:, :1] - y).square().sum(), len(y)),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", COUNTING)
def test_but_not_of_losses_that_count_their_samples(name):
    def trained():
        model = nn.Linear(2, 2).double()
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in LEFT_OUT["in order"]():
            optimizer.zero_grad()
            COUNTING[name](model(x), y).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    expected = alone(trained)
    with parwrap.distributed(batch="global"):
        actual = trained()

    assert expected == pytest.approx(actual, abs=1e-12)


@pytest.mark.ranks(2)
def test_closures_weigh_alike():
    def fitted():
        model = nn.Linear(2, 1).double()
        with torch.no_grad():
            model.weight.fill_(0.5), model.bias.zero_()
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=5)
        for x, y in DataLoader(numbers(51), batch_size=25):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return model.weight.flatten().tolist()

    expected = alone(fitted)
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(fitted(), abs=1e-9)


# loaders of all kinds


class Dicts(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.tensor(float(index))}


def of_dicts(batch):
    return default_collate(batch)["x"]


class Doubled(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class Infinite(DataLoader):
    """One pass for all epochs, begun when the loader is built, as ultralytics writes it to keep workers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.ranks(2)
def test_loaders_of_all_kinds_are_shared_out():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with parwrap.distributed():
        training = Training()
        kinds = {
            "map": DataLoader(Dicts(), batch_size=2, collate_fn=of_dicts),
            "concat": DataLoader(ConcatDataset([range(4), range(4, 8)]), batch_size=2),
            "pinned": DataLoader(range(8), batch_size=2, num_workers=1, prefetch_factor=4),
            "stateful": stateful(range(8), batch_size=2),
            "stateful in workers": stateful(range(8), batch_size=2, num_workers=1),
        }
        seen = {kind: training.train(loader) for kind, loader in kinds.items()}
        doubled = training.train(parwrap.shard(Doubled(range(8), batch_size=2)))

    expected = list(range(parwrap.rank(), 8, 2))
    assert dict.fromkeys(kinds, expected) == seen
    assert [2 * each for each in expected] == doubled


@pytest.mark.ranks(2)
@pytest.mark.parametrize("early", [False, True], ids=["after the optimizer", "before it"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_one_pass_is_dealt_out(early, workers):
    with parwrap.distributed():
        if early:
            loader, training = Infinite(range(16), batch_size=4, num_workers=workers), Training()
        else:
            training, loader = Training(), Infinite(range(16), batch_size=4, num_workers=workers)
        seen = everyones(training.train(loader) + training.train(loader))
        del loader

    assert {4} == set(Counter(seen).values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_persistent_workers_read_a_new_order_in_each_epoch(batch):
    with parwrap.distributed(seed=0, batch=batch):
        training = Training()
        loader = DataLoader(range(16), batch_size=4, num_workers=1, persistent_workers=True, shuffle=True)
        plain = DataLoader(range(16), batch_size=4, shuffle=True)
        epochs = [training.train(loader) for _ in range(3)]

        assert [list(range(16))] * 3 == [everyones(each) for each in epochs]
    del plain
    assert 3 == len({str(each) for each in epochs})


@pytest.mark.ranks(2)
def test_persistent_workers_survive_a_pass_that_was_left_early():
    with parwrap.distributed(seed=0):
        training, loader = Training(), DataLoader(range(16), batch_size=2, num_workers=1, persistent_workers=True, shuffle=True)
        for batch in loader:
            training.step(batch)
            break

        assert list(range(16)) == everyones(training.train(parwrap.shard(loader)))


@pytest.mark.ranks(2)
def test_persistent_workers_read_everything_in_evaluation_between_training_passes():
    with parwrap.distributed(seed=0):
        training, loader = Training(), DataLoader(range(16), batch_size=2, num_workers=1, persistent_workers=True)
        for _ in range(2):
            trained_on = training.train(loader)
            with torch.no_grad():
                assert list(range(16)) == [sample for batch in loader for sample in samples(batch)]
            assert list(range(parwrap.rank(), 16, 2)) == trained_on
        del loader


@pytest.mark.ranks(2)
def test_more_workers_than_cores_are_said_once_on_rank_0(monkeypatch, capsys):
    monkeypatch.setattr("parwrap.data.loaders.cores", lambda: 1)

    @parwrap.distributed
    def train(workers):
        for _ in range(2):
            list(DataLoader(range(8), num_workers=workers))

    train(1)
    fits = capsys.readouterr().err
    train(2)
    said = capsys.readouterr().err

    assert "workers" not in fits
    assert said.count("starts 2 workers on each of 2 ranks of this node, on 1 core. num_workers=1 is") == (parwrap.rank() == 0)


@pytest.mark.ranks(2)
def test_quiet_says_nothing_of_workers(monkeypatch, capsys):
    monkeypatch.setattr("parwrap.data.loaders.cores", lambda: 1)
    monkeypatch.setenv("PARWRAP_QUIET", "1")
    parwrap.distributed(lambda: list(DataLoader(range(8), num_workers=2)))()

    assert "workers" not in capsys.readouterr().err


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("batch_size", "warned"), [(1, True), (2, False)])
def test_batches_with_fewer_samples_than_ranks_are_named(batch_size, warned, recwarn):
    with parwrap.distributed(batch="global"):
        for x in parwrap.shard(DataLoader(torch.arange(4.0), batch_size=batch_size)):
            assert len(x) == 1

    texts = [str(each.message) for each in recwarn]
    assert warned == any("makes batches of 1 sample, which 2 ranks cannot share" in text for text in texts)


class ShowsItsData(DataLoader):
    """Reads numbers of samples, which its ``collate_fn`` looks up; outside of ``__iter__``, its dataset is the data."""

    iterates = False

    def __init__(self, data, **options):
        self.data = data
        super().__init__(range(len(data)), collate_fn=lambda numbers: [data[n] for n in numbers], **options)

    def __iter__(self):
        self.iterates = True
        try:
            return super().__iter__()
        finally:
            self.iterates = False

    def __getattribute__(self, name):
        return super().__getattribute__("data" if name == "dataset" and not super().__getattribute__("iterates") else name)


@pytest.mark.ranks(2)
def test_a_loader_reads_the_dataset_that_its_class_shows_while_it_makes_an_iterator():
    data = {number: 10 * number for number in range(8)}
    with parwrap.distributed():
        loader = ShowsItsData(data, batch_size=2)
        whole = [x for batch in loader for x in batch]
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        shared = []
        for batch in loader:
            shared += batch
            optimizer.step()

    assert ([*data.values()], [*data.values()][parwrap.rank() :: 2]) == (whole, shared)
