"""Vectors that the ranks of a node exchange in shared memory, beside torch's all-gather."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import parwrap
from parwrap.ranks.shared_vectors import CAPACITY, SharedVectors


def opened(folder):
    vectors = SharedVectors(folder / "vectors", parwrap.world_size(), parwrap.rank())
    parwrap.barrier()
    return vectors


@pytest.mark.ranks(3)
def test_each_turn_gathers_what_all_gather_gathers(tmp_path):
    vectors, generator = opened(tmp_path), torch.Generator().manual_seed(parwrap.rank())
    for turn in range(300):
        dtype = (torch.float32, torch.float64, torch.bfloat16)[turn % 3]
        mine = torch.randn(1 + turn % 40, generator=generator).to(dtype)
        expected = torch.empty(3, len(mine), dtype=dtype)
        dist.all_gather(list(expected), mine)

        assert torch.equal(expected, vectors.gather(mine, lambda: None))


@pytest.mark.ranks(2)
def test_what_was_gathered_stays_while_others_go_on(tmp_path):
    vectors = opened(tmp_path)
    gathered = [vectors.gather(torch.full((CAPACITY,), 10.0 * turn + parwrap.rank()), lambda: None) for turn in range(6)]

    assert [[10.0 * turn, 10.0 * turn + 1] for turn in range(6)] == [each[:, -1].tolist() for each in gathered]


@pytest.mark.ranks(2)
def test_a_wait_calls_the_check_which_may_raise(tmp_path):
    def check():
        raise TimeoutError("the other rank does not come")

    vectors = opened(tmp_path)
    if parwrap.rank() == 0:
        with pytest.raises(TimeoutError, match="does not come"):
            vectors.gather(torch.zeros(1), check)
