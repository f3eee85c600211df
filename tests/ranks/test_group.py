"""The process group: opened, closed, asked, and found again where the user's own code has started it."""

import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import parwrap
from parwrap.errors import UsageError
from parwrap.ranks import group as groups
from parwrap.ranks import rendezvous
from parwrap.ranks.group import alone, current, is_alone, open_group, opened, reading_stream
from parwrap.ranks.store import SignedStore
from parwrap.ranks.world import World


def closed(folder):
    """The place of this rank, to open another group that meets in ``folder``; the group of the test is closed."""
    world = replace(current().world, init_method=f"file://{folder}/store", node_ranks=())
    dist.destroy_process_group()
    return world


def test_a_single_rank_has_no_group():
    with opened(World()) as group:
        assert group is None
        assert current() is None
        assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_an_open_group_has_a_store_a_private_folder_and_a_group_for_control():
    group = current()

    assert ("gloo", torch.device("cpu"), timedelta(minutes=30)) == (group.backend, group.device, group.timeout)
    assert 0o700 == group.folder.stat().st_mode & 0o777
    assert 1 == len({*parwrap.gather(str(group.folder))})
    assert group.control is not dist.group.WORLD
    group.store.set(f"{parwrap.rank()}", "here")
    assert b"here" == group.store.get(f"{1 - parwrap.rank()}")


@pytest.mark.ranks(2, fresh=True)
def test_a_group_opens_again_without_reading_the_keys_of_the_one_before(tmp_path):
    world = closed(tmp_path)
    before = sys.excepthook
    for number in range(3):
        with opened(world, "gloo") as group:
            if world.rank == 0:
                group.store.set("number", f"{number}")
            assert f"{number}".encode() == group.store.get("number")
            assert 2 == parwrap.reduce_sum(1)
        assert current() is None
        assert not dist.is_initialized()
        assert sys.excepthook is before


@pytest.mark.ranks(3, fresh=True)
def test_a_group_knows_the_ranks_of_its_node_however_the_launcher_numbers_them(tmp_path):
    here = closed(tmp_path)
    seen = []
    for world in (
        here,
        replace(here, node_rank=here.rank % 2, local_rank=here.rank // 2, local_size=2 - here.rank % 2),  # in turn over two nodes
        replace(here, node_rank=0, local_size=2) if here.rank < 2 else replace(here, node_rank=1, local_rank=0, local_size=1),
    ):
        with opened(world, "gloo") as group:
            seen.append(group.world.node_ranks)

    assert [(0, 1, 2), [(0, 2), (1,), (0, 2)][here.rank], [(0, 1), (0, 1), (2,)][here.rank]] == seen


def test_containers_on_one_machine_are_nodes_of_their_own(monkeypatch):
    store = SignedStore(dist.HashStore(), "meeting")
    for rank in (0, 1):  # the launcher counts ranks of the machine, and does not say how many it has
        store.set(f"node of {rank}", f"container {rank}")
    monkeypatch.setattr(rendezvous, "_node", lambda: "container 1")
    world = rendezvous._placed(World(1, 2, 1, 0, None, "MPI"), store)

    assert (1, 1, (1,)) == (world.node_rank, world.local_size, world.node_ranks)


@pytest.mark.ranks(2)
def test_the_users_own_process_group_works_too(monkeypatch):
    world = current().world
    monkeypatch.setattr(groups, "_current", None)  # as if parwrap had not started it

    assert (world.rank, 2) == (parwrap.rank(), parwrap.world_size())
    assert (None, None) == (open_group().control, open_group().store)
    assert 1 == parwrap.reduce_sum(dist.get_rank())
    assert [0, 1] == parwrap.gather(dist.get_rank())


def wait_or_raise(failure):
    if parwrap.rank() == 1:
        raise failure
    parwrap.barrier()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (ValueError("unhappy"), "ValueError: unhappy"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_rank_that_fails_because_of_another_names_the_first(tmp_path, failure, cause):
    world = closed(tmp_path)
    with pytest.raises(type(failure) if world.rank == 1 else RuntimeError) as raised, opened(world, "gloo"):
        wait_or_raise(failure)

    expected = [] if world.rank == 1 else [f"parwrap: rank 1 of 2 failed first: {cause}"]
    assert expected == getattr(raised.value, "__notes__", [])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.ranks(2, fresh=True)
def test_ranks_that_fail_alike_do_not_name_each_other(tmp_path):
    world = closed(tmp_path)
    with pytest.raises(ValueError, match="no data") as raised, opened(world, "gloo"):
        raise ValueError("no data")

    assert not hasattr(raised.value, "__notes__")


def test_a_rank_that_waits_for_others_to_start_says_so(tmp_path, monkeypatch, capfd):
    """As in the shell of ``srun --ntasks 2 --pty bash``, where the other task has ended."""
    monkeypatch.setattr(groups, "LONG_WAIT", 0.05)
    first = World(0, 2, 0, 2, 0, "SLURM", f"file://{tmp_path}/store")
    with pytest.raises(RuntimeError), opened(first, "gloo", timedelta(seconds=0.5)):
        pass

    assert capfd.readouterr().err.startswith(
        "parwrap: rank 0 waits for the other ranks of 2 to start. The world size comes from SLURM; if this process is the only one, set "
        "PARWRAP_WORLD_SIZE=1.\n"
    )


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_that_has_met_the_others_does_not_say_that_it_waits(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(groups, "LONG_WAIT", 1.0)
    with opened(closed(tmp_path), "gloo"):
        time.sleep(1.1)

    assert capfd.readouterr().err == ""


def test_only_the_thread_that_runs_alone_is_alone():
    assert not is_alone()
    with alone():
        assert is_alone()
    assert not is_alone()


@pytest.mark.parametrize(("block", "is_inside"), [(alone, is_alone), (reading_stream, lambda: raises(parwrap.rank))])
def test_threads_that_overlap_leave_only_their_own_block(block, is_inside):
    entered, leave, left = threading.Event(), threading.Event(), []

    def other():
        with block():
            entered.set()
            leave.wait(5)
        left.append(is_inside())

    with block():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(5)
    mine = is_inside()
    leave.set()
    thread.join()

    assert (False, [False]) == (mine, left)


def raises(call):
    try:
        call()
    except UsageError:
        return True
    return False
