"""A rank that fails while its collectives are under way, as on GPUs: a mock carries them out late, and shuts down as NCCL does."""

import contextlib
import io
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import parwrap
from lagging_backend import as_on_gpus
from parwrap.coordination.status_board import SyncPoint
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


@pytest.mark.ranks(2, timeout=60)
def test_a_host_that_waits_for_its_gpu_is_reported_as_a_hang(tmp_path):
    said = io.StringIO()
    with as_on_gpus(tmp_path), contextlib.redirect_stderr(said), parwrap.distributed(hang_after=0.3):
        if parwrap.rank() == 1:
            time.sleep(1.5)  # busy with something else
        coordinator = current().coordinator
        coordinator.go_ahead(SyncPoint("backward", "train.py:7"))
        coordinator.through()
        if parwrap.rank() == 0:
            time.sleep(1.5)  # stands for loss.item(): the GPU waits for rank 1's gradients
        parwrap.barrier()

    if parwrap.rank() == 0:
        assert 1 == said.getvalue().count("has waited for more than 0.3 s")
        assert f"Rank 0 has left backward (train.py:7) and is in the script at {__file__}:" in said.getvalue()
        assert "Rank 1 has left random state" in said.getvalue()
