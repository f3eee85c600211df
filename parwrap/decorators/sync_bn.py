"""``@sync_bn``: BatchNorm layers use the statistics of the whole batch, of which each rank has a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from parwrap.decorators.distributed import open_passes
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError
from parwrap.intercept.torch_calls import intercepting
from parwrap.norm.compiled_norm import scopes
from parwrap.norm.sync_bn import SyncBN
from parwrap.options import check_positive
from parwrap.ranks.group import world_size

__all__ = ["sync_bn"]


class sync_bn(ScopeDecorator):
    """Share the batch statistics of every BatchNorm layer over the ranks, on CPUs too.

    Write ``@sync_bn``, ``@sync_bn(group_size=2)`` or ``with sync_bn():``, together with ``distributed`` or in your own process group.
    Outputs, gradients and running statistics are, up to rounding, those of a single process with the batch of all ranks that share. No
    module is converted: its class and its state dict keys stay the same. Parts may differ in size, and may be empty. Batches that all ranks
    read whole count once. With one rank and without ``data_parallel`` it has no effect. A function inside may have a ``sync_bn`` with other
    options.

    The formulas are those of ``torch.nn.SyncBatchNorm``, which needs GPUs.

    Args:
        process_group: the group of the ranks that share, as ``torch.distributed.new_group`` returns it; by default all.
        group_size: instead of a group, the number of consecutive ranks that share: 2 makes pairs. It must divide the number of ranks.

    Raises:
        UsageError: an unknown option or value.

    >>> import torch
    >>> @sync_bn
    ... def normalized(x):
    ...     return torch.nn.BatchNorm1d(1)(x)
    >>> normalized(torch.tensor([[1.0], [3.0]])).detach().round().tolist()
    [[-1.0], [1.0]]
    """

    layer = 10

    def __init__(self, *, process_group: dist.ProcessGroup | None = None, group_size: int | None = None) -> None:
        self._process_group, self._group_size = process_group, group_size
        _check(process_group, group_size)

    @contextmanager
    def scope(self, call: Call) -> Iterator[None]:
        interceptor = SyncBN(self._process_group, self._group_size, open_passes)
        with (
            scopes.opened(interceptor.exchange, shared=dist.is_initialized() or world_size() > 1),
            intercepting([interceptor], module_of(call.function)),
        ):
            yield


def _check(process_group: Any, group_size: Any) -> None:
    if process_group is not None and group_size is not None:
        raise UsageError(
            "parwrap.sync_bn takes either process_group or group_size, because both say which ranks share statistics: remove one of them."
        )
    if group_size is not None:
        check_positive(group_size=group_size)
    no_member = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns on a rank outside of the group
    if process_group is not None and process_group is not no_member and not isinstance(process_group, dist.ProcessGroup):
        raise UsageError(
            f"process_group={process_group!r} is not a process group: pass the result of torch.distributed.new_group, or use group_size."
        )
