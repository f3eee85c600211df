"""What ranks above 0 see of files and what becomes of what they write."""

# scripts open files in every way

import json
import multiprocessing
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import parwrap
from parwrap.checks.positions import Positions
from parwrap.errors import RankMismatchError
from parwrap.rank_zero.files import intercepting_files
from parwrap.rank_zero.path_rules import passing
from parwrap.ranks.collectives import barrier, gather
from parwrap.ranks.group import alone, current, rank


def files(is_checkpoint=lambda thing: False):
    return intercepting_files(current(), is_checkpoint=is_checkpoint)


def left_before(folder, *names):
    """Files in ``folder`` from before the scope, each with its name in it."""
    if rank() == 0:
        for name in names:
            (folder / name).write_text(name)
    barrier()


def scratch_directories():
    return list(current().folder.glob("files-*/scratch-*"))


@pytest.mark.ranks(2)
def test_scratch_is_gone_afterwards_also_after_an_error(tmp_path):
    @files()
    def fails():
        (tmp_path / "a").write_text("a")
        assert scratch_directories() or rank() == 0
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    barrier()

    assert not scratch_directories()


@pytest.mark.ranks(2)
def test_a_file_that_is_closed_after_the_scope_is_still_rank_zeros(tmp_path):
    with files():
        file = open(tmp_path / "a", "w")
        file.write(f"by {rank()}")
    file.close()
    barrier()

    assert "by 0" == (tmp_path / "a").read_text()


@pytest.mark.ranks(2)
def test_after_the_scope_every_rank_writes_by_itself(tmp_path):
    mine = tmp_path / str(rank())
    with files():
        mine.write_text("dropped")
        opened_late, folder_late = open, os.getcwd
    mine.write_text("kept")
    with opened_late(mine, "a") as file:  # the patched function, which a library may have got hold of
        file.write(" too")

    assert "kept too" == mine.read_text()
    assert os.getcwd() == folder_late()


@pytest.mark.ranks(2)
def test_a_replica_changes_nothing_whichever_call_it_uses(tmp_path, monkeypatch):
    names = ["a", "b", "c", "deep"]
    if rank() == 0:
        for name in names[:3]:
            (tmp_path / name).write_text(name)
        (tmp_path / "deep").mkdir()
    barrier()
    monkeypatch.chdir(tmp_path)
    with files():
        if rank() == 1:
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
    barrier()

    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert names[:3] == [(tmp_path / name).read_text() for name in names[:3]]
    assert 0o444 & (tmp_path / "c").stat().st_mode


@pytest.mark.ranks(2)
def test_a_path_reached_by_another_name_is_the_same_file(tmp_path, monkeypatch):
    if rank() == 0:
        (tmp_path / "real").mkdir()
        (tmp_path / "alias").symlink_to("real")
    barrier()
    with files():
        (tmp_path / "alias" / "a.txt").write_text(f"by {rank()}")
        monkeypatch.chdir(tmp_path / "real")
        names = ["a.txt", "./a.txt", "../alias/a.txt", str(tmp_path / "real" / "a.txt"), b"a.txt", Path("a.txt")]

        assert [f"by {rank()}"] * len(names) == [open(name).read() for name in names]


def listed_by_descriptor(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return os.listdir(descriptor) + [each.name for each in os.scandir(descriptor)]
    finally:
        os.close(descriptor)


@pytest.mark.ranks(2)
def test_what_rank_zero_has_made_ahead_is_hidden_until_the_next_barrier(tmp_path):
    with files() as opened:
        if rank() == 0:
            (tmp_path / "folder").mkdir()
            (tmp_path / "a.txt").write_text("ahead")
        barrier()
        seen = os.listdir(tmp_path), listed_by_descriptor(tmp_path), (tmp_path / "a.txt").exists(), (tmp_path / "folder").is_dir()
        opened.crossed()
        then = os.listdir(tmp_path), listed_by_descriptor(tmp_path), (tmp_path / "a.txt").exists(), (tmp_path / "folder").is_dir()
        barrier()

    everything = ["a.txt", "folder"], ["a.txt", "folder"] * 2, True, True
    assert [everything, ([], [], False, False)][rank()] == seen
    assert everything == then


@pytest.mark.ranks(2)
def test_the_error_about_a_file_that_rank_zero_hides_says_what_to_write(tmp_path):
    with files() as opened:
        if rank() == 0:
            (tmp_path / "a.txt").write_text("ahead")
            torch.save(1, tmp_path / "a.pt")
        barrier()
        if rank() == 1:
            for read in (Path.read_text, torch.load, os.stat, os.listdir):
                with pytest.raises(FileNotFoundError, match=r"Rank 0 has written it, .* Call parwrap.barrier\(\) before the line"):
                    read(tmp_path / ("a.pt" if read is torch.load else "a.txt"))
            with pytest.raises(FileNotFoundError) as caught:
                open(tmp_path / "none")
            assert "barrier" not in str(caught.value)
        opened.crossed()
        assert (1, "ahead") == (torch.load(tmp_path / "a.pt"), (tmp_path / "a.txt").read_text())
        barrier()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.ranks(2)
def test_native_code_that_does_not_find_this_ranks_file_gets_a_note(tmp_path):
    @parwrap.distributed
    def script():
        (tmp_path / "vocabulary.txt").write_text("a")
        raise RuntimeError("Error: No such file or directory (os error 2)")

    with pytest.raises(RuntimeError) as caught:
        script()
    notes = getattr(caught.value, "__notes__", [])
    assert [False, True][rank()] == any("vocabulary.txt. To read rank 0's instead, call parwrap.barrier()" in note for note in notes)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.ranks(2)
def test_an_import_that_does_not_find_this_ranks_file_gets_a_note(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    @parwrap.distributed
    def script(name):
        (tmp_path / "generated.py").write_text("")
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in ("generated", "numpi"):
        with pytest.raises(ModuleNotFoundError) as caught:
            script(name)
        notes = getattr(caught.value, "__notes__", [])
        assert (rank() == 1 and name == "generated") == any("call parwrap.barrier()" in note for note in notes)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("by_another", [True, False])
@pytest.mark.ranks(2)
def test_what_another_process_changes_while_a_rank_reads_it_is_named(tmp_path, by_another):
    left_before(tmp_path, "cache.json")

    @parwrap.distributed
    def script():
        with open(tmp_path / "log", "w") as log, open(tmp_path / ("cache.json" if by_another else "log")) as file:
            parwrap.barrier()
            log.write("a")
            log.flush()
            if rank() == 0:
                with passing():
                    subprocess.run([sys.executable, "-S", "-c", f"open({str(tmp_path / 'cache.json')!r}, 'a').write(']')"], check=True)
            parwrap.barrier()
            raise EOFError(file)

    with pytest.raises(EOFError) as caught:
        script()
    assert by_another == any("cache.json has changed since this rank opened it" in note for note in getattr(caught.value, "__notes__", []))


@pytest.mark.ranks(2)
def test_checkpoints_are_saved_in_threads(tmp_path):
    states = [{"x": torch.full((100,), number)} for number in range(8)]
    with files(lambda thing: True), ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            list(threads.map(lambda number: torch.save(states[number], tmp_path / f"{number}.pt"), range(8)))
        with passing():
            assert rank() == 1 or [*range(8)] == [int(torch.load(tmp_path / f"{number}.pt")["x"][0]) for number in range(8)]


def outside(command):
    """Another program does this on one rank, before any rank goes on."""
    with passing():
        if rank() == 1:
            subprocess.run([sys.executable, "-S", "-c", f"import os; {command}"], check=True)
        barrier()


@pytest.mark.ranks(2)
def test_what_another_program_makes_or_touches_is_there_for_all_ranks(tmp_path, monkeypatch):
    left_before(tmp_path, "data", "linked")
    monkeypatch.chdir(tmp_path)
    with files():
        outside("os.chmod('data', 0o600); os.link('linked', 'other'); os.mkdir('new'); open('new/a', 'w').write('a')")
        seen = Path("data").read_text(), os.path.getsize("linked"), Path("other").read_text(), os.listdir("new"), Path("new/a").read_text()
        names = os.listdir()

    assert ("data", 6, "linked", ["a"], "a") == seen
    assert ["data", "linked", "new", "other"] == names


@pytest.mark.ranks(2)
def test_what_is_beside_an_open_database_of_rank_zero_is_hidden(tmp_path):
    with files():
        if rank() == 0:
            database = sqlite3.connect(tmp_path / "a.db")
            database.execute("create table t (a int)")
            database.execute("insert into t values (1)")  # the transaction is open
            assert ["a.db", "a.db-journal"] == os.listdir(tmp_path)
        barrier()
        assert rank() == 0 or [] == os.listdir(tmp_path)
        barrier()
        if rank() == 0:
            database.close()


@pytest.mark.ranks(2)
def test_a_slower_rank_sees_what_is_there_before_rank_zero_removes_it_once_more(tmp_path):
    cache = tmp_path / "cache"
    if rank() == 0:
        cache.mkdir()
    left_before(cache, "old")
    with files():
        shutil.rmtree(cache)
        cache.mkdir()
        barrier()
        with passing():
            (cache / f"by {rank()}").write_text("of a child process")
        barrier()
        if rank() == 0:
            shutil.rmtree(cache)
            cache.mkdir()
        barrier()
        seen = os.listdir(cache)
        if rank() == 1:
            shutil.rmtree(cache)
            cache.mkdir()

        assert ["by 0", "by 1"] == seen or rank() == 0
        assert [] == os.listdir(cache)


def prepare(number):
    os.makedirs("cache", exist_ok=True)
    Path(f"cache/{number}").write_text(f"{number}")


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.ranks(2)
def test_processes_of_a_rank_prepare_a_folder_that_the_script_has_removed(tmp_path, monkeypatch, late):
    if rank() == 0:
        (tmp_path / "cache").mkdir()
    barrier()
    left_before(tmp_path / "cache", "0", "old")
    monkeypatch.chdir(tmp_path)
    with files():
        if rank() == late:
            time.sleep(0.1)
        assert ["0", "old"] == os.listdir("cache")
        shutil.rmtree("cache")
        if rank() == late:
            time.sleep(0.1)
        assert not os.path.exists("cache")
        os.makedirs("cache")
        assert "old" not in os.listdir("cache")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(prepare, range(4))
        barrier()  # the processes of both ranks write the same files
        assert ["0", "1", "2", "3"] == os.listdir("cache")
        assert ["0", "1"] == [Path(f"cache/{number}").read_text() for number in range(2)]
        Path("cache/4").write_text("4")
        assert [f"{number}" for number in range(5)] == os.listdir("cache")
        barrier()  # what the processes have written is real, and rank 0 removes it for both
        shutil.rmtree("cache")  # and once more
        os.makedirs("cache")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(prepare, range(2))
        barrier()
        assert ["0", "1"] == os.listdir("cache")


@pytest.mark.ranks(2)
def test_the_record_of_changes_does_not_grow_with_their_number(tmp_path):
    left_before(tmp_path, "old")

    def work(times):
        for _ in range(times):
            for name in ("log", "old"):
                with open(tmp_path / name, "a") as file:
                    file.write("x")
            (tmp_path / "temporary").write_text("x")
            os.replace(tmp_path / "temporary", tmp_path / "final")
            write_alone(tmp_path / "alone")
            assert (tmp_path / "alone").exists()

    with files():
        work(2)
        with passing():
            journal = next(current().folder.glob("files-*/journal"))
            before = journal.stat().st_size
        work(100)
        with passing():
            assert before == journal.stat().st_size
        barrier()


@pytest.mark.ranks(2)
def test_what_a_child_process_of_a_rank_makes_is_there_for_it(tmp_path):
    with files():
        path = tmp_path / str(rank())
        subprocess.run([sys.executable, "-S", "-c", f"open({str(path)!r}, 'w')"], check=True)

        assert path.exists()


def by_path(path, mode):
    return open(path, mode)


def by_descriptor(path, mode):
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), mode)


@pytest.mark.parametrize("opened", [by_path, by_descriptor])
@pytest.mark.ranks(2)
def test_a_child_process_reads_what_rank_zero_closes_later(opened, tmp_path):
    began = time.monotonic()
    with files(), open(tmp_path / "log", "w") as log:
        log.write("open on all ranks")
        barrier()
        with opened(tmp_path / "a", "w") as file:
            file.write("a")
            if rank() == 0:
                time.sleep(0.5)
        seen = subprocess.check_output([sys.executable, "-S", "-c", f"print(open({str(tmp_path / 'a')!r}).read())"], text=True)

    assert "a\n" == seen
    assert time.monotonic() - began < 8, "no waiting for the log"


@pytest.mark.ranks(3)
def test_what_a_rank_wrote_under_a_name_of_its_own_it_reads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with files():
        folders = [f"runs/{uuid.uuid4()}", f"runs/{time.time_ns()}-{os.getpid()}", tempfile.mkdtemp(), "."]
        names = [f"{folder}/{uuid.uuid4()}" for folder in folders]
        for name in names:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        for step in range(3):
            for name in names:
                torch.save(step, f"{name}.pt")
                with open(f"{name}.json", "w") as file:
                    json.dump(step, file)

        assert [2] * 4 == [torch.load(f"{name}.pt") for name in names]
        assert [2] * 4 == [json.load(open(f"{name}.json")) for name in names]
    barrier()
    assert 2 == len(os.listdir("runs")), "those of rank 0"


@pytest.mark.parametrize("module", ["torch", "torch.serialization"])
@pytest.mark.ranks(2)
def test_a_checkpoint_is_not_written_twice(tmp_path, module):
    module = sys.modules[module]
    with files(lambda thing: True):
        module.save(torch.zeros(100_000), tmp_path / "a.pt")

        assert 400_000 < os.path.getsize(tmp_path / "a.pt") < 500_000
        with passing():
            written = [path.stat().st_size < 1000 for path in Path(current().folder).rglob("a.pt")]
        assert rank() == 0 or [True] == written
        assert 100_000 == len(module.load(tmp_path / "a.pt", mmap=True))


@pytest.mark.ranks(2)
def test_a_checkpoint_that_only_another_rank_saves_is_an_error_that_names_the_line(tmp_path):
    with files(lambda thing: True):
        if rank() == 1:
            torch.save(1, tmp_path / "a.pt")
        barrier()
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "a.pt")
    with files(lambda thing: True):
        if rank() == 1:
            torch.save(1, tmp_path / "a.pt")
            with pytest.raises(RankMismatchError, match=r"test_replicas.py:\d+ loads a.pt.*save 1 at that line.*every_rank_writes"):
                torch.load(tmp_path / "a.pt")


@pytest.mark.ranks(2)
def test_what_is_saved_and_is_no_checkpoint_is_read_back_by_the_rank_that_saved_it(tmp_path):
    """As in a cache by sample: each rank saves other samples, at one line."""
    from safetensors.torch import load_file, save_file

    mine = range(rank(), 8, 2)
    with parwrap.distributed():
        model = torch.nn.Linear(3, 1)
        for sample in mine:
            torch.save({"x": torch.full((3,), sample)}, tmp_path / f"{sample}.pt")
            save_file({"x": torch.full((3,), sample)}, tmp_path / f"{sample}.safetensors")
        with open(tmp_path / "opened.pt", "wb") as file:
            torch.save(rank(), file)
        loaded = [torch.load(tmp_path / f"{sample}.pt")["x"][0].item() for sample in mine]
        others = [load_file(tmp_path / f"{sample}.safetensors")["x"][0].item() for sample in mine]
        opened = torch.load(tmp_path / "opened.pt")
        save_file({f"net.{name}": each.clone() for name, each in model.state_dict().items()}, tmp_path / "net.safetensors")
        with passing():
            marked = (tmp_path / "net.safetensors").stat().st_size if rank() == 0 else len(list(current().folder.rglob("net.safetensors")))

    assert [*mine] * 2 == loaded + others
    assert rank() == opened
    assert marked > 0


@pytest.mark.ranks(2)
def test_on_another_node_the_first_rank_stands_in_for_rank_zero(tmp_path):
    """Both ranks run here; each has a folder of its own, as on two nodes."""
    folder = tmp_path / f"node{rank()}"
    folder.mkdir()
    world = replace(current().world, node_rank=rank(), local_rank=0, local_size=1, node_ranks=(rank(),))
    with intercepting_files(replace(current(), world=world, folder=folder), is_checkpoint=lambda thing: True):
        torch.save(torch.full((100_000,), rank()), tmp_path / "a.pt")
        seen = torch.load(tmp_path / "a.pt")[0].item(), os.path.getsize(tmp_path / "a.pt") > 1000
        os.makedirs(tmp_path / "out", exist_ok=True)
        (tmp_path / "out" / "b.txt").write_text("b")

    assert [(0, True), (1, True)] == gather(seen)
    assert 0 == torch.load(tmp_path / "a.pt")[0].item()


@pytest.mark.ranks(2)
def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path):
    class Unpicklable:
        def __reduce__(self):
            raise ValueError("no")

    with files():
        torch.save("good", tmp_path / "a.pt")
        if rank() == 0:
            with pytest.raises(ValueError, match="no"):
                torch.save([torch.zeros(1000), Unpicklable()], tmp_path / "a.pt")

            assert "good" == torch.load(tmp_path / "a.pt")
            with alone():
                assert ["a.pt"] == os.listdir(tmp_path)


@pytest.mark.ranks(2)
def test_all_calls_are_the_identical_objects_again():
    import builtins
    import shutil

    def calls():
        own = [*vars(os).values(), *vars(torch.serialization).values()]
        return [builtins.open, torch.save, torch.load, shutil.rmtree, subprocess.Popen.__init__, *own]

    before = calls()
    with files():
        assert before[0] is not builtins.open

    assert all(mine is other for mine, other in zip(before, calls(), strict=True))


@pytest.mark.ranks(2)
def test_a_rank_that_waits_for_a_checkpoint_while_rank_zero_waits_for_it_is_an_error(tmp_path, monkeypatch):
    """Rank 1 saves and loads once more than rank 0, which has gone on to a barrier."""
    check_wait = Positions.check_wait
    monkeypatch.setattr(Positions, "check_wait", lambda self, since, what: check_wait(self, since, what, patience=0.3))
    with parwrap.distributed():
        model = torch.nn.Linear(1, 1)
        if parwrap.rank() == 1:
            torch.save(model.state_dict(), tmp_path / "best.pt")
            with pytest.raises(
                parwrap.LockstepError, match=r"rank 1 waits for a file of rank 0 at test_replicas\.py:\d+:\n  rank 0 is in parwrap\.barr"
            ):
                torch.load(tmp_path / "best.pt")
        parwrap.barrier()


@pytest.mark.ranks(2)
def test_a_file_that_rank_zero_appends_to_while_another_rank_copies_it_begins_with_its_old_content(tmp_path, monkeypatch):
    log = tmp_path / "log"
    if rank() == 0:
        log.write_text("old\n")
    barrier()
    copied, appended = tmp_path / "begins to copy", tmp_path / "has appended"

    def copy_late(source, target):
        with passing():
            if not copied.exists():
                copied.touch()
                while not appended.exists():
                    time.sleep(0.01)
        return copy(source, target)

    copy = shutil.copy
    if rank() == 1:
        monkeypatch.setattr(shutil, "copy", copy_late)
    with files():
        if rank() == 0:
            with passing():
                while not copied.exists():
                    time.sleep(0.01)
        with open(log, "a") as file:
            file.write(f"{rank()}\n")
        if rank() == 0:
            with passing():
                appended.touch()
        seen = log.read_text()
        barrier()

    assert "old\n" + f"{rank()}\n" == seen
    assert "old\n0\n" == log.read_text()


@pytest.mark.ranks(2)
def test_what_has_a_name_of_tempfile_is_each_ranks_own_whoever_makes_it(tmp_path):
    """For example the socket that multiprocessing's fork server listens at."""
    with files():
        name = tempfile.mktemp(dir=tmp_path)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(name)
            os.chmod(name, 0o600)

    assert 0o600 == os.stat(name).st_mode & 0o777
    assert 2 == len(set(gather(name)))


@pytest.mark.ranks(2)
def test_a_slower_rank_still_reads_what_rank_zero_made_alone_and_all_remove(tmp_path):
    with files():
        if rank() == 0:
            with alone():
                (tmp_path / "cache").mkdir()
                (tmp_path / "cache" / "a.txt").write_text("built")
        barrier()
        if rank() == 1:
            time.sleep(0.1)
        seen = os.listdir(tmp_path / "cache"), (tmp_path / "cache" / "a.txt").read_text()
        shutil.rmtree(tmp_path / "cache")

    assert (["a.txt"], "built") == seen
    assert not (tmp_path / "cache").exists()


@pytest.mark.ranks(2)
def test_what_is_removed_among_too_many_others_is_an_error_for_a_slower_rank_that_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr("parwrap.rank_zero.writer.MOST_KEPT", 1)
    left_before(tmp_path, "a.txt", "b.txt")
    with files():
        if rank() == 1:
            time.sleep(0.1)
            assert "a.txt" == (tmp_path / "a.txt").read_text()
            with pytest.raises(RankMismatchError) as caught:
                (tmp_path / "b.txt").read_text()
            assert ["a.txt", "b.txt"] == os.listdir(tmp_path)
        for name in ("a.txt", "b.txt"):
            os.remove(tmp_path / name)

    assert [] == os.listdir(tmp_path)
    if rank() == 1:
        assert str(caught.value).endswith(
            " reads b.txt, which rank 0 has already replaced or removed, like many other files. Slower ranks can read only a "
            "limited number of such files: call parwrap.barrier() before the line that replaces or removes them."
        )


@pytest.mark.ranks(2)
def test_what_rank_zero_makes_right_after_a_barrier_is_hidden(tmp_path):
    seen = []
    with files() as opened:
        for number in range(50):
            barrier()
            opened.crossed()
            seen.append((tmp_path / f"{number}").exists())
            (tmp_path / f"{number}").write_text("")

    assert [False] * 50 == seen


@pytest.mark.ranks(2)
def test_what_rank_zero_makes_right_after_it_ran_alone_is_hidden(tmp_path):
    seen = []
    with files():
        for number in range(20):
            write_alone(tmp_path / "log")
            if rank() == 1:
                time.sleep(0.005)
            seen += [(tmp_path / f"{number}").exists(), (tmp_path / "log").exists()]
            (tmp_path / f"{number}").mkdir()

    assert [False, True] * 20 == seen


@pytest.mark.ranks(2)
def test_a_slower_rank_reads_an_old_file_after_rank_zero_has_left_a_block_first(tmp_path):
    left_before(tmp_path, "a")
    with files():
        with parwrap.rank_zero_first():
            pass
        if rank() == 1:
            time.sleep(0.1)
        seen = (tmp_path / "a").read_text(), (tmp_path / "new").exists()
        os.remove(tmp_path / "a")
        (tmp_path / "new").mkdir()

    assert ("a", False) == seen


@pytest.mark.ranks(2)
def test_what_rank_zero_changes_alone_replaces_what_a_rank_has_written_or_removed(tmp_path):
    with files():
        (tmp_path / "log").write_text("head ")
        (tmp_path / "folder").mkdir()
        (tmp_path / "removed").touch()
        os.remove(tmp_path / "removed")
        shutil.rmtree(tmp_path / "folder")
        write_alone(tmp_path / "log", "rank 0")
        write_alone(tmp_path / "removed", "again")
        make_alone(tmp_path / "folder")

        assert ("head rank 0", "again") == ((tmp_path / "log").read_text(), (tmp_path / "removed").read_text())
        assert ["folder", "log", "removed"] == os.listdir(tmp_path)
        barrier()
        (tmp_path / "log").write_text("anew")
        assert "anew" == (tmp_path / "log").read_text()


@parwrap.rank_zero_only
def write_alone(path, text=""):
    with open(path, "a") as file:
        file.write(text)


@parwrap.rank_zero_only
def make_alone(path):
    path.mkdir()


def linked(path):
    os.link(path, f"{path}.link")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("touch", [Path.touch, partial(os.chmod, mode=0o600), linked], ids=["touch", "chmod", "link"])
def test_a_slower_rank_reads_an_old_file_that_rank_zero_has_touched(touch, tmp_path):
    left_before(tmp_path, "a")
    with files():
        if rank() == 1:
            time.sleep(0.1)
            assert (tmp_path / "a").read_text() == "a"
        touch(tmp_path / "a")
        assert (tmp_path / "a").read_text() == "a"
        with open(tmp_path / "a", "w") as file:
            file.write("b")


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_moved_stays(tmp_path):
    if rank() == 0:
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / f"{folder}.txt").write_text(folder)
    barrier()
    with files():
        with pytest.raises(OSError, match="not empty"):
            os.rename(tmp_path / "one", tmp_path / "two")
        if rank() == 1:
            time.sleep(0.1)
        seen = os.listdir(tmp_path / "one"), (tmp_path / "two" / "two.txt").read_text()
        (tmp_path / "two" / "two.txt").write_text("changed")

    assert (["one.txt"], "two") == seen


@pytest.mark.ranks(2)
def test_a_file_that_rank_zero_keeps_readable_is_no_link(tmp_path):
    left_before(tmp_path, "a")
    with files():
        if rank() == 1:
            time.sleep(0.1)
        seen = os.path.islink(tmp_path / "a"), [each.is_symlink() for each in os.scandir(tmp_path)]
        with pytest.raises(OSError, match="Invalid argument"):
            os.readlink(tmp_path / "a")
        os.remove(tmp_path / "a")

    assert (False, [False]) == seen


@pytest.mark.ranks(2)
def test_many_renamed_files_are_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr("parwrap.rank_zero.writer.MOST_KEPT", 3)
    left_before(tmp_path, *map(str, range(6)))
    with files():
        for number in range(5):
            os.rename(tmp_path / f"{number}", tmp_path / f"{number}.old")
            barrier()
        if rank() == 1:
            time.sleep(0.1)
        seen = (tmp_path / "5").read_text()
        os.remove(tmp_path / "5")

    assert "5" == seen


@pytest.mark.ranks(2)
def test_a_folder_moves_to_where_every_rank_writes(tmp_path):
    with files():
        (tmp_path / "a" / "deep").mkdir(parents=True)
        (tmp_path / "a" / "deep" / "b.txt").write_text("b")
        with tempfile.TemporaryDirectory() as folder:
            os.rename(tmp_path / "a", f"{folder}/a")
            seen = Path(folder, "a", "deep", "b.txt").read_text(), os.path.exists(tmp_path / "a")

    assert ("b", False) == seen


@pytest.mark.ranks(2)
def test_a_checkpoint_that_is_saved_again_keeps_its_mode_and_its_other_name(tmp_path):
    with files():
        torch.save(1, tmp_path / "a.pt")
        os.chmod(tmp_path / "a.pt", 0o600)
        torch.save(2, tmp_path / "a.pt")
        os.link(tmp_path / "a.pt", tmp_path / "b.pt")
        torch.save(3, tmp_path / "a.pt")

        assert (3, 3) == (torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt"))
    if rank() == 0:
        assert 0o600 == os.stat(tmp_path / "a.pt").st_mode & 0o777


@pytest.mark.ranks(2)
def test_threads_write_at_once(tmp_path):
    def write(name):
        for number in range(100):
            (tmp_path / f"{name}-{number}").write_text("x")

    with files(), ThreadPoolExecutor(4) as threads:
        list(threads.map(write, "abcd"))
        assert 400 == len(os.listdir(tmp_path))


@pytest.mark.ranks(2)
def test_a_file_that_is_never_closed_is_whole_after_the_scope(tmp_path):
    with files():
        file = open(tmp_path / "a", "w")
        file.write("left")
    barrier()

    assert "left" == (tmp_path / "a").read_text()
    file.close()
