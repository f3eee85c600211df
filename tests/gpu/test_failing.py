"""A rank that fails while its collectives are under way, as on GPUs: a mock carries them out late, and shuts down as NCCL does."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parwrap
from lagging_backend import as_on_gpus
from parwrap.ranks.group import current


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_that_fails_does_not_wait_for_collectives_that_others_never_join():
    store = current().store
    began = time.monotonic()

    def fail():
        dist.all_reduce(torch.ones(1))  # connects the ranks
        if parwrap.rank() == 0:
            store.wait(["rank 1 has left"], timedelta(seconds=20))
        else:
            dist.all_reduce(torch.ones(1), async_op=True)  # rank 0 never does
        raise ZeroDivisionError("by hand")

    with pytest.raises(ZeroDivisionError, match="by hand"), as_on_gpus():
        fail()

    assert time.monotonic() - began < 15
    assert not dist.is_initialized()
    store.set("rank 1 has left", b"")


@pytest.mark.ranks(2, fresh=True)
def test_a_script_that_ends_by_itself_waits_for_its_collectives():
    sent = torch.ones(1)

    def end():
        dist.all_reduce(sent, async_op=True)
        raise SystemExit(0)

    with pytest.raises(SystemExit), as_on_gpus():
        end()

    assert 2.0 == sent


@pytest.mark.ranks(2, fresh=True)
def test_ranks_are_connected_before_a_backward_in_which_one_may_run_out_of_memory():
    """Nothing would end the other rank, which waits in ``ncclCommInitRank``."""
    before_the_gradients = []

    def train():
        model = nn.Linear(2, 2)
        model.weight.register_hook(lambda grad: before_the_gradients.append(list(process_group.posted)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with as_on_gpus() as process_group:
        parwrap.distributed(train)()

    assert ["all-reduce of 1 torch.float32 torch.strided"] == before_the_gradients[0]
    assert 1 == process_group.posted.count(before_the_gradients[0][0])
