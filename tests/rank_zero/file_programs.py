"""Pieces of plain scripts that write and read files, in a directory of their own; each function returns what it has seen there."""

# scripts open files in every way

import bz2
import csv
import glob
import gzip
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch


def json_by_open(rank):
    with open("metrics.json", "w") as file:
        json.dump({"rank": rank}, file)
    with open("metrics.json") as file:
        return json.load(file)


def written_without_being_closed(rank):
    json.dump([rank], open("a.json", "w"))
    return json.load(open("a.json"))


def binary_written_and_read_through_one_handle(rank):
    with open("both.bin", "w+b") as file:
        file.write(b"abc")
        file.seek(1)
        seen = file.read()
    with open("both.bin", "r+b") as file:
        file.seek(1)
        file.write(b"X")
    return seen, open("both.bin", "rb").read(), file.name, file.mode


def csv_log_by_appending(rank):
    for step in range(5):
        with open("log.csv", "a", newline="") as file:
            if file.tell() == 0:
                csv.writer(file).writerow(["step", "loss"])
            csv.writer(file).writerow([step, step / 2])
    with open("log.csv", newline="") as file:
        return list(csv.reader(file))


def file_kept_open(rank):
    log = open("log.txt", "w", buffering=1)
    print("first", file=log)
    half = open("log.txt").read()
    print("second", file=log)
    log.close()
    return half, open("log.txt").read(), log.closed


def numpy_save(rank):
    np.save("array.npy", np.full(3, rank))
    np.savez("arrays.npz", a=np.arange(2), b=np.full(2, rank))
    np.savetxt("table.txt", np.full((2, 2), rank))
    with np.load("arrays.npz") as arrays:
        return np.load("array.npy").tolist(), arrays["b"].tolist(), np.loadtxt("table.txt").tolist()


def numpy_memmap(rank):
    mapped = np.memmap("mapped.bin", dtype="int32", mode="w+", shape=4)
    mapped[:] = 7
    mapped.flush()
    del mapped
    return os.path.getsize("mapped.bin")


def pickle_and_compressed(rank):
    with gzip.open("a.pkl.gz", "wb", 9) as file:
        file.write(pickle.dumps({"rank": rank}))
    with bz2.open("a.pkl.bz2", "wb") as file:
        pickle.dump("b", file)
    os.truncate("a.pkl.bz2", os.path.getsize("a.pkl.bz2"))
    os.remove("a.pkl.gz")
    return pickle.load(bz2.open("a.pkl.bz2"))


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


def checkpoint_by_path(rank):
    seen = []
    for epoch in range(3):
        torch.save({"epoch": epoch, "rank": rank}, "last.pt")
        seen.append(torch.load("last.pt"))
    return seen, zipfile.ZipFile("last.pt").namelist()[0], os.listdir()


def checkpoint_into_an_open_file(rank):
    with open("model.pt", "wb") as file:
        torch.save(torch.full((3,), rank), file)
    return torch.load("model.pt").tolist()


def a_checkpoint_that_is_replaced_at_once(rank):
    torch.save("first", "a.pt")
    seen = [torch.load("a.pt")]
    torch.save("second", "a.pt")
    seen.append(torch.load("a.pt"))
    os.remove("a.pt")
    return [*seen, os.path.exists("a.pt")]


def a_file_that_is_replaced_at_once(rank):
    seen = []
    for number in range(4):
        with open("a.txt", "w") as file:
            file.write(str(number) * 1000)
        seen.append(open("a.txt").read()[:3])
    return seen


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


def run_number_by_looking(rank):
    os.mkdir("run0")
    for _ in range(3):
        number = 0
        while os.path.exists(f"run{number}"):
            number += 1
        os.makedirs(f"run{number}")
        torch.save(number, f"run{number}/model.pt")
    return number, torch.load(f"run{number}/model.pt"), sorted(os.listdir())


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


def run_number_by_listing(rank):
    for _ in range(3):
        name = f"run{len(glob.glob('run*'))}_{len(os.listdir())}"
        Path(name).mkdir()
    return sorted(os.listdir())


def made_if_it_is_not_there(rank):
    made = []
    for _ in range(2):
        if not os.path.isfile("cache.npy"):
            made.append(True)
            np.save("cache.npy", np.arange(1000))
    return made, int(np.load("cache.npy").sum())


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


def written_then_renamed(rank):
    for number in range(3):
        with open("state.json.tmp", "w") as file:
            json.dump(number, file)
        os.replace("state.json.tmp", "state.json")
    return json.load(open("state.json")), os.listdir()


def renamed_from_a_temporary_file(rank):
    with tempfile.NamedTemporaryFile("w", delete=False, dir=".") as file:
        file.write(f"rank {rank}")
    os.replace(file.name, "final.txt")
    return open("final.txt").read(), os.listdir()


def temporary_folder_and_checkpoint_in_it(rank):
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.pt")
        torch.save("best", best)
        Path(folder, "deep").mkdir()
        Path(folder, "deep", "a.txt").write_text("a")
        seen = torch.load(best), sorted(os.listdir(folder))
    return seen, os.path.exists(folder)


def sizes_of_checkpoints(rank):
    torch.save(torch.ones(1000), "large.pt")
    torch.save(torch.ones(10), "small.pt")
    large, small = os.path.getsize("large.pt"), os.stat("small.pt").st_size
    os.remove("small.pt")
    return 4000 < large < 8000, small < large, os.path.exists("large.pt"), os.path.exists("small.pt")
