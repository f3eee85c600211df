from itertools import count, islice

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from parwrap.data.samplers import DealtBatches, SplitBatches, distributed_sampler, is_plain, share_length, with_indices


def loader(samples=10, **options):
    return DataLoader(range(samples), **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batches", [1, 2, 5, 6])
def test_dealt_batches_cover_all_and_every_rank_gets_equally_many(size, batches):
    dealt = [list(DealtBatches(range(batches), rank, size)) for rank in range(size)]

    assert set(range(batches)) == {batch for each in dealt for batch in each}
    assert {len(DealtBatches(range(batches), 0, size))} == {len(each) for each in dealt}


def test_batches_are_dealt_in_turn_and_the_last_round_is_filled_up_from_the_first():
    assert [[0, 3], [1, 4], [2, 0]] == [list(DealtBatches(range(5), rank, 3)) for rank in range(3)]
    assert [[0], [0], [0]] == [list(DealtBatches(range(1), rank, 3)) for rank in range(3)]


def test_a_stream_without_end_is_dealt_lazily():
    assert [1, 3, 5] == list(islice(DealtBatches(count(), 1, 2), 3))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_split_batches_hold_every_sample_once_in_order_and_weigh_by_samples(size):
    batches = [[0, 1, 2, 3, 4], [5, 6], [7]]
    splits = [SplitBatches(batches, rank, size) for rank in range(size)]
    parts = [list(split) for split in splits]
    for index, batch in enumerate(batches):
        weights = [split.weights[index] for split in splits]

        assert batch == [sample for rank in range(size) if weights[rank] for sample in parts[rank][index]]
        assert [len(parts[rank][index]) * size / len(batch) if weights[rank] else 0 for rank in range(size)] == weights
        assert size == pytest.approx(sum(weights))


def test_a_rank_for_which_nothing_is_left_takes_part_at_weight_zero():
    split = SplitBatches([[7]], rank=2, size=3)

    assert [[7]] == list(split)
    assert [0.0] == list(split.weights)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"shuffle": True, "batch_size": 3}, True),
        ({"batch_size": None}, True),
        ({"sampler": RandomSampler(range(10), replacement=True)}, False),
        ({"sampler": RandomSampler(range(10), num_samples=5)}, False),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, False),
        ({"sampler": [3, 1, 2]}, False),
        ({"batch_sampler": BatchSampler(RandomSampler(range(10)), 2, False)}, False),
        ({"batch_sampler": [[1, 2], [3]]}, False),
    ],
)
def test_plain_loaders_take_every_sample_once(options, plain):
    assert plain == is_plain(loader(**options))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"shuffle": True}, {"batch_size": None}, {"sampler": [0, 1, 2]}]
)
def test_the_length_of_a_share_is_that_of_the_batches_a_rank_gets(options, size):
    whole = loader(**options)
    drawn = whole.sampler if whole.batch_sampler is None else whole.batch_sampler
    if is_plain(whole):
        sampler = distributed_sampler(whole, 0, size, seed=0)
        indices = sampler if whole.batch_sampler is None else BatchSampler(sampler, whole.batch_size, whole.drop_last)
    else:
        indices = DealtBatches(drawn, 0, size)

    assert len(list(with_indices(whole, indices))) == share_length(whole, len(whole), size)


class Special(DataLoader):
    mark = "kept"


def test_a_copy_with_other_indices_keeps_everything_else():
    whole = Special(range(10), batch_size=2, collate_fn=lambda batch: torch.tensor(batch) * 10)
    before = dict(vars(Special)), dict(vars(whole))
    part = with_indices(whole, [[1, 2], [3]])

    assert [[10, 20], [30]] == [batch.tolist() for batch in part]
    assert (Special, "kept", 5, 2) == (type(part), part.mark, len(whole), len(part))
    assert before == (dict(vars(Special)), dict(vars(whole)))
