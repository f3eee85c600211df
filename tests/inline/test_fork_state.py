"""In ranks that are forked, files that the caller is writing are rank 0's, and its threads and the workers of its loaders are not there."""

import csv
import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

import parwrap
from parwrap.inline.forking import ForkState

SEEN = {}


@pytest.fixture(autouse=True)
def _no_workers_are_left():
    yield
    gc.collect()


def test_what_is_open_for_writing_is_written_once_and_in_order(tmp_path):
    with (
        open(tmp_path / "rows.csv", "w", newline="") as rows,
        open(tmp_path / "appended", "ab+") as appended,
        open(tmp_path / "raw", "wb", buffering=0) as raw,
    ):
        writer = csv.writer(rows)
        writer.writerow(["step", "rank"])
        appended.write(b"begun;")
        raw.write(b"begun;")

        def train():
            for step in range(2):
                writer.writerow([step, parwrap.rank()])
            appended.write(b"rank %d;" % parwrap.rank())
            raw.write(b"rank %d;" % parwrap.rank())
            appended.seek(0)
            return appended.read()

        assert [b"begun;rank 0;", b"begun;rank 1;"] == parwrap.launch(train, nprocs=2, returns="all")
        writer.writerow(["end", "-"])
        appended.write(b"end")
        raw.write(b"end")

    assert "step,rank\r\n0,0\r\n1,0\r\nend,-\r\n" == (tmp_path / "rows.csv").read_bytes().decode()
    assert b"begun;rank 0;end" == (tmp_path / "appended").read_bytes() == (tmp_path / "raw").read_bytes()


def test_loaders_with_workers_of_the_caller_have_others_in_the_ranks_and_theirs_here(capfd):
    loader = DataLoader(torch.arange(4), batch_size=2, num_workers=1, persistent_workers=True)
    begun = [iter(DataLoader(range(4), num_workers=1)), iter(loader)]
    first, here = next(begun[0]), list(begun)

    def evaluate():
        begun.clear()
        gc.collect()
        with torch.no_grad():
            return [batch.tolist() for batch in loader]

    with pytest.warns(UserWarning, match=r"reaches begun\[0\], begun\[1\], which need workers of this process"):
        assert [[[0, 1], [2, 3]]] * 2 == parwrap.launch(evaluate, nprocs=2, returns="all")
    assert [0, 1, 2, 3] == [first.item(), *(each.item() for each in here[0])]
    assert [[0, 1], [2, 3]] == [batch.tolist() for batch in here[1]]
    assert "" == capfd.readouterr().err
    begun.clear()
    loader._iterator = None


class Trainer:
    def __init__(self, **attributes):
        self.parts = attributes

    def fit(self):
        return self.parts or self.look()

    def look(self):
        return SEEN["log"]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


@pytest.fixture
def fed():
    """A queue that a thread reads; the thread itself nobody holds."""
    fed = queue.Queue()
    thread = threading.Thread(target=lambda: list(iter(fed.get, None)))
    thread.start()
    yield fed
    fed.put(None)
    thread.join()


def test_what_needs_threads_or_workers_of_the_caller_is_named(pool, fed, monkeypatch):
    monkeypatch.setitem(SEEN, "log", fed)
    begun = iter(DataLoader(range(2), num_workers=1))
    text = (
        r"^parwrap: the function reaches {}, which need {} of this process\. Forked ranks do not have these {}, and would wait for them "
        r"forever\. Create such objects inside the function\.$"
    )

    for function, name in [
        (lambda: pool.submit(int), r"pool\._threads, pool\._work_queue"),
        (Trainer(log=fed).fit, r"self\.parts\['log'\]"),
        (partial(Trainer.fit, Trainer(logs=[fed])), r"self\.parts\['logs'\]\[0\]"),
        (parwrap.amp(lambda by=fed: by), "by"),
        (Trainer().fit, r"SEEN\['log'\]"),
    ]:
        with pytest.warns(UserWarning, match=text.format(name, "threads", "threads")):
            ForkState().warn(function)
    with pytest.warns(UserWarning, match=text.format("begun", "workers", "workers")):
        ForkState().warn(lambda: next(begun))


def test_threads_and_workers_that_the_function_does_not_reach_are_not_told_of(pool, fed, request):
    persistent = DataLoader(range(2), num_workers=1, persistent_workers=True)
    next(iter(persistent))

    ForkState().warn(lambda: (persistent, request, torch, threading, queue.Queue(), Trainer(parts=queue.Queue())))
