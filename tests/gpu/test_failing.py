"""A rank that fails while its collectives are under way, as on GPUs: a mock carries them out late, and shuts down as NCCL does."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import parwrap
from lagging_backend import as_on_gpus
from parwrap.group.group import current


@pytest.mark.ranks(2, timeout=30)
def test_a_rank_that_fails_does_not_wait_for_what_the_others_never_take_part_in(tmp_path):
    store = current().store
    began = time.monotonic()

    def fail():
        if parwrap.rank() == 0:
            store.wait(["rank 1 has left"], timedelta(seconds=20))
        else:
            dist.all_reduce(torch.ones(1), async_op=True)  # rank 0 never does
        raise ZeroDivisionError("by hand")

    with pytest.raises(ZeroDivisionError, match="by hand"), as_on_gpus(tmp_path):
        fail()

    assert time.monotonic() - began < 15
    assert not dist.is_initialized()
    store.set("rank 1 has left", b"")


@pytest.mark.ranks(2, timeout=30)
def test_a_script_that_ends_by_itself_waits_for_what_is_under_way(tmp_path):
    sent = torch.ones(1)

    def end():
        dist.all_reduce(sent, async_op=True)
        raise SystemExit(0)

    with pytest.raises(SystemExit), as_on_gpus(tmp_path):
        end()

    assert 2.0 == sent
