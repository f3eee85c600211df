import os
import threading
from pathlib import Path

import pytest
import torch

import parwrap


def test_one_rank_writes_as_ever(tmp_path):
    with parwrap.every_rank_writes():
        (tmp_path / "a").write_text("a")

    assert "a" == (tmp_path / "a").read_text()


@pytest.mark.ranks(2)
def test_every_rank_writes_its_own(tmp_path):
    path = tmp_path / f"{parwrap.rank()}.pt"
    with parwrap.distributed():
        with parwrap.every_rank_writes():
            torch.save(parwrap.rank(), path)
        for_all = tmp_path / "all.txt"
        for_all.write_text("once")
        parwrap.barrier()

        assert [0, 1] == [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
        with open(path, "ab") as file:  # it stays the rank's own
            file.write(b"more")
    parwrap.barrier()
    assert ["0.pt", "1.pt", "all.txt"] == sorted(os.listdir(tmp_path))
    assert path.read_bytes().endswith(b"more")


@pytest.mark.ranks(2)
def test_what_is_below_a_directory_made_in_it_stays_the_ranks_own_also_in_threads(tmp_path):
    folder = tmp_path / f"rank{parwrap.rank()}"

    @parwrap.every_rank_writes
    def make():
        os.makedirs(folder / "logs")

    with parwrap.distributed():
        make()
        thread = threading.Thread(target=lambda: Path(folder, "logs", "a.txt").write_text("a"))
        thread.start()
        thread.join()
        (tmp_path / "b.txt").write_text("by rank 0")
        parwrap.barrier()
    assert ["b.txt", "rank0", "rank1"] == sorted(os.listdir(tmp_path))
    assert "a" == (folder / "logs" / "a.txt").read_text()
