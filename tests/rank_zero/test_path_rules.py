"""What is real on every rank, and what is not."""

# scripts open files in every way

import glob
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from parwrap.decorators.rank_zero import every_rank_writes, rank_zero_first, rank_zero_only
from parwrap.rank_zero.files import intercepting_files
from parwrap.rank_zero.path_rules import PathRules
from parwrap.ranks.collectives import barrier, gather
from parwrap.ranks.group import alone, current, rank


def written(path):
    """The ranks that write to ``path`` for real: one that this rank alone has the name of."""
    path = Path(path)
    path.write_text("here")
    with alone():
        return path.exists()


def on_each(function, tmp_path):
    """What ``function`` gives on each rank, which has a directory of its own."""
    folder = tmp_path / str(rank())
    folder.mkdir()
    with intercepting_files(current()):
        result = function(folder)
    return gather(result)


@pytest.mark.ranks(2)
def test_a_file_is_real_on_rank_zero_also_below_the_temporary_directory(tmp_path):
    assert Path(tempfile.gettempdir()).resolve() in tmp_path.resolve().parents
    assert [True, False] == on_each(lambda folder: written(folder / "a"), tmp_path)


TEMPORARY = {
    "mkdtemp": lambda folder: Path(tempfile.mkdtemp(dir=folder)) / "a",
    "mkdtemp and a folder in it": lambda folder: Path(tempfile.mkdtemp(dir=folder), "deep").parent / "a",
    "mkstemp": lambda folder: tempfile.mkstemp(dir=folder)[1],
    "TemporaryDirectory": lambda folder: Path(keep(tempfile.TemporaryDirectory(dir=folder)).name) / "a",
    "NamedTemporaryFile": lambda folder: keep(tempfile.NamedTemporaryFile(dir=folder)).name,
}
kept = []


def keep(thing):
    kept.append(thing)
    return thing


@pytest.mark.parametrize("kind", TEMPORARY)
@pytest.mark.ranks(2)
def test_what_tempfile_has_made_is_real_on_every_rank(kind, tmp_path):
    assert [True, True] == on_each(lambda folder: written(TEMPORARY[kind](folder)), tmp_path)


LISTINGS = {
    "listdir": lambda folder: os.listdir(folder),
    "listdir of bytes": lambda folder: [os.fsdecode(name) for name in os.listdir(os.fsencode(folder))],
    "scandir": lambda folder: [entry.name for entry in os.scandir(folder)],
    "glob": lambda folder: [os.path.basename(path) for path in glob.glob(f"{folder}/*")],
    "iterdir": lambda folder: [path.name for path in folder.iterdir()],
    "walk": lambda folder: [name for _, folders, files in os.walk(folder) for name in (*folders, *files)],
}


@pytest.mark.parametrize("kind", LISTINGS)
@pytest.mark.ranks(2)
def test_a_rank_does_not_see_what_tempfile_has_made_on_another(kind, tmp_path):
    with intercepting_files(current()):
        folder = tempfile.mkdtemp(dir=tmp_path)
        with tempfile.NamedTemporaryFile(prefix="own", suffix=".pt", dir=tmp_path) as file:
            barrier()
            seen = LISTINGS[kind](tmp_path)
            barrier()
    with alone():
        everything = os.listdir(tmp_path)
    assert sorted(seen) == sorted(map(os.path.basename, (folder, file.name)))
    assert len(everything) >= 2, "both ranks' folders are there"


def test_what_tempfile_had_made_on_another_rank_in_an_earlier_run_is_seen(tmp_path, monkeypatch):
    (tmp_path / "tmpabcdefgh~r1").touch()
    assert PathRules(rank=0).of_another_rank(tmp_path / "tmpabcdefgh~r1")
    in_a_minute = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: in_a_minute)
    assert not PathRules(rank=0).of_another_rank(tmp_path / "tmpabcdefgh~r1")


@pytest.mark.ranks(2)
def test_files_without_a_name_are_every_ranks_own(tmp_path):
    def through(folder):
        with tempfile.TemporaryFile(dir=folder) as file, tempfile.SpooledTemporaryFile(max_size=1, dir=folder) as spooled:
            file.write(b"%d" % rank())
            spooled.write(b"many")
            file.seek(0)
            spooled.seek(0)
            return file.read(), spooled.read()

    assert [(b"0", b"many"), (b"1", b"many")] == on_each(through, tmp_path)


@pytest.mark.ranks(2)
def test_a_temporary_folder_is_gone_again(tmp_path):
    def through(folder):
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            os.makedirs(f"{inside}/deep/deeper")
            Path(inside, "deep", "a").write_text("a")
            os.rename(f"{inside}/deep/a", f"{inside}/b")
            shutil.copytree(f"{inside}/deep", f"{inside}/copy")
            seen = sorted(os.listdir(inside))
        with alone():
            return seen, os.listdir(folder)

    assert [(["b", "copy", "deep"], [])] * 2 == on_each(through, tmp_path)


@pytest.mark.parametrize(
    "variable", ["XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR"]
)
@pytest.mark.ranks(2)
def test_a_cache_is_real_on_every_rank(variable, tmp_path, monkeypatch):
    def through(folder):
        monkeypatch.setenv(variable, str(folder / "cache"))  # as scripts do, which set it themselves
        os.makedirs(folder / "cache" / "deep")
        return written(folder / "cache" / "deep" / "a"), written(folder / "a")

    assert [(True, True), (True, False)] == on_each(through, tmp_path)


@pytest.mark.ranks(2)
def test_caches_are_found_by_the_home_directory(tmp_path, monkeypatch):
    def through(folder):
        monkeypatch.setenv("HOME", str(folder))
        for name in ("XDG_CACHE_HOME", "MPLCONFIGDIR"):
            monkeypatch.delenv(name, raising=False)
        os.makedirs(folder / ".cache")
        os.makedirs(folder / ".config" / "matplotlib")
        return written(folder / ".cache" / "a"), written(folder / ".config" / "matplotlib" / "a"), written(folder / "a")

    assert [(True, True, True), (True, True, False)] == on_each(through, tmp_path)


@pytest.mark.ranks(2)
def test_devices_and_descriptors_are_left_alone(tmp_path):
    def through(folder):
        with open(os.devnull, "w") as nowhere:
            nowhere.write("x")
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as pipe:
            pipe.write("through")
        with os.fdopen(reading) as pipe:
            return nowhere.name, pipe.read()

    assert [(os.devnull, "through")] * 2 == on_each(through, tmp_path)


class Writes:
    """A dataset whose workers write what they have drawn."""

    def __init__(self, folder):
        self.folder = folder
        Path(folder, "input.txt").write_text("made by the script")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        Path(self.folder, f"{os.getpid()}-{index}.txt").write_text("by a worker")
        return Path(self.folder, "input.txt").read_text()


@pytest.mark.ranks(2)
def test_workers_of_loaders_write_for_real_and_read_what_their_rank_has_written(tmp_path):
    def through(folder):
        batches = list(DataLoader(Writes(folder), batch_size=2, num_workers=2))
        with alone():
            return batches, len(list(folder.glob("*-*.txt")))

    assert [([["made by the script"] * 2] * 2, 4)] * 2 == on_each(through, tmp_path)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.ranks(2)
def test_what_is_real_finds_the_folder_that_rank_zero_makes(slow, tmp_path):
    folder = tmp_path / "out"
    with intercepting_files(current()):
        if rank() == slow:
            time.sleep(0.2)
        os.makedirs(folder / "deep")
        with tempfile.TemporaryDirectory(dir=folder / "deep") as inside, every_rank_writes():
            Path(folder, f"{rank()}.txt").write_text("a")
            child = multiprocessing.get_context("fork").Process(target=Path(inside, "a").write_text, args=("a",))
            child.start()
            child.join()
            seen = os.listdir(inside)

    assert ["a"] == seen
    barrier()
    assert ["0.txt", "1.txt", "deep"] == sorted(os.listdir(folder))


@pytest.mark.ranks(2)
def test_other_processes_write_for_real(tmp_path):
    def through(folder):
        child = multiprocessing.get_context("fork").Process(target=Path(folder, "forked").write_text, args=("a",))
        child.start()
        child.join()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(Path(folder, "pooled").write_text, ["a"])
        seen = os.path.exists(os.path.join(folder, "pooled"))
        subprocess.run([sys.executable, "-c", "open('started', 'w')"], cwd=folder, check=True)
        with alone():
            return seen, sorted(os.listdir(folder))

    assert [(True, ["forked", "pooled", "started"])] * 2 == on_each(through, tmp_path)


@pytest.mark.ranks(2)
def test_what_a_rank_runs_alone_it_writes_for_real(tmp_path):
    @rank_zero_only(local=True)
    def report(folder):
        return written(folder / "report")

    @rank_zero_first
    def first(folder):
        return written(folder / "first")

    assert [(True, True), (None, True)] == on_each(lambda folder: (report(folder), first(folder)), tmp_path)


@pytest.mark.ranks(2)
def test_a_thread_goes_on_writing_for_rank_zero_while_the_main_one_runs_something_alone(tmp_path):
    begun, done = threading.Event(), threading.Event()

    def write(folder):
        begun.wait()
        Path(folder, "log").write_text("x")
        done.set()

    def through(folder):
        threading.Thread(target=write, args=(folder,)).start()
        with alone():
            begun.set()
            done.wait()
            return os.listdir(folder)

    assert [["log"], []] == on_each(through, tmp_path)
