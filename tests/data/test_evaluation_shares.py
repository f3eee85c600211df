"""Evaluation passes are dealt out exactly; nothing here needs a process group."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from parwrap.data.evaluation_shares import Blocks, Reading, Turns, rows_of
from parwrap.data.merging import Part, merged
from parwrap.data.samplers import block

samples = st.integers(0, 40)
batch_sizes = st.integers(1, 9)
ranks = st.integers(1, 8)


def batches_of(count, batch_size):
    return [list(range(count))[at : at + batch_size] for at in range(0, count, batch_size)]


@settings(deadline=None)
@given(samples, batch_sizes, ranks)
def test_blocks_in_the_order_of_ranks_are_the_pass_of_one_process(count, batch_size, size):
    drawn = batches_of(count, batch_size)
    parts = [list(Blocks(drawn, lambda all_, r=rank: [all_[at] for at in block(len(all_), r, size)])) for rank in range(size)]

    assert drawn == list(chain(*parts))
    assert sorted(map(len, parts), reverse=True) == list(map(len, parts))  # rank 0 has a batch if anyone has


def turns_of(drawn, rank, size):
    """What a rank gets of a stream, how many ranks read and how long the stream was found to be."""
    found = []

    def begin(first):
        found.append(min(size, len(first)) or size)
        return rank, found[0]

    got = list(Turns(iter(drawn), size, begin, found.append))
    return got, *found


@settings(deadline=None)
@given(samples, batch_sizes, ranks)
def test_the_turns_of_those_who_read_are_the_pass_of_one_process(count, batch_size, size):
    drawn = batches_of(count, batch_size)
    got, readers, lengths = zip(*(turns_of(drawn, rank, size) for rank in range(size)), strict=True)

    assert {len(drawn)} == set(lengths)
    assert {min(size, len(drawn)) or size} == set(readers)
    assert drawn == sorted(chain(*got[: readers[0]]))
    assert all(drawn[:1] == each for each in got[readers[0] :])


@settings(deadline=None)
@given(samples, batch_sizes, ranks, st.booleans())
def test_gathered_turns_are_in_the_order_of_one_process(count, batch_size, size, by_batch):
    drawn = batches_of(count, batch_size)
    readers = min(size, len(drawn)) or size
    parts = []
    for rank in range(readers):
        mine = drawn[rank::readers]
        result = mine if by_batch else list(chain(*mine))
        parts.append(Part(result, [Reading("eval.py:9", sizes=[len(each) for each in mine], in_turn=True)]))

    assert (drawn if by_batch else list(range(count))) == merged("gather", parts)


def test_what_the_script_draws_between_the_batches_of_a_stream_does_not_change_them():
    def stream():
        while True:
            yield torch.randint(1000, ()).item()

    torch.manual_seed(0)
    expected = [next(stream()) for _ in range(6)]
    got = []
    for rank in range(2):
        torch.manual_seed(0)
        numbers = stream()
        turns = Turns((next(numbers) for _ in range(6)), 2, lambda first, r=rank: (r, 2), lambda batches: None)
        for batch in turns:
            got.append((rank, batch))
            torch.rand(rank + 1)

    assert expected[0::2] == [batch for rank, batch in got if rank == 0]
    assert expected[1::2] == [batch for rank, batch in got if rank == 1]


def test_rows_of_what_a_loader_yields():
    loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4)), batch_size=3)

    assert [3, 1] == [rows_of(batch) for batch in loader]
    assert 1 == rows_of(torch.tensor(5))
