"""Whatever a plain script does to files, it sees on every rank, and leaves behind, what it does on one."""

import inspect
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import parwrap
from parwrap.group.group import alone

sys.path.insert(0, str(Path(__file__).parent))
import file_programs
import file_tree_programs

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
    os.chdir(folder)
    try:
        return program(parwrap.rank())
    finally:
        os.chdir(folder.parent)


def leave_files(folder):
    """What an earlier run has left behind."""
    folder.mkdir()
    (folder / "old").mkdir()
    (folder / "old" / "a.txt").write_text("a")
    (folder / "old" / "b.txt").write_text("b")
    (folder / "old.txt").write_text("old\n")
    (folder / "old.json").write_text("[0]")
    torch.save(1, folder / "old.pt")


def scratch_directories():
    return set(Path(tempfile.gettempdir()).glob("parwrap-scratch*"))


def check(program, folder, size):
    scratch = scratch_directories()
    for late in range(2):
        together = folder / f"{late}"
        if program.__name__.endswith("an_earlier_run") and parwrap.rank() == 0:
            leave_files(together)
            leave_files(folder / "reference")
        parwrap.barrier()
        with slow(program, parwrap.rank() % 2 == late), parwrap.distributed(timeout=20):
            seen = run(program, together)
        everybody = parwrap.gather(seen)
        if parwrap.rank() == 0:
            with alone():
                reference = run(program, folder / "reference")

            assert [reference] * size == everybody, f"rank {late} was late"
            assert tree(folder / "reference") == tree(together)
            for path in sorted((folder / "reference").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            (folder / "reference").rmdir()
        parwrap.barrier()
    assert scratch_directories() <= scratch


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.ranks(2)
def test_two_ranks_see_and_leave_what_one_does(program, tmp_path):
    check(program, tmp_path, 2)


@pytest.mark.parametrize("program", PROGRAMS[::4], ids=lambda program: program.__name__)
@pytest.mark.ranks(3)
def test_three_ranks_do_too(program, tmp_path):
    check(program, tmp_path, 3)
