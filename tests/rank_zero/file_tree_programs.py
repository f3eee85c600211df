"""The same for scripts that copy, move, remove and look for files, log to them, and find those of an earlier run."""

# scripts open files in every way

import glob
import json
import logging
import os
import shutil
import tempfile
import threading
import zipfile
from pathlib import Path

import torch


def copies(rank):
    Path("best").mkdir()
    for epoch in range(3):
        torch.save(epoch, "checkpoint.pt")
        shutil.copy("checkpoint.pt", "best/model.pt")
        shutil.copyfile("checkpoint.pt", f"best/{epoch}.pt")
    shutil.copy2("best/0.pt", "zero.pt")
    shutil.copytree("best", "copy")
    return torch.load("best/model.pt"), torch.load("zero.pt"), sorted(os.listdir("copy")), torch.load("copy/1.pt")


def moves(rank):
    os.makedirs("run/deep")
    Path("run/deep/a.txt").write_text(f"rank {rank}")
    torch.save(rank, "run/b.pt")
    shutil.move("run", "moved")
    shutil.move("moved/b.pt", "c.pt")
    os.rename("moved/deep", "deep")
    return torch.load("c.pt"), open("deep/a.txt").read(), os.listdir("moved"), os.path.exists("run")


def keep_the_last_three(rank):
    for epoch in range(6):
        torch.save(epoch, f"checkpoint_{epoch}.pt")
        saved = sorted(glob.glob("checkpoint_*.pt"), key=lambda name: int(name[11:-3]))
        for old in saved[:-3]:
            os.remove(old)
    return [torch.load(name) for name in saved[-3:]], sorted(os.listdir())


def removed_what_may_not_be_there(rank):
    seen = []
    for _ in range(2):
        try:
            os.remove("old.txt")
            seen.append("removed")
        except FileNotFoundError as error:
            seen.append(error.filename)
        Path("old.txt").write_text("old")
    Path("old.txt").unlink()
    Path("old.txt").unlink(missing_ok=True)
    os.mkdir("folder")
    Path("folder/a").touch()
    try:
        os.rmdir("folder")
    except OSError as error:
        seen.append(error.filename)
    os.remove("folder/a")
    os.rmdir("folder")
    shutil.rmtree("folder", ignore_errors=True)
    return seen, os.listdir()


def link_to_the_latest(rank):
    seen = []
    for epoch in range(3):
        torch.save(epoch, f"{epoch}.pt")
        if os.path.islink("latest.pt"):
            os.unlink("latest.pt")
        os.symlink(f"{epoch}.pt", "latest.pt")
        seen.append((torch.load("latest.pt"), os.readlink("latest.pt")))
    os.link("0.pt", "hard.pt")
    return seen, torch.load("hard.pt")


def exclusive_and_low_level(rank):
    seen = []
    for _ in range(2):
        try:
            with open("lock", "x") as file:
                file.write("mine")
        except FileExistsError as error:
            seen.append(error.filename)
    descriptor = os.open("low.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, b"low")
    os.close(descriptor)
    with os.fdopen(os.open("fd.txt", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("by descriptor")
    os.chmod("low.txt", 0o640)
    os.utime("low.txt", (1, 1))
    return seen, open("low.txt").read(), open("fd.txt").read(), os.path.getsize("fd.txt")


def archives(rank):
    os.mkdir("data")
    Path("data/a.txt").write_text("a")
    with zipfile.ZipFile("code.zip", "w") as archive:
        archive.write("data/a.txt")
    shutil.make_archive("all", "gztar", "data")
    shutil.unpack_archive("all.tar.gz", "unpacked")
    return zipfile.ZipFile("code.zip").namelist(), open("unpacked/a.txt").read()


def walked_and_globbed(rank):
    for name in ("a", "b/c"):
        os.makedirs(name)
        Path(name, "x.txt").write_text(name)
    walked = [(top, sorted(folders), sorted(files)) for top, folders, files in sorted(os.walk("."))]
    with os.scandir("a") as entries:
        scanned = [(each.name, each.path, each.is_file(), each.is_dir(), each.stat().st_size) for each in entries]
    return walked, scanned, sorted(glob.glob("**/*.txt", recursive=True)), sorted(os.listdir(b"b"))


def working_directory_changed(rank):
    os.makedirs("run")
    os.chdir("run")
    Path("a.txt").write_text("a")
    seen = os.path.basename(os.getcwd()), os.listdir()
    os.chdir("..")
    return seen, open("run/a.txt").read()


def log_file(rank):
    handler = logging.FileHandler("train.log")
    logger = logging.getLogger("programs")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    for epoch in range(5):
        logger.info("epoch %d", epoch)
    logger.removeHandler(handler)
    handler.close()
    return open("train.log").read().splitlines()


def written_by_a_thread(rank):
    def write(number):
        for line in range(20):
            with open(f"{number}.txt", "a") as file:
                file.write(f"{line}\n")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(open(f"{number}.txt").readlines()) for number in range(4)]


def modes_that_do_not_exist(rank):
    errors = []
    for mode, encoding in ("rw", None), ("q", None), ("wb", "utf8"), ("r+", None), ("w", "no"):
        try:
            open("a.txt", mode, encoding=encoding)
        except (ValueError, OSError, LookupError) as error:
            errors.append(str(error))
    return errors


def log_of_an_earlier_run(rank):
    seen = open("old.txt").read()
    for number in range(3):
        with open("old.txt", "a") as file:
            file.write(f"{number}\n")
    return seen, open("old.txt").read().splitlines()


def state_read_and_written_of_an_earlier_run(rank):
    seen = []
    for _ in range(4):
        state = json.load(open("old.json"))
        seen.append(state)
        with open("old.json", "w") as file:
            json.dump([*state, len(state)], file)
    return seen


def replaced_whole_of_an_earlier_run(rank):
    seen = []
    for _ in range(4):
        seen.append(torch.load("old.pt"))
        torch.save(seen[-1] + 1, "old.pt")
    os.remove("old.pt")
    return seen, os.path.exists("old.pt")


def edited_in_place_of_an_earlier_run(rank):
    with open("old.txt", "r+") as file:
        first = file.readline()
        file.seek(0)
        file.write("new")
    os.truncate("old.txt", 4)
    os.chmod("old.txt", 0o600)
    os.utime("old.txt", (5, 5))
    return first, open("old.txt").read()


def moved_of_an_earlier_run(rank):
    os.rename("old.txt", "older.txt")
    shutil.move("old", "backup")
    Path("old").mkdir()
    Path("old/new.txt").write_text("new")
    shutil.copytree("backup", "again")
    return (
        open("older.txt").read(),
        sorted(os.listdir("backup")),
        open("backup/a.txt").read(),
        sorted(os.listdir("again")),
        os.listdir("old"),
    )


def removed_of_an_earlier_run(rank):
    shutil.rmtree("old")
    os.remove("old.txt")
    seen = [os.path.exists("old/a.txt"), os.path.isdir("old"), sorted(os.listdir())]
    os.makedirs("old")
    Path("old/b.txt").write_text("new")
    return seen, os.path.exists("old/a.txt"), os.listdir("old"), open("old/b.txt").read()


def folder_read_and_then_removed_of_an_earlier_run(rank):
    seen = [sorted(os.listdir("old")), open("old/a.txt").read(), sorted(each.name for each in os.scandir("old") if each.is_file())]
    shutil.rmtree("old")
    return seen, os.path.exists("old"), os.path.exists("old/a.txt"), sorted(os.listdir())


def folder_emptied_by_hand_of_an_earlier_run(rank):
    seen = []
    for name in sorted(os.listdir("old")):
        seen += [name, open(f"old/{name}").read(), os.path.getsize(f"old/{name}")]
        os.remove(f"old/{name}")
    seen.append(os.listdir("old"))
    os.rmdir("old")
    return seen, os.path.exists("old"), sorted(os.listdir())


def folder_read_and_made_anew_of_an_earlier_run(rank):
    seen = [sorted(os.listdir("old")), open("old/a.txt").read(), os.path.getsize("old/b.txt")]
    shutil.rmtree("old")
    os.makedirs("old/deep")
    Path("old/a.txt").write_text("new")
    return seen, sorted(os.listdir("old")), open("old/a.txt").read()


def folder_read_and_moved_of_an_earlier_run(rank):
    seen = [os.path.isdir("old"), sorted(os.listdir("old")), open("old/a.txt").read(), os.path.exists("backup")]
    os.rename("old", "backup")
    seen += [os.path.exists("old"), sorted(os.listdir("backup")), open("backup/a.txt").read()]
    os.mkdir("old")
    Path("old/c.txt").write_text("c")
    return seen, os.listdir("old"), sorted(os.listdir("backup")), open("backup/b.txt").read()


def folder_moved_twice_and_back_of_an_earlier_run(rank):
    seen = [sorted(os.listdir("old")), open("old/b.txt").read()]
    os.rename("old", "first")
    seen += [sorted(os.listdir("first")), open("first/b.txt").read()]
    os.rename("first", "second")
    os.remove("second/a.txt")
    seen += [os.listdir("second"), open("second/b.txt").read(), os.path.exists("first")]
    os.rename("second", "old")
    return seen, os.listdir("old"), open("old/b.txt").read(), os.path.exists("second"), sorted(os.listdir())


def folder_changed_after_it_was_moved_of_an_earlier_run(rank):
    seen = [open("old/a.txt").read(), sorted(os.listdir("old"))]
    shutil.move("old", "backup")
    Path("backup/a.txt").write_text("new")
    Path("backup/c.txt").write_text("c")
    seen += [open("backup/a.txt").read(), sorted(os.listdir("backup"))]
    shutil.rmtree("backup")
    return seen, os.path.exists("backup"), os.path.exists("old")


def resumed_from_an_earlier_run(rank):
    start = torch.load("old.pt") if os.path.isfile("old.pt") else 0
    for epoch in range(start + 1, start + 4):
        torch.save(epoch, "old.pt")
        torch.save(epoch, f"epoch{epoch}.pt")
    return start, sorted(glob.glob("*.pt"))


def working_directory_of_an_earlier_run(rank):
    os.chdir("old")
    seen = os.path.basename(os.getcwd()), sorted(os.listdir("."))
    os.chdir("..")
    return seen, os.path.exists("old.txt")


def real_paths_in_a_new_working_directory(rank):
    os.makedirs("out/inner")
    os.chdir("out/inner")
    seen = [os.path.realpath("x.txt").endswith("out/inner/x.txt"), Path("y").resolve().parent.name, os.path.islink("x.txt")]
    os.chdir("../..")
    return seen


def new_working_directory_beside_files_of_an_earlier_run(rank):
    os.makedirs("out/inner")
    os.chdir("out/inner")
    with open("../../old.txt") as file:
        seen = [file.read(), os.path.exists("../../old.txt"), os.path.getsize("../../old.txt"), os.path.exists("../../new.txt")]
    with open("log.txt", "w") as file:
        file.write("a")
    os.chdir("../..")
    return seen, os.listdir("out/inner"), os.path.exists("old.txt"), os.path.exists("out/inner/log.txt")


def folders_by_descriptor(rank):
    """A folder that this run has made or moved, known by a descriptor."""
    os.makedirs("a/deep")
    os.rename("a", "b")
    folder = os.open("b", os.O_RDONLY)
    with os.fdopen(os.open("x.txt", os.O_WRONLY | os.O_CREAT, dir_fd=folder), "w") as file:
        file.write("x")
    Path("b/y.txt").write_text("y")
    os.mkdir("new", dir_fd=folder)
    os.replace("y.txt", "z.txt", src_dir_fd=folder, dst_dir_fd=folder)
    with os.scandir(folder) as entries:
        seen = sorted((each.name, each.path, os.fspath(each), each.is_file(), each.is_dir(), each.is_symlink()) for each in entries)
    seen += [sorted(os.listdir(folder)), os.stat("z.txt", dir_fd=folder).st_size, sorted(glob.glob("*", root_dir="b"))]
    seen += [sorted(glob.glob("**", root_dir=".", dir_fd=folder, recursive=True)), open("b/x.txt").read(), sorted(os.listdir("b"))]
    with os.fdopen(os.open("z.txt", os.O_RDONLY, dir_fd=folder)) as file:
        seen.append(file.read())
    before = os.open(".", os.O_RDONLY)
    os.fchdir(folder)
    seen += [os.path.basename(os.getcwd()), open("x.txt").read(), os.path.exists("z.txt"), sorted(os.listdir())]
    os.fchdir(before)
    seen.append(sorted((top, sorted(folders), sorted(files)) for top, folders, files, _ in os.fwalk("b")))
    os.unlink("x.txt", dir_fd=folder)
    os.rmdir("new", dir_fd=folder)
    os.close(folder)
    os.close(before)
    return seen, sorted(os.listdir("b")), os.path.exists("a")


def folder_by_descriptor_of_an_earlier_run(rank):
    folder = os.open("old", os.O_RDONLY)
    seen = [sorted(os.listdir(folder)), [each.stat().st_size for each in os.scandir(folder)], os.path.exists("old")]
    os.rename("old", "backup")
    os.remove("a.txt", dir_fd=folder)
    seen += [sorted(os.listdir(folder)), sorted(os.listdir("backup")), sorted(os.listdir())]
    Path("backup/c.txt").write_text("c")
    seen += [sorted(os.listdir(folder)), os.stat("b.txt", dir_fd=folder).st_size, os.access("c.txt", os.R_OK, dir_fd=folder)]
    os.close(folder)
    shutil.rmtree("backup")
    return seen, sorted(os.listdir())


def temporary_files_without_a_name(rank):
    os.mkdir("out")
    with tempfile.TemporaryFile("w+", dir="out") as first, tempfile.SpooledTemporaryFile(1, "w+", dir="out") as second:
        for file in (first, second):
            file.write(f"{rank} of all")
            file.seek(0)
        seen = [first.read(), second.read(), sorted(os.listdir("out"))]
    Path("out/a.txt").write_text("a")
    with open("out/b.txt", "a") as file:
        file.write("once")
    return seen, sorted(os.listdir("out")), open("out/b.txt").read()
