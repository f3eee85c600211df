"""What is said when ranks train in different steps of a pass."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.errors import LockstepError


def stops_early(rank):
    """Rank ``rank`` leaves its first pass after a batch, and trains on in its second one."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 2)), 2)
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if parwrap.rank() == rank:
                break


@pytest.mark.ranks(2, fresh=True)
def test_the_error_says_in_which_backward_of_a_pass_each_of_two_ranks_is():
    own, others = [(2, 1), (1, 2)][parwrap.rank()]
    here = rf"rank {parwrap.rank()} is in backward {own} of its pass over the loader at test_same_step\.py:\d+"
    said = rf"different steps \({here}, the other rank in backward {others}\):"
    with pytest.raises(LockstepError, match=said):
        parwrap.distributed(stops_early)(1)


@pytest.mark.ranks(3, fresh=True)
def test_of_more_ranks_it_says_the_average():
    own = [2, 2, 1][parwrap.rank()]
    said = rf"rank {parwrap.rank()} is in backward {own} of its pass .*, the ranks on average in backward 1\.667\)"
    with pytest.raises(LockstepError, match=said):
        parwrap.distributed(stops_early)(2)


def skips(skipped, ahead=False, microbatches=1):
    """Train, but on the batches in ``skipped``."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(DataLoader(TensorDataset(torch.randn(24, 2)), 2))
    if ahead:
        batches = iter([*zip(batches, [*batches][1:], strict=False)])
    for number, (x, *_) in enumerate(batches):
        if number in skipped:
            continue
        for _ in range(2):  # as a GAN does
            model(x[0] if ahead else x).square().mean().backward()
        if number % microbatches == microbatches - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_that_skips_another_batch_is_an_error_at_its_next_backward():
    skipped, own, other = [({1}, 3, 2), ({2}, 2, 3)][parwrap.rank()]
    said = rf"in backward 3 of its pass, rank {parwrap.rank()} has drawn {own} batches, the other rank {other}\..*any_rank\(bad\): continue"
    with pytest.raises(LockstepError, match=said):
        parwrap.distributed(skips)(skipped)


@pytest.mark.ranks(3, fresh=True)
def test_so_is_a_batch_that_one_rank_alone_skips():
    with pytest.raises(LockstepError, match=r"has drawn \d batches, the ranks 2\.333 on average"):
        parwrap.distributed(skips)({1} if parwrap.rank() == 2 else {2})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"uneven": "join"}, {"batch": "global"}], ids=str)
def test_batches_that_all_ranks_skip_are_none(options):
    with parwrap.distributed(**options):
        skips({0, 2, 5})
        skips({1}, microbatches=2)


def skips_first(skipped, sharded):
    """Train on passes of one batch, but not on those in ``skipped``."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 2)), 2)
    if sharded:
        parwrap.shard(loader)
    for number in range(6):
        (x,) = next(iter(loader))
        if number in skipped:
            continue
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2, fresh=True)
def test_so_is_a_first_pass_of_one_batch_that_one_rank_skips():
    skipped, own, other = [(set(), 1, 2), ({0}, 2, 1)][parwrap.rank()]
    with pytest.raises(LockstepError, match=rf"in backward 1, rank {parwrap.rank()} has drawn {own} batches, the other rank {other}\."):
        parwrap.distributed(skips_first)(skipped, sharded=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_passes_that_all_ranks_skip_are_none(sharded):
    parwrap.distributed(skips_first)({0, 1, 3}, sharded)


def reads_in_a_thread(rank):
    """The reader of rank ``rank`` is far ahead of its loop."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    read, go_on = queue.Queue(), threading.Semaphore(6 if parwrap.rank() == rank else 1)

    def reads():
        for (x,) in DataLoader(TensorDataset(torch.randn(48, 2)), 2):
            go_on.acquire()
            read.put(x)

    thread = threading.Thread(target=reads)
    thread.start()
    for _ in range(5):
        optimizer.zero_grad()
        model(read.get()).square().mean().backward()
        optimizer.step()
        go_on.release()
    go_on.release(12)
    thread.join()


@pytest.mark.ranks(2)
def test_what_another_thread_has_read_is_not_compared():
    parwrap.distributed(reads_in_a_thread)(1)
