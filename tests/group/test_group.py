"""The process group and its store."""

from datetime import timedelta

import pytest
import torch.distributed as dist

import parwrap
from parwrap.errors import RankMismatchError
from parwrap.group import group
from parwrap.group.group import current, opened
from parwrap.world.world import World


@pytest.mark.ranks(2)
def test_an_exchange_gives_every_rank_the_values_of_all():
    assert {0: 0, 1: 10} == current().exchange("test", parwrap.rank() * 10)
    assert {0: 1, 1: 11} == current().exchange("test", parwrap.rank() * 10 + 1)


@pytest.mark.ranks(2, timeout=30)
def test_a_rank_that_never_comes_is_named():
    mine = current()
    mine.timeout = mine.coordinator.timeout = timedelta(seconds=0.3)
    if parwrap.rank() == 1:
        mine.store.wait(["gave up"])
    else:
        with pytest.raises(
            RankMismatchError,
            match=(
                r"rank 0 timed out after waiting 0.3 s for the other ranks to reach the same point .lunch.*Rank 1 has reached no sync "
                r"point yet.*raise timeout="
            ),
        ):
            mine.exchange("lunch", None)
        with pytest.raises(RankMismatchError, match=r"for rank 1 to reach the same point \(tea\)"):
            mine.wait_until(lambda: False, 1, "tea")
        mine.store.set("gave up", b"")


@pytest.mark.ranks(2)
def test_groups_opened_one_after_the_other_do_not_read_each_others_keys(tmp_path):
    world = current().world
    dist.destroy_process_group()
    meeting_place = World(world.rank, world.size, launcher="test", init_method=f"file://{tmp_path}/store")
    for round in range(3):
        with opened(meeting_place, "gloo") as opened_group:
            assert {0: (round, 0), 1: (round, 1)} == opened_group.exchange("round", (round, world.rank))
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


def test_a_rank_that_waits_for_others_to_begin_says_so(tmp_path, monkeypatch, capfd):
    """As in the shell of ``srun --ntasks 2 --pty bash``, where the other task has ended."""
    monkeypatch.setattr(group, "TELLING", 0.05)
    alone = World(0, 2, 0, 2, 0, "SLURM", f"file://{tmp_path}/store")
    with pytest.raises(RuntimeError), opened(alone, "gloo", timedelta(seconds=0.5)):
        pass

    assert (
        "parwrap: rank 0 waits for the other ranks of 2 to start. The world size comes from SLURM; if this process is the only one, set "
        "PARWRAP_WORLD_SIZE=1.\n"
    ) == capfd.readouterr().err
