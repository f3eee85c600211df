"""Pieces of plain scripts that work on files, in a directory of their own; each returns what it has seen there."""

import bz2
import csv
import glob
import gzip
import json
import logging
import os
import pickle
import shutil
import tempfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import torch

__all__ = ["PROGRAMS"]

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def json_by_open(rank):
    with open("metrics.json", "w") as file:
        json.dump({"rank": rank}, file)
    with open("metrics.json") as file:
        return json.load(file)


@program
def written_without_being_closed(rank):
    json.dump([rank], open("a.json", "w"))
    return json.load(open("a.json"))


@program
def binary_written_and_read_through_one_handle(rank):
    with open("both.bin", "w+b") as file:
        file.write(b"abc")
        file.seek(1)
        seen = file.read()
    with open("both.bin", "r+b") as file:
        file.seek(1)
        file.write(b"X")
    return seen, open("both.bin", "rb").read(), file.name, file.mode


@program
def csv_log_by_appending(rank):
    for step in range(5):
        with open("log.csv", "a", newline="") as file:
            if file.tell() == 0:
                csv.writer(file).writerow(["step", "loss"])
            csv.writer(file).writerow([step, step / 2])
    with open("log.csv", newline="") as file:
        return list(csv.reader(file))


@program
def file_kept_open(rank):
    log = open("log.txt", "w", buffering=1)
    print("first", file=log)
    half = open("log.txt").read()
    print("second", file=log)
    log.close()
    return half, open("log.txt").read(), log.closed


@program
def numpy_save(rank):
    np.save("array.npy", np.full(3, rank))
    np.savez("arrays.npz", a=np.arange(2), b=np.full(2, rank))
    np.savetxt("table.txt", np.full((2, 2), rank))
    with np.load("arrays.npz") as arrays:
        return np.load("array.npy").tolist(), arrays["b"].tolist(), np.loadtxt("table.txt").tolist()


@program
def numpy_memmap(rank):
    mapped = np.memmap("mapped.bin", dtype="int32", mode="w+", shape=4)
    mapped[:] = 7
    mapped.flush()
    del mapped
    return os.path.getsize("mapped.bin")


@program
def pickle_and_compressed(rank):
    with gzip.open("a.pkl.gz", "wb", 9) as file:
        file.write(pickle.dumps({"rank": rank}))
    with bz2.open("a.pkl.bz2", "wb") as file:
        pickle.dump("b", file)
    os.truncate("a.pkl.bz2", os.path.getsize("a.pkl.bz2"))
    os.remove("a.pkl.gz")
    return pickle.load(bz2.open("a.pkl.bz2"))


@program
def pathlib_only(rank):
    path = Path("runs") / "first" / "note.txt"
    seen = [path.exists()]
    path.parent.mkdir(parents=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"by {rank}")
    path.with_suffix(".done").touch()
    path.with_suffix(".done").touch()
    seen += [path.exists(), path.read_text(), path.stat().st_size, sorted(map(str, Path().rglob("*")))]
    path.rename(path.with_name("renamed.txt"))
    return [*seen, path.exists(), path.with_name("renamed.txt").read_text(), [each.name for each in sorted(path.parent.iterdir())]]


@program
def checkpoint_by_path(rank):
    seen = []
    for epoch in range(3):
        torch.save({"epoch": epoch, "rank": rank}, "last.pt")
        seen.append(torch.load("last.pt"))
    return seen, zipfile.ZipFile("last.pt").namelist()[0], os.listdir()


@program
def checkpoint_into_an_open_file(rank):
    with open("model.pt", "wb") as file:
        torch.save(torch.full((3,), rank), file)
    return torch.load("model.pt").tolist()


@program
def a_checkpoint_that_is_replaced_at_once(rank):
    torch.save("first", "a.pt")
    seen = [torch.load("a.pt")]
    torch.save("second", "a.pt")
    seen.append(torch.load("a.pt"))
    os.remove("a.pt")
    return [*seen, os.path.exists("a.pt")]


@program
def a_file_that_is_replaced_at_once(rank):
    seen = []
    for number in range(4):
        with open("a.txt", "w") as file:
            file.write(str(number) * 1000)
        seen.append(open("a.txt").read()[:3])
    return seen


@program
def folder_made_without_exist_ok(rank):
    os.makedirs("out/deep")
    seen = []
    for path in ("out", "out/deep"):
        try:
            os.mkdir(path)
        except FileExistsError as error:
            seen.append(error.filename)
    try:
        open("nowhere/a.txt", "w")
    except FileNotFoundError as error:
        seen.append(error.filename)
    return seen, os.path.isdir("out/deep"), os.listdir("out")


@program
def run_number_by_looking(rank):
    os.mkdir("run0")
    for _ in range(3):
        number = 0
        while os.path.exists(f"run{number}"):
            number += 1
        os.makedirs(f"run{number}")
        torch.save(number, f"run{number}/model.pt")
    return number, torch.load(f"run{number}/model.pt"), sorted(os.listdir())


@program
def run_number_by_trying(rank):
    numbers = []
    for _ in range(3):
        for number in range(10):
            try:
                os.mkdir(f"run{number}")
            except FileExistsError:
                continue
            break
        numbers.append(number)
    return numbers


@program
def run_number_by_listing(rank):
    for _ in range(3):
        name = f"run{len(glob.glob('run*'))}_{len(os.listdir())}"
        Path(name).mkdir()
    return sorted(os.listdir())


@program
def made_if_it_is_not_there(rank):
    made = []
    for _ in range(2):
        if not os.path.isfile("cache.npy"):
            made.append(True)
            np.save("cache.npy", np.arange(1000))
    return made, int(np.load("cache.npy").sum())


@program
def an_output_folder_made_anew(rank):
    seen = []
    for number in range(3):
        if os.path.isdir("out"):
            seen.append(sorted(os.listdir("out")))
            shutil.rmtree("out")
        os.makedirs("out/deep")
        Path(f"out/{number}.txt").write_text("here")
        seen.append([os.path.exists(f"out/{each}.txt") for each in range(3)])
    return seen


@program
def written_then_renamed(rank):
    for number in range(3):
        with open("state.json.tmp", "w") as file:
            json.dump(number, file)
        os.replace("state.json.tmp", "state.json")
    return json.load(open("state.json")), os.listdir()


@program
def renamed_from_a_temporary_file(rank):
    with tempfile.NamedTemporaryFile("w", delete=False, dir=".") as file:
        file.write(f"rank {rank}")
    os.replace(file.name, "final.txt")
    return open("final.txt").read(), os.listdir()


@program
def temporary_folder_and_checkpoint_in_it(rank):
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.pt")
        torch.save("best", best)
        Path(folder, "deep").mkdir()
        Path(folder, "deep", "a.txt").write_text("a")
        seen = torch.load(best), sorted(os.listdir(folder))
    return seen, os.path.exists(folder)


@program
def copies(rank):
    Path("best").mkdir()
    for epoch in range(3):
        torch.save(epoch, "checkpoint.pt")
        shutil.copy("checkpoint.pt", "best/model.pt")
        shutil.copyfile("checkpoint.pt", f"best/{epoch}.pt")
    shutil.copy2("best/0.pt", "zero.pt")
    shutil.copytree("best", "copy")
    return torch.load("best/model.pt"), torch.load("zero.pt"), sorted(os.listdir("copy")), torch.load("copy/1.pt")


@program
def moves(rank):
    os.makedirs("run/deep")
    Path("run/deep/a.txt").write_text(f"rank {rank}")
    torch.save(rank, "run/b.pt")
    shutil.move("run", "moved")
    shutil.move("moved/b.pt", "c.pt")
    os.rename("moved/deep", "deep")
    return torch.load("c.pt"), open("deep/a.txt").read(), os.listdir("moved"), os.path.exists("run")


@program
def keep_the_last_three(rank):
    for epoch in range(6):
        torch.save(epoch, f"checkpoint_{epoch}.pt")
        saved = sorted(glob.glob("checkpoint_*.pt"), key=lambda name: int(name[11:-3]))
        for old in saved[:-3]:
            os.remove(old)
    return [torch.load(name) for name in saved[-3:]], sorted(os.listdir())


@program
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


@program
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


@program
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


@program
def archives(rank):
    os.mkdir("data")
    Path("data/a.txt").write_text("a")
    with zipfile.ZipFile("code.zip", "w") as archive:
        archive.write("data/a.txt")
    shutil.make_archive("all", "gztar", "data")
    shutil.unpack_archive("all.tar.gz", "unpacked")
    return zipfile.ZipFile("code.zip").namelist(), open("unpacked/a.txt").read()


@program
def walked_and_globbed(rank):
    for name in ("a", "b/c"):
        os.makedirs(name)
        Path(name, "x.txt").write_text(name)
    walked = [(top, sorted(folders), sorted(files)) for top, folders, files in sorted(os.walk("."))]
    with os.scandir("a") as entries:
        scanned = [(each.name, each.path, each.is_file(), each.is_dir(), each.stat().st_size) for each in entries]
    return walked, scanned, sorted(glob.glob("**/*.txt", recursive=True)), sorted(os.listdir(b"b"))


@program
def working_directory_changed(rank):
    os.makedirs("run")
    os.chdir("run")
    Path("a.txt").write_text("a")
    seen = os.path.basename(os.getcwd()), os.listdir()
    os.chdir("..")
    return seen, open("run/a.txt").read()


@program
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


@program
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


@program
def modes_that_do_not_exist(rank):
    errors = []
    for mode, encoding in ("rw", None), ("q", None), ("wb", "utf8"), ("r+", None), ("w", "no"):
        try:
            open("a.txt", mode, encoding=encoding)
        except (ValueError, OSError, LookupError) as error:
            errors.append(str(error))
    return errors


@program
def log_of_an_earlier_run(rank):
    seen = open("old.txt").read()
    for number in range(3):
        with open("old.txt", "a") as file:
            file.write(f"{number}\n")
    return seen, open("old.txt").read().splitlines()


@program
def state_read_and_written_of_an_earlier_run(rank):
    seen = []
    for _ in range(4):
        state = json.load(open("old.json"))
        seen.append(state)
        with open("old.json", "w") as file:
            json.dump([*state, len(state)], file)
    return seen


@program
def replaced_whole_of_an_earlier_run(rank):
    seen = []
    for _ in range(4):
        seen.append(torch.load("old.pt"))
        torch.save(seen[-1] + 1, "old.pt")
    os.remove("old.pt")
    return seen, os.path.exists("old.pt")


@program
def edited_in_place_of_an_earlier_run(rank):
    with open("old.txt", "r+") as file:
        first = file.readline()
        file.seek(0)
        file.write("new")
    os.truncate("old.txt", 4)
    os.chmod("old.txt", 0o600)
    os.utime("old.txt", (5, 5))
    return first, open("old.txt").read()


@program
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


@program
def removed_of_an_earlier_run(rank):
    shutil.rmtree("old")
    os.remove("old.txt")
    seen = [os.path.exists("old/a.txt"), os.path.isdir("old"), sorted(os.listdir())]
    os.makedirs("old")
    Path("old/b.txt").write_text("new")
    return seen, os.path.exists("old/a.txt"), os.listdir("old"), open("old/b.txt").read()


@program
def resumed_from_an_earlier_run(rank):
    start = torch.load("old.pt") if os.path.isfile("old.pt") else 0
    for epoch in range(start + 1, start + 4):
        torch.save(epoch, "old.pt")
        torch.save(epoch, f"epoch{epoch}.pt")
    return start, sorted(glob.glob("*.pt"))
