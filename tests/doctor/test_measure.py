"""What ranks measure together: on real gloo ranks, against known sums and clocks that are set wrong on purpose."""

import time

import pytest
import torch
import torch.distributed as dist

from parwrap.doctor.measure import SIZES, all_reduces, clocks
from parwrap.ranks.group import current
from parwrap.ranks.store import SignedStore


@pytest.mark.ranks(2)
def test_all_reduces_are_right_and_alike_on_all_ranks():
    printed = []
    rows = list(all_reduces(dist.get_rank(), 2, torch.device("cpu"), printed.append))
    everywhere = [None, None]
    dist.all_gather_object(everywhere, rows)

    assert list(SIZES) == [1024, 16 * 1024, 256 * 1024, 4 * 2**20, 64 * 2**20] == [row.bytes for row in rows]
    assert ["all-reduce of 1 KB", "all-reduce of 64 MB"] == [printed[0], printed[-1]]
    assert everywhere[0] == everywhere[1]
    assert all(row.right and row.seconds > 0 for row in rows)
    for row in rows:
        assert row.algorithm_bandwidth == row.bytes / row.seconds
        assert row.bus_bandwidth == row.algorithm_bandwidth  # 2 (n - 1) / n is 1 for two ranks


@pytest.mark.ranks(2)
def test_a_wrong_sum_on_one_rank_is_known_to_all(monkeypatch):
    real = dist.all_reduce

    def spoilt(tensor, *args, **options):
        real(tensor, *args, **options)
        if dist.get_rank() == 1 and tensor.numel() == 4096:
            tensor[100] += 1

    monkeypatch.setattr(dist, "all_reduce", spoilt)
    rows = all_reduces(dist.get_rank(), 2, torch.device("cpu"), lambda stage: None)

    assert [True, False, True] == [next(rows).right for _ in range(3)]


@pytest.mark.ranks(3)
def test_clocks_are_compared_with_rank_zeros():
    rank, wrong = dist.get_rank(), [0.0, 5.0, -3.0]
    found = clocks(SignedStore(current().store, "clocks"), rank, 3, clock=lambda: time.time() + wrong[rank])

    if rank > 0:
        assert [] == found
    else:
        assert [1, 2] == [clock.rank for clock in found]
        assert all(abs(clock.ahead - wrong[clock.rank]) <= clock.uncertainty < 1 for clock in found)
