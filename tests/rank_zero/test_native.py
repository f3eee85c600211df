"""Libraries whose native code writes to a path: each file is written by rank 0, and the others read what rank 0 has."""

import inspect
import os
import time

import pytest
import torch
import torch.distributed as dist

import native_programs
from parwrap.rank_zero.files import intercepting_files
from parwrap.ranks.group import current

PROGRAMS = [each for each in vars(native_programs).values() if inspect.isfunction(each)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.ranks(2)
def test_two_ranks_see_and_leave_what_one_does(program, tmp_path, monkeypatch):
    together, reference = tmp_path / "together", tmp_path / "reference"
    together.mkdir(exist_ok=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("_RJEM_MALLOC_CONF", "")  # polars sets it
    monkeypatch.chdir(together)
    with intercepting_files(current()):
        if current().world.rank == 0:
            time.sleep(0.05)
        seen = program(0)
    everybody = [None] * 2
    dist.all_gather_object(everybody, seen)
    if current().world.rank == 0:
        reference.mkdir()
        monkeypatch.chdir(reference)

        assert [program(0)] * 2 == everybody
        assert sorted(os.listdir(reference)) == sorted(os.listdir(together))


@pytest.mark.ranks(2)
def test_native_calls_are_put_back():
    import sqlite3

    calls = torch.jit.save, torch.jit.load, torch.export.save, torch.package.PackageExporter.__init__, sqlite3.connect
    with intercepting_files(current()):
        assert torch.jit.save is not calls[0]

    assert calls == (torch.jit.save, torch.jit.load, torch.export.save, torch.package.PackageExporter.__init__, sqlite3.connect)
