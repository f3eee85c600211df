"""Whatever a plain script does to files, it sees on every rank, and leaves behind, what it does on one."""

import inspect
import os
import sys
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import file_programs
import file_tree_programs
from parwrap.rank_zero.files import intercepting_files
from parwrap.ranks.group import current

PROGRAMS = [each for of in (file_programs, file_tree_programs) for each in vars(of).values() if inspect.isfunction(each)]


@contextmanager
def slow(function, wanted):
    """Every line of ``function`` takes longer."""

    def by_line(frame, event, argument):
        if event == "line":
            time.sleep(0.003)
        return by_line

    if wanted:
        sys.settrace(lambda frame, event, argument: by_line if frame.f_code is function.__code__ else None)
    try:
        yield
    finally:
        sys.settrace(None)


def tree(folder):
    """Every path below ``folder`` with what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        # an archive holds times
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() and path.suffix not in (".zip", ".gz") else None
    return found


def run(program, folder):
    folder.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        return program(0)  # what a rank writes it reads back, so that other numbers would only tell that
    finally:
        os.chdir(before)


def leave_files(folder):
    """What an earlier run has left behind."""
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "a.txt").write_text("a")
    (folder / "old" / "b.txt").write_text("b")
    (folder / "old.txt").write_text("old\n")
    (folder / "old.json").write_text("[0]")
    torch.save(1, folder / "old.pt")


def together(program, folder, late):
    """What each rank sees; the ``late`` one is slower."""
    rank = current().world.rank
    if program.__name__.endswith("an_earlier_run") and rank == 0:
        leave_files(folder)
    dist.barrier()
    with slow(program, rank % 2 == late), intercepting_files(current(), program.__module__):
        seen = run(program, folder)
    everybody = [None] * current().world.size
    dist.all_gather_object(everybody, seen)
    return everybody


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.ranks(2)
def test_two_ranks_see_and_leave_what_one_does(program, late, tmp_path):
    everybody = together(program, tmp_path / "together", late)
    if current().world.rank == 0:
        if program.__name__.endswith("an_earlier_run"):
            leave_files(tmp_path / "reference")
        reference = run(program, tmp_path / "reference")

        assert [reference] * 2 == everybody
        assert tree(tmp_path / "reference") == tree(tmp_path / "together")
