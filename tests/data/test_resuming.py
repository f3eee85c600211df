"""The rest of a pass, for any number of samples, batch size, steps and ranks before and after; no process group is needed."""

from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from parwrap.data.resumed_pass import RestOfBatches, RestOfSamples
from parwrap.data.samplers import DealtBatches, SplitBatches

RANKS = st.integers(1, 8)


def order_of(samples):
    sampler = DistributedSampler(range(samples), 1, 0, seed=samples)
    sampler.set_epoch(2)
    return list(sampler)


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    steps=st.integers(0, 12),
    ranks=RANKS,
    drop_last=st.booleans(),
    uneven=st.sampled_from(["pad", "drop"]),
)
def test_the_same_ranks_go_on_as_distributed_sampler_does(samples, batch_size, steps, ranks, drop_last, uneven):
    for rank in range(ranks):
        sampler = DistributedSampler(range(samples), ranks, rank, seed=samples, drop_last=uneven == "drop" and samples >= ranks)
        sampler.set_epoch(2)
        rest = RestOfSamples(order_of(samples), steps * batch_size * ranks, rank, ranks, uneven if samples >= ranks else "pad")

        assert list(BatchSampler(sampler, batch_size, drop_last))[steps:] == list(BatchSampler(rest, batch_size, drop_last))


@given(samples=st.integers(1, 60), done=st.integers(0, 70), ranks=RANKS)
def test_what_is_left_goes_to_other_ranks_once_and_equally(samples, done, ranks):
    order = order_of(samples)
    shares = [list(RestOfSamples(order, done, rank, ranks)) for rank in range(ranks)]
    dealt = [sample for turn in zip(*shares, strict=True) for sample in turn]
    left = order[done:]

    assert left == dealt[: len(left)]
    assert len(dealt) - len(left) < ranks
    assert {len(RestOfSamples(order, done, 0, ranks))} == {len(share) for share in shares}


@given(number=st.integers(1, 40), steps=st.integers(0, 10), ranks=RANKS, ahead=st.integers(0, 5))
def test_the_same_ranks_are_dealt_the_batches_that_would_have_come(number, steps, ranks, ahead):
    batches = [[each] for each in range(number)]
    for rank in range(ranks):
        drawing = iter(batches)
        rest = RestOfBatches(drawing, steps * ranks, steps * ranks + ahead, ranks)

        assert batches[steps * ranks + ahead :] == list(drawing)
        rest = RestOfBatches(batches, steps * ranks, steps * ranks + ahead, ranks)
        assert list(DealtBatches(batches, rank, ranks))[steps:] == list(DealtBatches(rest, rank, ranks))


@given(number=st.integers(1, 40), done=st.integers(0, 50), ranks=RANKS)
def test_the_batches_that_are_left_go_to_other_ranks_once_and_equally(number, done, ranks):
    shares = [list(DealtBatches(RestOfBatches(range(number), done, done, ranks), rank, ranks)) for rank in range(ranks)]
    dealt = [batch for turn in zip(*shares, strict=True) for batch in turn]
    left = list(range(number))[done:]

    assert left == dealt[: len(left)]
    assert len(dealt) - len(left) < ranks


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 9), done=st.integers(0, 9), ranks=RANKS)
def test_batches_that_are_split_go_on_in_the_order_of_one_process(samples, batch_size, done, ranks):
    batches = list(BatchSampler(range(samples), batch_size, False))
    splits = [SplitBatches(RestOfBatches(batches, done, done, ranks), rank, ranks) for rank in range(ranks)]
    parts = [list(split) for split in splits]
    together = [
        [sample for part, split in zip(step, splits, strict=True) if split.weights[number] for sample in part]
        for number, step in enumerate(zip(*parts, strict=True))
    ]

    assert batches[done:] == together
