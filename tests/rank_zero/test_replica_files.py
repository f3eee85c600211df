"""What becomes of a clone's effects when its scope ends, and of those that no library hides."""

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch

import parwrap
from parwrap.group.group import current
from parwrap.rank_zero.file_versions import Awaited


def scratch_directories():
    return set(Path(tempfile.gettempdir()).glob("parwrap-scratch*"))


@pytest.mark.ranks(2)
def test_scratch_is_gone_after_an_error_too(tmp_path):
    before = scratch_directories()

    @parwrap.distributed
    def fails():
        (tmp_path / "a").write_text("a")
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    parwrap.barrier()

    assert scratch_directories() <= before


@pytest.mark.ranks(2)
def test_a_file_that_is_closed_after_the_scope_is_still_rank_zeros(tmp_path):
    with parwrap.distributed():
        file = open(tmp_path / "a", "w")
        file.write(f"by {parwrap.rank()}")
    file.close()
    parwrap.barrier()

    assert "by 0" == (tmp_path / "a").read_text()


@pytest.mark.ranks(2)
def test_after_the_scope_every_rank_writes_by_itself(tmp_path):
    mine = tmp_path / str(parwrap.rank())
    with parwrap.distributed():
        mine.write_text("dropped")
        opened_late = open
    mine.write_text("kept")
    with opened_late(mine, "a") as file:  # the patched function, which a library may have got hold of
        file.write(" too")

    assert "kept too" == mine.read_text()


@pytest.mark.ranks(2)
def test_a_clone_changes_nothing_whichever_call_it_uses(tmp_path):
    names = ["a", "b", "c", "deep"]
    if parwrap.rank() == 0:
        for name in names[:3]:
            (tmp_path / name).write_text(name)
        (tmp_path / "deep").mkdir()
    parwrap.barrier()
    os.chdir(tmp_path)
    with parwrap.distributed():
        if parwrap.rank() == 1:
            folder = os.open(".", os.O_RDONLY)
            os.unlink("a", dir_fd=folder)
            os.rename("b", "moved", src_dir_fd=folder, dst_dir_fd=folder)
            os.mkdir("new", dir_fd=folder)
            os.symlink("c", "link", dir_fd=folder)
            os.close(folder)
            os.chmod("moved", 0)
            os.chmod("link", 0)
            os.chmod("c", 0)
            os.truncate("c", 0)
            os.rmdir("deep")
            descriptor = os.open("c", os.O_RDWR)
            os.write(descriptor, b"other")
            os.close(descriptor)
            os.replace("c", "d")
            with open("moved", "a") as file:
                file.write("other")
            os.makedirs("e/f", exist_ok=True)
            open("e/f/g", "xb", buffering=0).close()
            seen = sorted(os.listdir()), sorted(os.listdir("e")), open("d").read()

            assert (["d", "e", "link", "moved", "new"], ["f"], "other") == seen
    parwrap.barrier()
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert names[:3] == [(tmp_path / name).read_text() for name in names[:3]]
    assert 0o444 & (tmp_path / "c").stat().st_mode


@pytest.mark.ranks(2)
def test_a_path_reached_by_another_name_is_the_same_file(tmp_path):
    if parwrap.rank() == 0:
        (tmp_path / "real").mkdir()
        (tmp_path / "alias").symlink_to("real")
    parwrap.barrier()
    with parwrap.distributed():
        (tmp_path / "alias" / "a.txt").write_text(f"by {parwrap.rank()}")
        os.chdir(tmp_path / "real")
        names = ["a.txt", "./a.txt", "../alias/a.txt", str(tmp_path / "real" / "a.txt"), b"a.txt", Path("a.txt")]

        assert ["by 0"] * len(names) == [open(name).read() for name in names]


@pytest.mark.ranks(2)
def test_a_checkpoint_that_rank_zero_removes_while_another_rank_looks_is_still_listed(tmp_path, monkeypatch):
    wait, store = Awaited.wait, current().store

    def wait_until_removed(self, key, *args, **options):
        found = wait(self, key, *args, **options)
        store.set("looked", b"")
        deadline = time.monotonic() + 10
        while os.path.lexists(key) and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    @parwrap.distributed
    def train():
        torch.save(1, "last.pt")
        names = os.listdir()
        if parwrap.rank() == 0:
            store.wait(["looked"])
        os.remove("last.pt")
        return names

    if parwrap.rank():
        monkeypatch.setattr(Awaited, "wait", wait_until_removed)
    monkeypatch.chdir(tmp_path)

    assert [["last.pt"]] * 2 == parwrap.gather(train())
