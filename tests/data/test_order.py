"""The order of samples on each rank, however the script iterates: that of one process, dealt out (contract, rule 2)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice, zip_longest

import pytest
import torch
from torch.utils.data import DataLoader

import parwrap
from training import Training, samples


def break_and_again(loader, step):
    for most in (1, 4, 3, 4):
        for batch in islice(loader, most):
            step()
            yield batch


def twice_in_turn(loader, step):
    for _ in range(2):
        for pair in zip_longest(iter(loader), iter(loader)):
            step()
            yield from pair


def begun_in_the_other_order(loader, step):
    one, other = iter(loader), iter(loader)
    for each in (other, one, one, other, one, other, other, one):
        step()
        yield next(each)


def left_and_read_on(loader, step):
    kept = iter(loader)
    yield next(kept)
    step()
    for batch in loader:
        step()
        yield batch
    yield from kept


def next_of_a_new_iterator(loader, step):
    for _ in range(3):
        yield next(iter(loader))
        step()


def one_iterator_in_two_threads(loader, step):
    batches = iter(loader)
    with ThreadPoolExecutor(1) as thread:
        for read in (lambda: next(batches), lambda: thread.submit(next, batches).result()) * 2:
            yield read()
            step()


def an_iterator_for_each_of_two_threads(loader, step):
    here, there = iter(loader), iter(loader)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(4):
            yield next(here)
            yield thread.submit(next, there).result()
            step()


def read_in_a_thread(loader, step):
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            yield from thread.submit(list, loader).result()
            step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "program",
    [
        break_and_again,
        twice_in_turn,
        begun_in_the_other_order,
        left_and_read_on,
        next_of_a_new_iterator,
        one_iterator_in_two_threads,
        an_iterator_for_each_of_two_threads,
        read_in_a_thread,
    ],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_each_rank_reads_its_part_of_the_batches_of_one_process(program, workers):
    if workers and program is begun_in_the_other_order:
        pytest.skip("with workers, torch draws the order where an iterator is made")

    def loader(batch_size):
        return parwrap.shard(DataLoader(range(16), batch_size, shuffle=True, num_workers=workers))

    torch.manual_seed(3)
    of_one_process = [samples(batch) for batch in program(loader(4), lambda: None)]
    with parwrap.distributed():
        training = Training()
        torch.manual_seed(3)
        seen = [samples(batch) for batch in program(loader(2), training.step)]

    assert [batch[parwrap.rank() :: 2] for batch in of_one_process] == seen
