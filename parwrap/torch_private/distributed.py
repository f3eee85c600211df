"""Private names of process groups and ``DistributedDataParallel``."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parwrap.torch_private.versions import private

__all__ = [
    "ACTIVE_DDP",
    "abort_nccl",
    "abort_process_groups",
    "all_gather_single",
    "has_rebuilt_buckets",
    "quiet_gloo",
    "set_default_group",
    "unreached",
]

ACTIVE_DDP = "_get_active_ddp_module"
"""The method that ``torch.compile`` asks for the DDP whose forward runs, to split graphs where its buckets end."""

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers equal tensors of all ranks into one. Torch 2.13 has renamed it, and warns of the older name."""

_abort_process_group: Callable[[], None] = private("torch.distributed.distributed_c10d._abort_process_group")

_aborted: list[dist.ProcessGroup] = []
"""Keeps aborted groups alive: deleting a group of NCCL waits for a thread, which sleeps for a minute if NCCL has seen the failure."""

set_default_group: Callable[[dist.ProcessGroup | None], None] = private("torch.distributed.distributed_c10d._update_default_pg")
"""Sets the process group that collectives run in by default. Publicly, that is always the group of all ranks."""

has_rebuilt_buckets: Callable[[DistributedDataParallel], bool] = attrgetter("_has_rebuilt_buckets")
"""Whether DDP has put its buckets into the order of the first backward; later forwards only prepare the reducer. It is not public."""

_check_reducer_finalized: Callable[[Any], None] = methodcaller("_check_reducer_finalized")
_UNREACHED = re.compile(r"indices which did not receive grad for rank\s+\d+:\s*([\d\s]+)")


def unreached(reducer: Any) -> list[int]:
    """The places of parameters of a DDP's ``reducer`` that took no part in the last backward: the first hundred, as its error lists them.

    DDP raises that error in the next forward. It is empty once all parameters have taken part, so that all buckets are averaged.
    """
    try:
        _check_reducer_finalized(reducer)
    except RuntimeError as error:
        if (found := _UNREACHED.search(str(error))) is None:
            raise
        return [int(place) for place in found[1].split()]
    return []


def abort_process_groups() -> None:
    """End all process groups without waiting for running collectives. Publicly, NCCL waits for ranks that may never come."""
    _aborted.extend(dist.distributed_c10d._world.pg_map)
    _abort_process_group()


def abort_nccl() -> None:
    """End all collectives of NCCL without waiting for other ranks. Later ones raise an error in this process; gloo still works.

    Publicly, there is no way to do so from a thread while another one waits for a GPU.
    """
    found = []
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_nccl_available() else ():
        with suppress(RuntimeError):  # it has no backend for GPUs
            backend = group._get_backend(torch.device("cuda"))
            backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper compares calls
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    if found:
        found[0]._group_start()  # the aborts of several communicators may wait for each other, as torch says where it aborts them
        for backend in found:
            backend.abort()
        found[0]._group_end()


GLOO_SPEAKS = torch.__version__ < (2, 11)  # type: ignore[operator]
"""Whether gloo prints a line to stdout for each new process group. Nothing turns it off."""


@contextmanager
def quiet_gloo() -> Iterator[None]:
    """Keep the lines of gloo out of stdout while the block makes process groups.

    If this torch prints such lines, other lines appear in stdout after the block.
    """
    if not GLOO_SPEAKS:
        yield
        return
    with tempfile.TemporaryFile() as written:
        stdout = os.dup(1)
        os.dup2(written.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            written.seek(0)
            for line in written:
                if not line.startswith(b"[Gloo] Rank "):
                    os.write(1, line)
