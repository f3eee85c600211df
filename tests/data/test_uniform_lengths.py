"""Batches of about the same length: properties for any lengths, sizes and ranks, without a process group."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import parwrap
from parwrap import UniformLengthBatchSampler
from parwrap.errors import UsageError

LENGTHS = st.lists(st.integers(1, 60) | st.integers(1, 5), max_size=150)
RANKS = st.integers(1, 8)
SIZES = st.fixed_dictionaries({"batch_size": st.integers(1, 12)}, optional={"max_tokens": st.integers(60, 200)}) | st.fixed_dictionaries(
    {"max_tokens": st.integers(60, 200)}
)


def rounds_of(sampler, ranks):
    """The batches of one pass, in steps of the ranks."""
    batches = list(sampler.for_ranks(ranks))
    return [batches[start : start + ranks] for start in range(0, len(batches), ranks)]


def cost(batch, lengths, multiple_of=1):
    return len(batch) * -(-max(lengths[i] for i in batch) // multiple_of) * multiple_of


def long_tailed(samples, cap=None):
    lengths = np.random.default_rng(0).lognormal(4, 0.8, samples).astype(int) + 1
    return np.minimum(lengths, cap) if cap else lengths


def waste(batches, lengths):
    """Pad tokens among all tokens."""
    return 1 - sum(lengths) / sum(cost(batch, lengths) for batch in batches)


@given(LENGTHS, SIZES, RANKS, st.integers(0, 3), st.booleans(), st.sampled_from([1, 8]))
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_once_in_batches_that_keep_to_their_size(lengths, size, ranks, epoch, shuffle, multiple_of):
    multiple_of = 1 if "max_tokens" in size else multiple_of
    sampler = UniformLengthBatchSampler(lengths, **size, shuffle=shuffle, multiple_of=multiple_of)
    sampler.set_epoch(epoch)
    rounds = rounds_of(sampler, ranks)
    batches = [batch for each in rounds for batch in each]

    assert list(range(len(lengths))) == sorted(sample for batch in batches for sample in batch)
    assert len(sampler.for_ranks(ranks)) == len(batches)
    assert all(0 < len(batch) <= size.get("batch_size", len(lengths)) for batch in batches)
    assert all(cost(batch, lengths) <= size.get("max_tokens", 10**9) for batch in batches)


@given(LENGTHS, SIZES, RANKS, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_ranks_step_equally_often_with_batches_of_one_size(lengths, size, ranks, epoch):
    sampler = UniformLengthBatchSampler(lengths, **size)
    sampler.set_epoch(epoch)
    rounds = rounds_of(sampler, ranks)
    incomplete = [each for each in rounds if len(each) < ranks]
    uneven = [each for each in rounds if len({len(batch) for batch in each}) > 1]

    assert incomplete in ([], rounds[-1:])
    assert not incomplete or len(lengths) < ranks or all(len(batch) == 1 for batch in incomplete[0])
    assert len(uneven) <= 1
    assert all(max(map(len, each)) - min(map(len, each)) <= 1 for each in rounds)


@given(LENGTHS, SIZES, RANKS)
@settings(max_examples=40, deadline=None)
def test_the_longest_samples_of_a_step_are_one_on_each_rank(lengths, size, ranks):
    for each in rounds_of(UniformLengthBatchSampler(lengths, **size), ranks):
        longest_first = sorted((lengths[i] for batch in each for i in batch), reverse=True)

        assert longest_first[: len(each)] == sorted((max(lengths[i] for i in batch) for batch in each), reverse=True)


@given(LENGTHS.filter(len), st.integers(1, 12), RANKS)
@settings(max_examples=40, deadline=None)
def test_padding_is_bounded_by_the_slack_and_the_few_that_are_longest(lengths, batch_size, ranks):
    sampler = UniformLengthBatchSampler(lengths, batch_size, slack=0.1)
    padded = sum(cost(batch, lengths) for each in rounds_of(sampler, ranks) for batch in each)
    longest_round = ranks * batch_size * max(lengths)

    assert padded - sum(lengths) <= 0.1 * padded + 2 * longest_round


@given(LENGTHS, st.integers(1, 12), RANKS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_number_of_batches_is_that_of_distributed_sampler(lengths, batch_size, ranks, drop_last):
    sampler = UniformLengthBatchSampler(lengths, batch_size, drop_last=drop_last)
    share = len(lengths) / (ranks * batch_size)
    batches = list(sampler.for_ranks(ranks))

    assert (int(share) if drop_last else -int(-share // 1)) == -(-len(batches) // ranks)
    assert not drop_last or all(len(batch) == batch_size for batch in batches)


@given(LENGTHS, SIZES, RANKS)
@settings(max_examples=40, deadline=None)
def test_all_rounds_are_whole_unless_samples_are_few_or_make_a_batch_each(lengths, size, ranks):
    batches = list(UniformLengthBatchSampler(lengths, **size).for_ranks(ranks))

    assert len(batches) % ranks == 0 or len(lengths) < ranks or {1} == set(map(len, batches))


def test_without_shuffle_the_last_samples_are_those_that_are_dropped():
    sampler = UniformLengthBatchSampler([3, 9, 4, 8, 3], batch_size=2, shuffle=False, drop_last=True)

    assert [[[1, 3], [2, 0]]] * 2 == [list(sampler) for _ in range(2)]


@given(LENGTHS, SIZES, RANKS)
@settings(max_examples=30, deadline=None)
def test_ranks_of_distributed_code_draw_their_parts_of_the_same_pass(lengths, size, ranks):
    rounds = rounds_of(UniformLengthBatchSampler(lengths, **size, seed=3), ranks)
    whole = [each for each in rounds if len(each) == ranks]
    for rank in range(ranks):
        sampler = UniformLengthBatchSampler(lengths, **size, seed=3, num_replicas=ranks, rank=rank)
        drawn = list(sampler)

        assert len(rounds) == len(sampler) == len(drawn)
        assert drawn[: len(whole)] == [each[rank] for each in whole]


@pytest.mark.parametrize(("options", "ranks"), [({"batch_size": 16}, 1), ({"batch_size": 16}, 2), ({"max_tokens": 4096}, 4)])
def test_long_tailed_lengths_waste_less_than_5_percent_and_ranks_wait_for_less_than_1(options, ranks):
    lengths = long_tailed(20000, cap=1024)
    rounds = rounds_of(UniformLengthBatchSampler(lengths, **options), ranks)
    costs = np.array([[cost(batch, lengths) for batch in each] for each in rounds])
    waited = 1 - costs.mean(axis=1).sum() / costs.max(axis=1).sum()

    assert waste([batch for each in rounds for batch in each], lengths) < 0.05
    assert waited < 0.01
    assert 0.5 < waste(torch.randperm(20000).view(-1, 16).tolist(), lengths)


@pytest.mark.parametrize(("options", "samples"), [({"batch_size": 8}, 250), ({"batch_size": 8}, 2003), ({"max_tokens": 2000}, 2003)])
def test_passes_differ_in_order_and_in_who_is_together_also_of_the_longest(options, samples):
    lengths = long_tailed(samples, cap=1500)
    sampler = UniformLengthBatchSampler(lengths, **options)
    longest = int(lengths.argmax())
    passes = [list(sampler) for _ in range(6)]

    assert len({len(batches) for batches in passes}) == 1
    assert len({tuple(map(tuple, batches)) for batches in passes}) == 6
    assert len({frozenset(batch) for batches in passes for batch in batches if longest in batch}) > 1
    together = [{frozenset(batch) for batch in batches} for batches in passes]
    assert len(together[0] & together[1]) < 0.25 * len(together[0])


def test_what_comes_first_is_as_long_as_what_comes_last():
    lengths = long_tailed(20000)
    batches = list(UniformLengthBatchSampler(lengths, 16))
    means = np.array([np.mean(lengths[batch]) for batch in batches])

    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.1
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_a_seed_and_an_epoch_are_an_order():
    lengths = long_tailed(300)
    counted = UniformLengthBatchSampler(lengths, 8, seed=5)
    passes = [list(counted) for _ in range(3)]
    told = UniformLengthBatchSampler(torch.tensor(lengths), 8, seed=5)
    told.set_epoch(2)

    assert list(told) == passes[2]
    assert list(UniformLengthBatchSampler(lengths.tolist(), 8, seed=5)) == passes[0]
    assert list(UniformLengthBatchSampler(lengths, 8, seed=6)) != passes[0]


def test_without_a_seed_it_draws_one_number_of_torchs_as_a_shuffled_loader_does():
    lengths = long_tailed(100)
    torch.manual_seed(1)
    first = list(UniformLengthBatchSampler(lengths, 8, seed=None))
    after = torch.rand(1)
    torch.manual_seed(1)
    list(torch.utils.data.RandomSampler(lengths))

    assert after == torch.rand(1)
    generator = torch.Generator().manual_seed(1)
    assert first == list(UniformLengthBatchSampler(lengths, 8, seed=generator))
    assert first != list(UniformLengthBatchSampler(lengths, 8, seed=generator))


def test_samples_of_one_length_are_shuffled_wholly():
    sampler = UniformLengthBatchSampler([7] * 1000, 10)

    assert len({sample // 100 for batch in list(sampler)[:10] for sample in batch}) == 10


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "the batch size is not set: pass batch_size, the number of samples in a batch, or max_tokens, the number of tokens, or both."),
        ({"batch_size": 0}, "batch_size=0 is not a positive integer."),
        ({"max_tokens": 2.5}, "max_tokens=2.5 is not a positive integer."),
        ({"batch_size": 2, "multiple_of": True}, "multiple_of=True is not a positive integer."),
        ({"batch_size": 2, "slack": 1}, "slack=1 is not a fraction of the longest sample in the range [0, 1)."),
        (
            {"max_tokens": 9, "drop_last": True},
            "drop_last drops samples that do not fill a batch, but with max_tokens batches have no fixed size: remove drop_last.",
        ),
        (
            {"max_tokens": 8},
            "sample 1 takes 9 tokens, more than the limit of a batch, max_tokens=8: raise max_tokens, or shorten or drop the sample.",
        ),
        (
            {"max_tokens": 9, "multiple_of": 8},
            "sample 1 takes 16 tokens, rounded up to multiple_of=8, more than the limit of a batch, max_tokens=9: raise "
            "max_tokens, or shorten or drop the sample.",
        ),
        ({"batch_size": 2, "rank": 1}, "num_replicas=None and rank=1: pass both, or neither."),
        ({"batch_size": 2, "rank": 2, "num_replicas": 2}, "rank=2 is not in the range [0, 2)."),
        (
            {"batch_size": 2, "lengths": [1.5]},
            "lengths has shape (1,) and dtype float64: pass one integer for each sample of the dataset.",
        ),
        ({"batch_size": 2, "lengths": [3, -1]}, "sample 1 has a length of -1: lengths must be non-negative integers."),
    ],
)
def test_what_cannot_mean_anything_is_refused(options, text):
    with pytest.raises(UsageError) as refusal:
        UniformLengthBatchSampler(**{"lengths": [3, 9], **options})

    assert text == str(refusal.value)


def test_a_sampler_that_is_for_one_rank_is_not_dealt_out_once_more():
    with pytest.raises(UsageError) as refusal:
        UniformLengthBatchSampler([1, 2], 1, num_replicas=2, rank=1).for_ranks(2)

    assert str(refusal.value) == (
        "a UniformLengthBatchSampler was made for rank 1 of 2, but parwrap would divide its batches again: remove num_replicas and rank."
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_in_a_scope_its_batches_are_dealt_out_or_split(batch):
    lengths = long_tailed(101)
    loader = DataLoader(range(101), batch_sampler=UniformLengthBatchSampler(lengths, max_tokens=800))
    whole = UniformLengthBatchSampler(lengths, max_tokens=800).for_ranks(2 if batch == "per_rank" else 1)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.01)

    @parwrap.distributed(batch=batch)
    def train():
        seen = []
        for x in loader:
            seen.append(x.tolist())
            (parameter * x.float().mean()).backward()
            optimizer.step()
        return seen, len(loader)

    seen, length = train()
    ranks = 2 if batch == "per_rank" else 1
    steps = [sorted({*one, *other}) for one, other in zip(*parwrap.gather(seen), strict=True)]
    batches = iter(whole)

    assert steps == [sorted(itertools.chain(*step)) for step in zip(*[batches] * ranks, strict=True)]
    assert len(whole) == length * ranks
    assert list(range(101)) == sorted(itertools.chain(*steps))
