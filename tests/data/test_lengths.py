"""Rule 3: the length of a loader."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import parwrap
from parwrap.data.loader_lengths import shows_share, stands_above
from parwrap.data.samplers import (
    DealtBatches,
    SplitBatches,
    block,
    copied_with,
    distributed_sampler,
    is_plain,
    lacks_samples,
    samples_in,
    share_length,
    shuffles,
)
from parwrap.places import Line
from training import Training, read


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_before_its_first_pass_a_length_is_that_of_a_training_pass():
    with parwrap.distributed():
        training = Training()
        loader = DataLoader(range(10), batch_size=2, shuffle=True)
        before = len(loader)
        training.train(loader)

    assert 3 == before


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_so_a_schedule_may_be_built_before_the_optimizer():
    with parwrap.distributed():
        loader = DataLoader(range(10), batch_size=2, shuffle=True)
        total = 2 * len(loader)
        training = Training()
        schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=total)
        for _ in range(2):
            for _ in loader:
                training.step()
                schedule.step()

    assert total == schedule.last_epoch == 6


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_unless_the_loader_reads_in_order_the_model_is_in_eval_mode_or_gradients_are_off():
    with parwrap.distributed():
        training = Training()
        in_order, in_eval, no_gradients = (DataLoader(range(10), batch_size=2, shuffle=shuffle) for shuffle in (False, True, True))
        lengths = [len(in_order)]
        with torch.no_grad():
            lengths.append(len(no_gradients))
        training.model.eval()
        lengths.append(len(in_eval))

    assert [5, 5, 5] == lengths


@pytest.mark.parametrize(
    ("last_trained", "gradients_on", "in_eval", "shuffled", "expected"),
    [
        (None, True, False, True, True),
        (None, True, False, False, False),
        (None, False, False, True, False),
        (None, True, True, True, False),
        (True, True, False, False, True),
        (False, True, False, True, False),
    ],
)
def test_the_first_time_a_length_is_that_of_a_share(last_trained, gradients_on, in_eval, shuffled, expected):
    assert expected == shows_share(last_trained=last_trained, gradients_on=gradients_on, in_eval=in_eval, shuffled=shuffled)


def stack(*lines):
    """A stack of lines, written as a letter for the function and the number of the line."""
    return tuple(Line("train.py", ord(line[0]), int(line[1:]), in_script=True) for line in lines)


@pytest.mark.parametrize(
    ("read", "asked", "expected"),
    [
        (["m5"], ["m9"], True),  # for x in loader: ...; total / len(loader)
        (["m9"], ["m9"], True),  # sum(f(x) for x in loader) / len(loader)
        (["m9"], ["m5"], False),  # n = len(loader) in the next epoch
        (["m5", "t2"], ["m9"], True),  # train(loader); total / len(loader)
        (["m5", "t2"], ["m5", "t3"], True),
        (["m5", "t2"], ["m9", "t3"], False),  # another call of the function
        (["m5", "t2"], ["m9", "e3"], False),  # train(loader), then len(loader) in evaluate(loader)
        ([], ["m9"], False),
    ],
)
def test_a_pass_stands_above_a_length_in_the_function_that_asks(read, asked, expected):
    assert expected == stands_above(stack(*read), stack(*asked))


def asks_before(loader):
    count, passes = len(loader), 0
    with torch.no_grad():
        for _ in loader:
            passes += 1
    return count, passes


def asks_after(loader):
    passes = 0
    with torch.no_grad():
        for _ in loader:
            passes += 1
    return len(loader), passes


def asks_inside(loader):
    with torch.no_grad():
        lengths = [len(loader) for _ in loader]
    return lengths[0], len(lengths)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("evaluate", [asks_after, asks_inside])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_it_is_that_of_the_pass_in_the_function_that_asks(evaluate):
    with parwrap.distributed():
        training, loader = Training(), DataLoader(range(10), batch_size=2, shuffle=True)
        lengths = []
        for _ in range(2):
            training.train(loader)
            trained = len(loader)
            lengths.append((trained, *evaluate(loader), len(loader)))

    assert [(3, 5, 5, 5)] * 2 == lengths


@pytest.mark.ranks(2)
def test_a_length_before_a_pass_of_another_kind_is_named_once_and_right_from_then_on():
    """As in ``test()`` of PyTorch's quickstart, called on the training data."""
    with parwrap.distributed():
        training, loader = Training(), DataLoader(range(10), batch_size=2, shuffle=True)
        lengths = []

        def run():
            for _ in range(3):
                training.train(loader)
                lengths.append(asks_before(loader))

        with pytest.warns(UserWarning, match=r"len\(loader\)") as said:
            run()

    assert [(3, 5), (5, 5), (5, 5)] == lengths
    (text,) = [str(each.message) for each in said]
    assert re.match(r"parwrap: len\(loader\) was 3 at test_lengths.py:\d+, but the pass at test_lengths.py:\d+ reads everything", text)
    assert "Ask for len(loader) in the pass or after it." in text


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_two_kinds_of_passes_in_one_function_have_their_lengths():
    with parwrap.distributed():
        training, loader = Training(), DataLoader(range(10), batch_size=2, shuffle=True)
        lengths = []
        for _ in range(2):
            before = len(loader)
            training.train(loader)
            after = len(loader)
            with torch.no_grad():
                read(loader)
            lengths.append((before, after, len(loader)))

    assert [(3, 3, 5)] * 2 == lengths


@pytest.mark.ranks(2)
def test_in_a_pass_it_is_that_of_the_pass():
    with parwrap.distributed():
        training, loader = Training(), DataLoader(range(10), batch_size=2)
        lengths = {(len(loader), training.step()) for _ in loader}
        batches = iter(parwrap.shard(DataLoader(range(10), batch_size=2)))
        next(batches)

        assert 3 == len(batches)
        with torch.no_grad():
            whole = {len(loader) for _ in loader}

    assert {(3, None)} == lengths
    assert {5} == whole


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_loader_that_is_said_to_be_shared_or_whole_has_that_length():
    with parwrap.distributed():
        Training()

        assert 3 == len(parwrap.shard(DataLoader(range(10), batch_size=2)))
        assert 5 == len(parwrap.replicate(DataLoader(range(10), batch_size=2, shuffle=True)))
    with parwrap.distributed(batch="global"):
        assert 5 == len(DataLoader(range(10), batch_size=2, shuffle=True))
    assert 5 == len(parwrap.shard(DataLoader(range(10), batch_size=2)))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_share_that_is_kept_may_be_trained_on_later():
    """``list`` asks for the length of a loader that reads in order after it has made the iterator."""
    with parwrap.distributed():
        training = Training()
        kept = list(parwrap.shard(DataLoader(range(10), batch_size=2)))
        for _ in range(2):
            for _ in kept:
                training.step()

        lengths = parwrap.gather(len(kept))

    assert [3, 3] == lengths


@pytest.mark.ranks(2)
def test_list_asks_for_the_length_of_the_pass_that_it_begins():
    with parwrap.distributed():
        Training()
        with pytest.warns(
            UserWarning, match="no optimizer stepped.*If you keep the batches to train on them later, write parwrap.shard"
        ) as said:
            kept = list(DataLoader(range(10), batch_size=2))

    assert (3, 1) == (len(kept), len(said))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("after_a_pass", [False, True], ids=["of a loader in order", "after a pass that reads everything"])
def test_a_length_that_was_given_before_the_first_training_pass_and_is_not_that_passes_is_named(after_a_pass):
    """For example of a schedule, which may be built after a pass for the mean of the data."""
    with parwrap.distributed():
        training, loader = Training(), DataLoader(range(10), batch_size=2, shuffle=after_a_pass)
        if after_a_pass:
            with torch.no_grad():
                read(loader)
        given = length_of(loader)
        with pytest.warns(
            UserWarning,
            match=r"parwrap: len\(loader\) was 5 at test_lengths.py:\d+, but the training pass at "
            r"training.py:\d+ has 3 batches on each rank. A schedule built from 5 steps is wrong. Write loader = parwrap.shard\(loader\) "
            "where the loader is made, so that its length is that of a share from the beginning. "
            r'Where a library does this, batch="global" \(--batch global\) keeps every length.',
        ):
            training.train(loader)

    assert 5 == given


def length_of(loader):
    return len(loader)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_stream_without_a_length_has_none():
    with parwrap.distributed():
        loader = DataLoader(Sized(10, hides=True), batch_size=2)
        with pytest.raises(TypeError, match="has no len"):
            len(loader)
        Training().train(loader)


class Sized(IterableDataset):
    def __init__(self, count, hides=False):
        self.count, self.hides = count, hides

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        if self.hides:
            raise TypeError("object of type 'Sized' has no len()")
        return self.count


@pytest.mark.ranks(2)
@pytest.mark.parametrize("uneven", ["pad", "drop", "join"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_lengths_are_the_numbers_of_batches(uneven, drop_last, batch):
    with parwrap.distributed(uneven=uneven, batch=batch):
        training = Training()
        for count in (9, 16):
            for loader in (
                DataLoader(range(count), batch_size=2, drop_last=drop_last),
                DataLoader(range(count), batch_size=2, drop_last=drop_last, shuffle=True),
                DataLoader(range(count), batch_sampler=BatchSampler(SequentialSampler(range(count)), 2, drop_last)),
                DataLoader(Sized(count), batch_size=2, drop_last=drop_last),
            ):
                read = sum(1 for _ in loader if not training.step())

                assert read == len(loader), (count, loader.dataset)


# the rules alone

UNEVEN = st.sampled_from(["pad", "drop", "join"])


@given(st.integers(0, 30), st.integers(1, 5), UNEVEN)
@settings(max_examples=150)
def test_batches_are_dealt_out_in_turn_to_all_ranks_alike(count, size, uneven):
    batches = [[number] for number in range(count)]
    dealt = [DealtBatches(batches, rank, size, uneven) for rank in range(size)]
    shares = [list(each) for each in dealt]

    assert 1 == len({len(share) for share in shares})
    assert all(len(each) == len(share) for each, share in zip(dealt, shares, strict=True))
    seen = [batch[0] for turn in zip(*shares, strict=True) for batch in turn]
    assert list(range(count if uneven != "drop" else count - count % size)) == (seen[:count] if uneven == "pad" else sorted(set(seen)))
    if uneven == "join":
        assert all(sum(each.weight for each in turn) == size for turn in zip(*(each.weights for each in dealt), strict=True))


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 5))
@settings(max_examples=150)
def test_batches_are_split_in_order(sizes, size):
    batches = [[(batch, number) for number in range(count)] for batch, count in enumerate(sizes)]
    split = [SplitBatches(batches, rank, size) for rank in range(size)]
    parts = [list(each) for each in split]
    for index, batch in enumerate(batches):
        weights = [each.weights[index].weight for each in split]
        kept = [sample for part, weight in zip(parts, weights, strict=True) if weight for sample in part[index]]

        assert batch == kept
        assert size == pytest.approx(sum(weights))
        assert all(part[index] for part in parts)


@given(st.integers(0, 50), st.integers(1, 9))
def test_blocks_follow_each_other_and_differ_by_one_at_most(samples, size):
    blocks = [block(samples, rank, size) for rank in range(size)]

    assert list(range(samples)) == [sample for each in blocks for sample in each]
    assert {0, 1} >= {max(map(len, blocks)) - len(each) for each in blocks}


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.booleans(), st.sampled_from(["pad", "drop"]))
@settings(max_examples=150)
def test_a_share_is_as_long_as_distributed_sampler_says(samples, batch_size, size, drop_last, uneven):
    loader = DataLoader(range(samples), batch_size=batch_size, drop_last=drop_last)
    expected = len(BatchSampler(distributed_sampler(loader, 0, size, 0, uneven), batch_size, drop_last))

    assert expected == share_length(loader, len(loader), size, uneven)


class ReversedOrder(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(3, -1, -1))

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    ("options", "plain", "shuffled"),
    [
        ({}, True, False),
        ({"shuffle": True}, True, True),
        ({"batch_size": None}, True, False),
        ({"sampler": SequentialSampler(range(3))}, False, False),
        ({"sampler": ReversedOrder()}, False, True),
        ({"sampler": torch.utils.data.RandomSampler(range(4), replacement=True)}, False, True),
        ({"sampler": torch.utils.data.RandomSampler(range(4), num_samples=2)}, False, True),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(4)), 2, False)}, False, False),
        ({"batch_sampler": [[0], [1, 2, 3]]}, False, True),
    ],
)
def test_which_loaders_are_plain_and_which_shuffle(options, plain, shuffled):
    loader = DataLoader(range(4), **options)

    assert (plain, shuffled) == (is_plain(loader), shuffles(loader))


def test_a_copy_of_a_loader_keeps_what_a_subclass_has():
    class Own(DataLoader):
        pass

    loader = Own(range(4), batch_size=2)
    loader.name = "own"
    copied = copied_with(loader, sampler=range(2))

    assert (Own, "own", range(2), 4) == (type(copied), copied.name, copied.sampler, len(copied.dataset))
    assert isinstance(loader.sampler, SequentialSampler)


itself = SimpleNamespace()
itself.root = itself


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"x": {"y": torch.zeros(3)}}, 3),
        ([("a", "b"), torch.zeros(2)], 2),
        (["a", "b", "c"], 3),
        ((), 0),
        ({}, 0),
        (None, 1),
        ([{"x": torch.zeros(4)}], 4),
        (SimpleNamespace(x=torch.zeros(4, 2), y=torch.zeros(4)), 4),
        (itself, 1),
    ],
)
def test_the_number_of_samples_in_a_batch(batch, expected):
    assert expected == samples_in(batch)


four = torch.zeros(4)


@pytest.mark.parametrize(
    ("batch", "drawn", "expected"),
    [
        ((torch.zeros(3, 5), torch.zeros(3)), 5, True),
        ({"x": torch.zeros(3, 5), "y": torch.zeros(3)}, 4, True),
        (SimpleNamespace(x=torch.zeros(3, 2)), 4, True),
        ([["a", "b", "c"], torch.zeros(3)], 4, True),
        ((torch.zeros(4, 5), four), 4, False),
        (torch.zeros(16, 5), 4, False),  # four crops of each sample
        ((torch.zeros(3, 4), torch.zeros(2, 4)), 4, False),  # sequences of 3 and of 2 tokens
        ((torch.zeros(3, 4), four), 4, False),
        (([torch.zeros(3, 8), torch.zeros(3, 9), torch.zeros(3, 8), torch.zeros(3, 8)], [{}] * 4), 4, False),  # images of different sizes
        (SimpleNamespace(x=torch.zeros(2, 9), y=four), 4, False),  # graphs
        (nn.utils.rnn.pack_sequence([torch.zeros(1), torch.zeros(1)], enforce_sorted=False), 2, False),
        (["a", "b", "c"], 4, False),
        (object(), 4, False),
        (None, 4, False),
        (itself, 4, False),
    ],
)
def test_whether_samples_were_left_out_of_a_batch(batch, drawn, expected):
    assert expected is lacks_samples(batch, drawn)
