"""``rank_zero_only``, ``rank_zero_first`` and ``every_rank_writes``."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

import parwrap
from parwrap.decorators.rank_zero import every_rank_writes, rank_zero_first, rank_zero_only
from parwrap.errors import RankMismatchError, RankZeroError, UsageError
from parwrap.rank_zero.files import intercepting_files
from parwrap.ranks.collectives import barrier, broadcast, gather
from parwrap.ranks.group import current, is_alone, rank


@pytest.mark.ranks(2)
def test_rank_zero_only_runs_on_rank_zero_alone():
    @rank_zero_only
    def report(number):
        return number, is_alone()

    assert [(3, True), None] == gather(report(3))


@pytest.mark.ranks(2)
def test_its_result_can_be_sent_to_all():
    @rank_zero_only(broadcast=True)
    def first():
        time.sleep(0.05)
        return {"by": rank()}

    assert [{"by": 0}] * 2 == gather(first())


class Load:
    def __call__(self, by=None):
        if by is None:
            raise KeyError("no data")
        return {"by": by}


@pytest.mark.ranks(2)
def test_a_partial_and_an_object_that_is_called_can_send_their_results():
    assert {"by": 3} == rank_zero_only(broadcast=True)(Load())(3)
    assert {"by": 3} == rank_zero_only(broadcast=True)(partial(Load(), 3))()
    with pytest.raises(
        (KeyError, RankZeroError)[rank()], match=("no data", r"rank 0 failed with KeyError: 'no data' in Load \(.*, whose result")[rank()]
    ):
        rank_zero_only(broadcast=True)(Load())()


@pytest.mark.ranks(2)
def test_many_calls_leave_nothing_and_rank_zero_never_sleeps(tmp_path, monkeypatch):
    path, slept = Path(broadcast(str(tmp_path))) / "log", []

    @rank_zero_only
    def note():
        path.write_text("noted")

    shared = rank_zero_only(broadcast=True)(note)

    def left(calls):
        for call in range(calls):
            note()
            if call % 20 == 0:
                shared()
        barrier()
        files = sum(each.stat().st_size for each in current().folder.rglob("*") if each.is_file())
        return current().store.num_keys(), files

    with parwrap.distributed():
        if rank() == 0:
            monkeypatch.setattr(time, "sleep", slept.append)
        few, many = left(20), left(2000)
        monkeypatch.undo()

    barrier()
    assert [] == slept
    assert many[0] <= few[0]
    assert many[1] - few[1] < 100  # each barrier is a line in the journal


@pytest.mark.ranks(2)
def test_who_waits_for_a_result_learns_that_rank_zero_has_failed():
    @rank_zero_only(broadcast=True)
    def fails():
        raise KeyError("no data")

    with pytest.raises((KeyError, RankZeroError)[rank()], match="no data"):
        fails()


@pytest.mark.ranks(2)
def test_a_result_that_cannot_be_pickled_is_named_on_every_rank():
    @rank_zero_only(broadcast=True)
    def make():
        return lambda: None

    said = r"rank_zero_only\(broadcast=True\) sends the result of .*make \(.*\) to the other ranks, but it cannot be pickled: .* Return"
    with pytest.raises(
        (UsageError, RankZeroError)[rank()], match=(said, r"rank 0 failed with .* cannot be pickled.* in .*make \(.*, whose result")[rank()]
    ):
        make()


def test_options_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match=r"cannot skip its body: write `if parwrap\.is_rank_zero"), rank_zero_only():
        pass
    with pytest.raises(UsageError, match="remove one of the two options"):
        rank_zero_only(local=True, broadcast=True)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.ranks(2)
def test_rank_zero_goes_first(local, tmp_path):
    with intercepting_files(current()), rank_zero_first(local=local):
        there = os.path.exists(tmp_path / "data")
        if not there:
            time.sleep(0.05)
            (tmp_path / "data").write_text("downloaded")

    assert [False, True] == gather(there)


@pytest.mark.ranks(2)
def test_the_others_follow_where_rank_zero_fails():
    followed = False
    with suppress(ValueError), rank_zero_first():
        if rank() == 0:
            raise ValueError
        followed = True

    assert [False, True] == gather(followed)


@pytest.mark.parametrize(("local", "who"), [(False, "rank 0"), (True, "the first rank of this node")])
@pytest.mark.ranks(2, fresh=True)  # a block that only one rank counts
def test_waiting_for_a_block_that_does_not_begin_is_an_error(local, who, monkeypatch):
    monkeypatch.setattr(current(), "timeout", timedelta(seconds=0.2))
    if rank() == 1:
        message = f"^{who} has not finished the block of rank_zero_first at test_decorators.py:.* within 0 s, or has not begun it. "
        message += "Run it on all ranks. If it takes"
        with pytest.raises(RankMismatchError, match=message), rank_zero_first(local=local):
            pass


@pytest.mark.ranks(2)
def test_what_rank_zero_made_first_is_there_for_all_afterwards(tmp_path):
    with intercepting_files(current()):
        with rank_zero_first():
            if rank() == 0:
                (tmp_path / "data").write_text("downloaded")

        assert "downloaded" == (tmp_path / "data").read_text()


@pytest.mark.ranks(2)
def test_what_rank_zero_makes_alone_is_there_for_all_even_if_it_takes_longer(tmp_path):
    @rank_zero_only
    def save():
        time.sleep(0.05)
        torch.save("by rank 0", tmp_path / "best.pt")

    with intercepting_files(current()):
        (tmp_path / "other.txt").write_text("ahead")
        save()

        assert (tmp_path / "best.pt").exists()
        assert ["best.pt", "other.txt"] == os.listdir(tmp_path)
        assert "by rank 0" == torch.load(tmp_path / "best.pt")


@pytest.mark.ranks(2)
def test_every_rank_may_write(tmp_path):
    with intercepting_files(current()):
        with every_rank_writes():
            Path(tmp_path, f"{rank()}.txt").write_text("mine")
            torch.save(rank(), tmp_path / f"{rank()}.pt")
        Path(tmp_path, "rank0").write_text("rank 0's")

        assert rank() == torch.load(tmp_path / f"{rank()}.pt")
    barrier()

    assert ["0.pt", "0.txt", "1.pt", "1.txt", "rank0"] == sorted(os.listdir(tmp_path))


def test_one_rank_needs_no_group(tmp_path):
    @rank_zero_only(broadcast=True)
    def report():
        return 1

    with rank_zero_first(), every_rank_writes():
        assert 1 == report()


@pytest.mark.ranks(2)
def test_a_result_for_all_inside_rank_zero_first_is_refused_on_the_ranks_that_would_wait():
    @rank_zero_only(broadcast=True)
    def name():
        return "run7"

    with rank_zero_first():
        if rank() == 0:
            assert "run7" == name()
        else:
            with pytest.raises(
                UsageError, match=r"name \(.*\) sends rank 0's result .* inside rank_zero_first, .* Call it before the block"
            ):
                name()
