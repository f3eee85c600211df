"""When a pass over a DALI iterator ends. A stand-in has the names of DALI that parwrap uses, so that the package is not needed."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

import parwrap
from parwrap.errors import RankMismatchError
from training import HeldInCycle, Training


class Pipe:
    def build(self):
        pass

    def __init__(self, size=8):
        self.size = size

    def reader_meta(self):
        return {"reader": {"epoch_size": self.size, "shard_id": 0, "number_of_shards": 1}}


class Batches:
    """Stands in for DALI's base of iterators."""

    def __init__(self, pipelines, size=-1):
        self._pipes = pipelines

    def __iter__(self):
        return iter([[torch.tensor([[float(number)]])] for number in range(8)])

    def __len__(self):
        return 8


def stand_in(monkeypatch):
    module = ModuleType("nvidia.dali.plugin.base_iterator")
    module._DaliBaseIterator = Batches
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_thread", [False, True])
def test_what_ranks_read_is_compared_unless_another_thread_reads_it(monkeypatch, in_thread):
    stand_in(monkeypatch)
    with parwrap.distributed():
        training, batches = Training(), iter(Batches([Pipe(8 + parwrap.rank())]))
        if in_thread:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(next, batches).result()
        else:
            next(batches)
        with nullcontext() if in_thread else pytest.raises(RankMismatchError):
            training.step()


@pytest.mark.ranks(2)
def test_a_pass_that_the_garbage_collector_finds_ends_with_the_next_pass_over_its_iterator(monkeypatch):
    stand_in(monkeypatch)
    with parwrap.distributed():
        training, batches = Training(), Batches([Pipe()])
        trainer = HeldInCycle(batches)
        next(trainer.batches)
        del trainer
        training.step()
        if parwrap.rank() == 0:
            gc.collect()
        own = parwrap.gather(torch.rand(1).item())
        for _ in batches:
            training.step()
        gc.collect()
        shared = parwrap.gather(torch.rand(1).item())

    assert (2, 1) == (len(set(own)), len(set(shared)))
