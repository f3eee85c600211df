"""Which version of a file a rank gets to read, also where ranks write differently often."""

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import parwrap
from parwrap.errors import RankMismatchError
from parwrap.group.group import current
from parwrap.rank_zero.file_versions import Announced, Awaited, Record
from parwrap.world.world import World


def by(rank):
    return parwrap.rank() == rank


@pytest.mark.ranks(3)
def test_everybody_reads_what_rank_zero_writes_however_late_it_is(tmp_path):
    path, read = tmp_path / "a.txt", []
    with parwrap.distributed():
        for number in range(3):
            if by(number % 3):
                time.sleep(0.1)
            path.write_text(f"{number} by {parwrap.rank()}")
            read.append(path.read_text())

    assert [f"{number} by 0" for number in range(3)] == read


@pytest.mark.ranks(2)
def test_a_rank_that_writes_more_often_than_rank_zero_reads_rank_zeros(tmp_path):
    """As when each rank judges by its own loss whether it is the best."""
    path = tmp_path / "best.txt"
    with parwrap.distributed(timeout=30):
        path.write_text("first")
        if by(1):
            path.write_text("never written")

        assert "first" == path.read_text()
        parwrap.barrier()
        path.write_text(f"second by {parwrap.rank()}")  # from here on they agree again

        assert "second by 0" == path.read_text()


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.ranks(2)
def test_a_rank_whose_file_rank_zero_never_writes_does_not_wait_for_ever(there, tmp_path):
    path = tmp_path / "best.txt"
    if there and by(0):
        path.write_text("from an earlier run")
    parwrap.barrier()
    with parwrap.distributed(timeout=30):
        if by(1):
            path.write_text("mine")
        seen = path.exists(), path.read_text() if by(1) or there else None
        parwrap.barrier()

    assert [(there, "from an earlier run" if there else None), (True, "from an earlier run" if there else "mine")] == parwrap.gather(seen)
    assert there == path.exists()


@pytest.mark.ranks(2)
def test_a_rank_that_rank_zero_has_left_behind_at_the_end_does_not_wait_for_it(tmp_path):
    with parwrap.distributed(timeout=30):
        if by(1):
            torch.save("mine", tmp_path / "x.pt")
            assert "mine" == torch.load(tmp_path / "x.pt")


@pytest.mark.ranks(2)
def test_a_rank_that_writes_less_often_than_rank_zero_reads_the_last_once_they_have_met(tmp_path):
    path = tmp_path / "best.txt"
    with parwrap.distributed(timeout=30):
        path.write_text("first")
        if by(0):
            path.write_text("second")
        parwrap.barrier()

        assert "second" == path.read_text()
        path.write_text("third")

        assert "third" == path.read_text()


@pytest.mark.ranks(2)
def test_what_only_rank_zero_has_written_is_seen_once_they_have_met(tmp_path):
    path = tmp_path / "only.txt"
    with parwrap.distributed():
        if by(0):
            path.write_text("only")
        parwrap.barrier()

        assert (True, "only", ["only.txt"]) == (path.exists(), path.read_text(), os.listdir(tmp_path))
        path.write_text("all")

        assert "all" == path.read_text()


@pytest.mark.ranks(2)
def test_what_only_rank_zero_has_written_alone_is_seen_at_once(tmp_path):
    path = tmp_path / "only.txt"
    with parwrap.distributed():
        with parwrap.rank_zero_first():
            if not path.exists():
                path.write_text(f"by {parwrap.rank()}")

        assert "by 0" == path.read_text()


@pytest.mark.ranks(2)
def test_what_rank_zero_makes_ahead_is_not_seen_before_its_time(tmp_path):
    with parwrap.distributed():
        if by(1):
            current().store.wait(["made"])
        seen = [path.exists() for path in (tmp_path / "folder", tmp_path / "folder" / "a.txt")]
        seen.append(os.listdir(tmp_path))
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a.txt").write_text("a")
        if by(0):
            current().store.set("made", b"")

    assert [False, False, []] == seen


class Slow:
    """A store that others reach before what was set last: TCPStore answers a question, and lets what is set go its way."""

    def __init__(self):
        self.reached = torch.distributed.HashStore()
        self._on_their_way = []

    def set(self, key, value):
        self._on_their_way.append((key, value))

    def check(self, keys):
        while self._on_their_way:
            self.reached.set(*self._on_their_way.pop(0))
        return self.reached.check(keys)


def test_what_rank_zero_makes_is_announced_before_it_is_there(tmp_path):
    path, store = str(tmp_path / "a.txt"), Slow()
    rank_0, rank_1 = (
        SimpleNamespace(store=seen, clock=0, world=World(rank, 2, rank, 2)) for rank, seen in enumerate((store, store.reached))
    )
    Announced(rank_0, "files").begin(path, replaces=True)
    Path(path).touch()

    assert Awaited(rank_1, "files").present(path) is None


@pytest.mark.ranks(2, timeout=30)
def test_waiting_ends_with_the_timeout_and_says_for_what(tmp_path):
    path = tmp_path / "a.txt"
    with parwrap.distributed():
        current().timeout = current().coordinator.timeout = timedelta(seconds=0.5)
        if by(1):
            path.write_text("mine")
            with pytest.raises(
                RankMismatchError, match=r"rank 1 timed out after waiting 0.5 s for rank 0 to reach the same point \(version 1 of .*a.txt\)"
            ):
                path.read_text()
            current().store.set("gave up", b"")
        else:
            current().store.wait(["gave up"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [0.0, 0.1])
def test_the_wait_for_a_file_is_a_matter_of_its_own_for_a_thread(tmp_path, late):
    """Also where rank 0's thread writes after its main thread has passed the next sync point."""
    read = []

    def write_and_read():
        time.sleep(late * by(0))
        Path(tmp_path, "a.txt").write_text(f"by {parwrap.rank()}")
        read.append(Path(tmp_path, "a.txt").read_text())

    with parwrap.distributed():
        if by(0):
            time.sleep(0.2)
        thread = threading.Thread(target=write_and_read)
        thread.start()
        time.sleep(5 * late * by(1))
        total = parwrap.reduce_sum(1)
        thread.join()

    assert (2, ["by 0"]) == (total, read)


def test_rank_zeros_file_is_told_from_another_of_its_name(tmp_path):
    path = tmp_path / "model.pt"
    path.write_text("rank 0's")
    made = path.stat()
    record = Record(file=(made.st_ino, made.st_mtime))
    there = record.is_at(str(path))
    path.rename(tmp_path / "kept")  # so that its number is not given away again
    gone = record.is_at(str(path))
    path.write_text("of an earlier run")

    assert (True, False, False) == (there, gone, record.is_at(str(path)))
    assert Record().is_at(str(path))  # on one node nobody asks


@pytest.mark.ranks(2)
def test_a_file_that_rank_zero_has_written_on_its_own_node_is_not_mixed_up_with_an_older_one(tmp_path):
    """Two nodes are played by one, where the other's file is another as soon as it is replaced behind rank 0's back."""
    group = current()
    apart = replace(group, world=replace(group.world, local_rank=0, local_size=1, node_rank=group.world.rank))
    path = str(tmp_path / "results.txt")
    if by(0):
        announced = Announced(apart, "test")
        announced.begin(path, replaces=True)
        Path(path).write_text("new")
        announced.finish(path)
        Path(path).rename(tmp_path / "kept")
        Path(path).write_text("old")
    parwrap.barrier()
    if by(1):
        with pytest.raises(RankMismatchError, match=r"rank 0 has written .*results\.txt on its own node"):
            Awaited(apart, "test").present(path)
