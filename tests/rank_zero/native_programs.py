"""Pieces of plain scripts that write and read files by libraries in native code; each function returns what it has seen."""

import gc
import importlib
import sqlite3

import numpy as np
import pytest
import torch

SIZE = 256


def torchscript(rank):
    seen = []
    for step in range(4):
        model = torch.jit.script(torch.nn.Linear(SIZE, SIZE))
        torch.nn.init.constant_(model.weight, step)
        torch.jit.save(model, "by_function.pt")
        model.save("by_method.pt")
        torch.jit.trace(model, torch.ones(1, SIZE)).save("traced.pt")
        seen += [torch.jit.load(f"{name}.pt").weight[0, 0].item() for name in ("by_function", "by_method", "traced")]
    return seen


def mapped(rank):
    seen = []
    for step in range(3):
        np.full(SIZE, step, np.float32).tofile("mapped.bin")
        seen.append(torch.from_file("mapped.bin", size=SIZE).sum().item())
    return seen


def mapped_for_writing(rank):
    seen = []
    for step in range(3):
        shared = torch.from_file("table.bin", True, SIZE) if step else torch.from_file("table.bin", shared=True, size=SIZE)
        shared += 1
        seen.append(torch.from_file("table.bin", size=SIZE).sum().item())
    return seen


def exported(rank):
    seen = []
    for step in range(2):
        model = torch.nn.Linear(SIZE, SIZE)
        torch.nn.init.constant_(model.weight, step)
        torch.export.save(torch.export.export(model, (torch.ones(1, SIZE),)), "model.pt2")
        seen.append(torch.export.load("model.pt2").module().weight[0, 0].item())
    return seen


def packaged(rank):
    seen = []
    for step in range(3):
        with torch.package.PackageExporter("package.pt") as exporter:
            exporter.save_pickle("numbers", "numbers.pkl", list(range(step, 100_000)))
        seen.append(torch.package.PackageImporter("package.pt").load_pickle("numbers", "numbers.pkl")[0])
    return seen


def safetensors(rank):
    pytest.importorskip("safetensors")
    from safetensors import safe_open
    from safetensors.numpy import load_file as load_arrays
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import load_file, save_file

    seen = []
    for step in range(4):
        save_file({"weight": torch.full((SIZE, SIZE), step)}, "model.safetensors", metadata={"step": str(step)})
        seen.append(load_file("model.safetensors")["weight"][0, 0].item())
        with safe_open("model.safetensors", "pt") as file:
            seen.append(file.metadata())
        save_arrays({"weight": np.full(SIZE, step)}, "arrays.safetensors")
        seen.append(load_arrays("arrays.safetensors")["weight"][0].item())
    return seen


def hdf5(rank):
    h5py = pytest.importorskip("h5py")
    with h5py.File("log.h5", "w") as file:
        file.create_dataset("loss", (4,))
    seen = []
    for step in range(4):
        with h5py.File("model.h5", "w") as file:
            file["weight"] = np.full((SIZE, SIZE), step)
        with h5py.File("model.h5") as file:
            seen.append(int(file["weight"][0, 0]))
        seen.append(h5py.is_hdf5("model.h5"))
        with h5py.File("log.h5", "a") as file:
            file["loss"][step] = step
            file.create_group(f"step{step}")
    left_open = h5py.File("left_open.h5", "w")
    left_open["a"] = 1
    del left_open
    gc.collect()
    with h5py.File("log.h5") as file:
        return seen, file["loss"][()].tolist(), sorted(file)


def database(rank):
    connection = sqlite3.connect("log.db")
    connection.execute("create table if not exists log (step int)")
    for step in range(3):
        connection.execute("insert into log values (?)", (step,))
        connection.commit()
    connection.close()
    with sqlite3.connect("log.db") as again:
        again.execute("insert into log values (3)")
    return again.execute("select step from log").fetchall()


def database_of_an_earlier_run(rank):
    with sqlite3.connect("old.db") as connection:
        connection.execute("create table if not exists log (step int)")
        before = connection.execute("select step from log").fetchall()
        connection.execute("insert into log values (7)")
    connection.close()
    return before, sqlite3.connect("file:old.db?mode=ro", uri=True).execute("select count(*) from log").fetchone() is not None


def images_and_films(rank):
    cv2 = pytest.importorskip("cv2")
    seen = []
    for step in range(4):
        seen.append(cv2.imwrite("image.png", np.full((SIZE, SIZE), 40 * step, np.uint8)))
        seen.append(int(cv2.imread("image.png", cv2.IMREAD_GRAYSCALE)[0, 0]))
    seen.append(cv2.imread("missing.png") is None)
    film = cv2.VideoWriter("film.avi", cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 64))
    for step in range(5):
        film.write(np.full((64, 64, 3), 40 * step, np.uint8))
    film.release()
    frames, film = 0, cv2.VideoCapture("film.avi")
    while film.read()[0]:
        frames += 1
    return seen, frames


def sound(rank):
    soundfile = pytest.importorskip("soundfile")
    seen = []
    for step in range(4):
        soundfile.write("sound.wav", np.full(1000, step / 8), 8000)
        seen.append(soundfile.read("sound.wav")[0][0].item())
    return seen


def tables(rank):
    pandas = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    for part in ("csv", "feather", "parquet"):
        importlib.import_module(f"pyarrow.{part}")

    seen = []
    for step in range(3):
        frame, table = pandas.DataFrame({"a": [step] * 10_000}), pa.table({"a": [step] * 10_000})
        frame.to_parquet("frame.parquet")
        frame.to_feather("frame.feather")
        pa.parquet.write_table(table, "table.parquet")
        pa.feather.write_feather(table, "table.feather")
        pa.csv.write_csv(table, "table.csv")
        with pa.parquet.ParquetWriter("parts.parquet", table.schema) as writer:
            writer.write_table(table)
            writer.write_table(table)
        seen += [int(pandas.read_parquet("frame.parquet").a[0]), int(pandas.read_feather("frame.feather").a[0])]
        seen += [read["a"][0].as_py() for read in (pa.parquet.read_table("table.parquet"), pa.feather.read_table("table.feather"))]
        seen += [pa.csv.read_csv("table.csv")["a"][0].as_py(), pa.parquet.ParquetFile("parts.parquet").metadata.num_rows]
    return seen


def to_a_folder_that_is_missing(rank):
    seen = []
    for save in (lambda: torch.jit.save(torch.jit.script(torch.nn.ReLU()), "missing/a.pt"), lambda: sqlite3.connect("missing/a.db")):
        try:
            save()
        except Exception:
            seen.append("failed")
    return seen


def tokenized(rank):
    tokenizers = pytest.importorskip("tokenizers")
    seen = []
    for step in range(3):
        for name in ("a", "b"):
            with open(f"{name}.txt", "w") as file:
                file.write(f"{name}{step} word {name * step} " * 200)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.train(["a.txt", "b.txt"], tokenizers.trainers.WordLevelTrainer(special_tokens=["?"], show_progress=False))
        tokenizer.save("tokenizer.json")
        seen.append(sorted(tokenizers.Tokenizer.from_file("tokenizer.json").get_vocab()))
        for name, text in (
            ("vocab.txt", f"a\nb\n{'ab' * (step + 1)}"),
            ("vocab.json", f'{{"a": 0, "b": {step + 1}}}'),
        ):
            with open(name, "w") as file:
                file.write(text)
        models = tokenizers.models
        seen.append(sorted(tokenizers.Tokenizer(models.WordPiece.from_file("vocab.txt", unk_token="a")).get_vocab()))
        seen.append(models.WordPiece.read_file("vocab.txt"))
        seen.append(models.WordLevel.read_file(vocab="vocab.json"))
    return seen


def polars_frames(rank):
    pl = pytest.importorskip("polars")
    seen = []
    for step in range(3):
        frame = pl.DataFrame({"a": [step] * 2000})
        frame.write_csv("frame.csv")
        frame.write_parquet("frame.parquet")
        frame.write_json("frame.json")
        seen += [int(read["a"][0]) for read in (pl.read_csv("frame.csv"), pl.read_parquet("frame.parquet"), pl.read_json("frame.json"))]
        seen.append(pl.scan_parquet("frame.parquet").collect().shape)
    return seen


def profiled(rank):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    profiler.export_chrome_trace("trace.json")
    with open("trace.json") as file:
        return "traceEvents" in file.read()
