"""Ranks see what one process sees, however slow the disk and the store are for each of them."""

import inspect
import os
import random
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import parwrap
from parwrap.group.group import alone, current

sys.path.insert(0, str(Path(__file__).parent))
import file_programs
import file_tree_programs
from test_file_programs import leave_files, run

CALLS = ("stat", "lstat", "mkdir", "rename", "replace", "unlink", "rmdir", "scandir", "listdir", "readlink", "access", "open")
SEEDS = range(2)
LONGEST = 0.004
"""Seconds that a call takes longer at most."""


class SlowStore:
    """A store whose answers take a random time."""

    def __init__(self, store, wait):
        self._store, self._wait = store, wait

    def __getattr__(self, name):
        value = getattr(self._store, name)
        if name not in ("get", "check", "set", "add"):
            return value

        def slow(*args):
            self._wait()
            result = value(*args)
            self._wait()
            return result

        return slow


@contextmanager
def slow_at_random(seed):
    """Calls of the store and of ``os`` take a random time, before and after they act; a rank is slow for a while, then fast."""
    draw = random.Random(f"{seed}/{parwrap.rank()}")
    lazy = [0.0]

    def wait():
        if draw.random() < 0.05:
            lazy[0] = draw.choice((0.0, 0.1, 0.9))
        if draw.random() < lazy[0]:
            time.sleep(draw.random() * LONGEST)

    def slowed(call):
        def slow(*args, **kwargs):
            wait()
            result = call(*args, **kwargs)
            wait()
            return result

        return slow

    group, store = current(), current().store
    group.store = SlowStore(store, wait)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, slowed(getattr(os, name)))
            yield
    finally:
        group.store = store


def directories_made_if_they_are_not_there(rank):
    for number in range(20):
        os.makedirs(f"out/{number % 7}/{number}", exist_ok=True)
        os.makedirs(f"out/{number % 7}", exist_ok=True)
        Path(f"out/{number % 7}/{number}").mkdir(parents=True, exist_ok=True)
        if not os.path.exists(f"more/{number % 5}"):
            os.makedirs(f"more/{number % 5}")
    return sorted(os.listdir("out")), sorted(os.listdir("more"))


def an_output_directory_that_is_emptied_again_and_again(rank):
    seen = []
    for number in range(6):
        seen.append(os.path.isdir("out"))
        if os.path.exists("out"):
            shutil.rmtree("out")
        os.makedirs("out/logs")
        seen.append(sorted(os.listdir("out")))
        Path("out/logs/a.txt").write_text(str(number))
        seen.append(Path("out/logs/a.txt").read_text())
    return seen


def a_directory_of_before_that_is_emptied_as_in_an_earlier_run(rank):
    shutil.rmtree("old")
    os.makedirs("old", exist_ok=True)
    seen = [sorted(os.listdir("old")), Path("old.txt").read_text()]
    os.remove("old.txt")
    seen.append(os.path.exists("old.txt"))
    Path("old.txt").write_text("new")
    return [*seen, Path("old.txt").read_text(), sorted(os.listdir("."))]


def the_last_two_checkpoints_are_kept(rank):
    kept, seen = [], []
    for number in range(8):
        Path(f"{number}.tmp").write_text(str(number))
        os.replace(f"{number}.tmp", f"{number}.ckpt")
        kept.append(f"{number}.ckpt")
        if len(kept) > 2:
            os.remove(kept.pop(0))
        if os.path.islink("latest"):
            os.unlink("latest")
        os.symlink(kept[-1], "latest")
        seen.append((sorted(os.listdir(".")), Path("latest").read_text()))
    return seen


def a_free_name_is_searched(rank):
    for _ in range(5):
        tries = 0
        while os.path.exists(f"run{tries}"):
            tries += 1
        os.mkdir(f"run{tries}")
    return sorted(os.listdir("."))


def a_lock_file_is_made_and_removed(rank):
    for _ in range(5):
        os.close(os.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink("lock")
    return os.path.exists("lock")


def a_folder_is_moved_and_made_anew(rank):
    seen = []
    for number in range(4):
        os.makedirs("run")
        Path("run/a.txt").write_text(str(number))
        os.rename("run", f"run.{number}")
        seen.append((os.path.exists("run"), Path(f"run.{number}/a.txt").read_text()))
    return seen


OWN = [each for each in list(vars().values()) if inspect.isfunction(each) and [*inspect.signature(each).parameters] == ["rank"]]
PROGRAMS = [*OWN, *(each for of in (file_programs, file_tree_programs) for each in vars(of).values() if inspect.isfunction(each))]


@pytest.mark.parametrize(
    "program",
    [*OWN, *(pytest.param(each, marks=[pytest.mark.slow] * (number % 3 > 0)) for number, each in enumerate(PROGRAMS[len(OWN) :]))],
    ids=lambda program: program.__name__,
)
@pytest.mark.ranks(3)
def test_three_ranks_see_what_one_does_however_slow_each_is(program, tmp_path):
    earlier = program.__name__.endswith("an_earlier_run")
    if earlier:
        for folder in ("reference", *map(str, SEEDS)) if parwrap.rank() == 0 else ():
            leave_files(tmp_path / folder)
    reference = None
    if parwrap.rank() == 0:
        with alone():
            reference = run(program, tmp_path / "reference")
    parwrap.barrier()
    for seed in SEEDS:
        with slow_at_random(seed), parwrap.distributed(timeout=20):
            seen = run(program, tmp_path / str(seed))
        everybody = parwrap.gather(seen)
        if parwrap.rank() == 0:
            assert [reference] * 3 == everybody, f"seed {seed}"
