"""The process group and its store."""

from datetime import timedelta

import pytest
import torch.distributed as dist

import parwrap
from parwrap import group
from parwrap.errors import RankMismatchError
from parwrap.group import current, opened
from parwrap.world import World


@pytest.mark.ranks(2)
def test_an_exchange_needs_no_collective():
    with_collective = current().exchange("test", parwrap.rank() * 10)

    assert [0, 10] == with_collective
    assert [1, 11] == current().exchange("test", parwrap.rank() * 10 + 1)


@pytest.mark.ranks(2, timeout=30)
def test_a_rank_that_never_comes_is_named():
    mine = current()
    mine.timeout = timedelta(seconds=0.3)
    if parwrap.rank() == 0:
        with pytest.raises(RankMismatchError, match=r"rank 0 waited 0.3 s for rank 1 at the same point \(lunch\), in vain.*raise timeout="):
            mine.exchange("lunch", None)
        with pytest.raises(RankMismatchError, match=r"for rank 1 at the same point \(tea\)"):
            mine.wait_until(lambda: False, 1, "tea")
    parwrap.barrier()


@pytest.mark.ranks(2)
def test_groups_opened_one_after_the_other_do_not_read_each_others_keys(tmp_path):
    world = current().world
    dist.destroy_process_group()
    meeting_place = World(world.rank, world.size, launcher="test", init_method=f"file://{tmp_path}/store")
    for round in range(3):
        with opened(meeting_place, "gloo") as opened_group:
            assert [(round, 0), (round, 1)] == opened_group.exchange("round", (round, world.rank))
            assert parwrap.reduce_sum(1) == 2
        assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_the_users_own_process_group_serves_too():
    world = current().world
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(group, "_current", None)  # as if parwrap had not started it

        assert (world.rank, 2) == (dist.get_rank(), dist.get_world_size())
        assert (world.rank, 2) == (parwrap.rank(), parwrap.world_size())
        assert 1 == parwrap.reduce_sum(dist.get_rank())
