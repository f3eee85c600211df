"""Libraries whose native code writes to a path: each file is written by rank 0, and the others read what rank 0 has."""

import inspect
import os
import time
from types import SimpleNamespace

import pytest

import native_programs
import parwrap
from parwrap.group.group import alone

PROGRAMS = [each for each in vars(native_programs).values() if inspect.isfunction(each)]


def check(program, folder, size):
    for late in range(2):
        together = folder / f"{late}"
        together.mkdir(exist_ok=True)
        os.chdir(together)
        with parwrap.distributed(timeout=20):
            if parwrap.rank() % 2 == late:
                time.sleep(0.05)
            seen = program(parwrap.rank())
        everybody = parwrap.gather(seen)
        reference = folder / f"{late}-reference"
        if parwrap.rank() == 0:
            reference.mkdir()
            os.chdir(reference)
            with alone():
                alone_seen = program(0)

            assert [alone_seen] * size == everybody, f"rank {late} was late"
            assert sorted(os.listdir(reference)) == sorted(os.listdir(together))
            for name in os.listdir(reference):
                # an archive may hold times and names of its own
                assert (
                    name.endswith((".pt", ".pt2", ".h5", ".safetensors"))
                    or (reference / name).read_bytes() == (together / name).read_bytes()
                )
        parwrap.barrier()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.ranks(2)
def test_two_ranks_see_and_leave_what_one_does(program, tmp_path):
    check(program, tmp_path, 2)


@pytest.mark.parametrize("program", PROGRAMS[::3], ids=lambda program: program.__name__)
@pytest.mark.ranks(3)
def test_three_ranks_do_too(program, tmp_path):
    check(program, tmp_path, 3)


@pytest.mark.ranks(2)
def test_native_calls_are_put_back(tmp_path):
    import sqlite3

    import torch

    calls = (torch.jit.save, torch.jit.load, torch.export.save, torch.package.PackageExporter.__init__, sqlite3.connect)
    with parwrap.distributed():
        assert torch.jit.save is not calls[0]

    assert calls == (torch.jit.save, torch.jit.load, torch.export.save, torch.package.PackageExporter.__init__, sqlite3.connect)


@pytest.mark.ranks(2)
def test_a_file_that_rank_zero_replaces_while_another_rank_opens_it(tmp_path, monkeypatch):
    files = pytest.importorskip("h5py._hl.files")

    def opens_late(*args, **kwargs):
        time.sleep(0.3 * parwrap.rank())
        return h5f.open(*args, **kwargs)

    h5f = files.h5f
    monkeypatch.setattr(files, "h5f", SimpleNamespace(**{**vars(h5f), "open": opens_late}))
    os.chdir(tmp_path)
    seen = []
    with parwrap.distributed():
        for step in range(3):
            with files.File("model.h5", "w") as file:
                file["step"] = step
            with files.File("model.h5") as file:
                seen.append(int(file["step"][()]))
            if parwrap.rank() == 0:
                time.sleep(0.1)  # the other looks up where to read, and opens the file when the next is there

    assert [0, 1, 2] == seen
