"""The interceptor of batch normalization: which calls are shared, and by which ranks.

A call is shared if it uses the statistics of its batch: in training, and in layers without running statistics. ``exchange.py`` sends the
ranks' numbers, ``forward_backward.py`` computes with them. ``replica_norm.py`` is for the replicas of ``data_parallel``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import has_torch_function

from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Norm
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.passes import Passes
from parwrap.norm.compiled_norm import scopes, traced
from parwrap.norm.exchange import Exchange, Statistics, statistics_of
from parwrap.norm.forward_backward import BatchNorm
from parwrap.norm.kernels import Running
from parwrap.norm.replica_norm import normalized_over_replicas
from parwrap.places import warn
from parwrap.ranks import group as groups
from parwrap.ranks.group import is_alone
from parwrap.rows.tensors import whole_is_open
from parwrap.strategies.replicas import Replica, current_replica
from parwrap.torch_private.autograd import current_transform, in_backward, tracing_state

__all__ = ["SyncBN"]


class SyncBN(Interceptor):
    """Gives batch normalizations the statistics of the whole batch of several ranks, instead of this rank's part.

    Args:
        process_group: the group whose ranks share a batch; by default all ranks.
        group_size: the number of consecutive ranks that share a batch, instead of a group.
        passes: a function that returns the open passes; ``None`` outside of ``distributed``.
    """

    def __init__(self, process_group: Any, group_size: int | None, passes: Callable[[], Passes | None]) -> None:
        self._process_group, self._group_size, self._passes = process_group, group_size, passes
        self._opened_for: Any = None
        self._statistics: Statistics | None = None
        self._process = os.getpid()
        self._warned = self._has_replicas = False
        self._look_for_ranks()

    traced_norm = staticmethod(traced)

    def norm(self, call: Norm) -> torch.Tensor:
        """Run ``call``. Batch statistics are those of all ranks or replicas that share the batch, unless its tensors cannot be shared."""
        if not call.training or call.eps <= 0:
            return call.run()
        if (shows := whole_is_open()) is not None and shows.counting is not None:
            return call.run()  # a module is tried on a few rows
        if (replica := current_replica()) is not None:
            return self._over_replicas(call, replica)
        if self._has_replicas and in_backward():
            raise UsageError(
                "a batch norm inside a checkpoint is recomputed in the backward, where the replicas of parwrap.data_parallel cannot wait "
                "for each other. Remove parwrap.sync_bn, or do not checkpoint that part."
            )
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():  # a tracer that does not use traced_norm
            return traced(*call[1:])
        if self._has_whole():
            return call.run()
        self._look_for_ranks()
        if self._statistics is None:
            return call.run_by_itself()  # also inside another sync_bn
        if has_torch_function((call.input,)) or not self._is_plain(call):
            return call.run()  # for a subclass of tensors, torch calls the function again, with plain operations
        running = Running(call.running_mean, call.running_var, call.momentum)
        return BatchNorm.apply(self._layer(self._statistics, call), call.input, call.weight, call.bias, running, call.eps)

    def distributes_itself(self, what: str) -> None:
        """Make compiled layers share their statistics, because the script starts a process group or builds its own DDP."""
        scopes.share()

    def exchange(self, call: Norm) -> Exchange | None:
        """The exchange for the compiled layer of ``call``; ``None`` if this rank normalizes by itself."""
        if self._has_whole():
            return None
        self._look_for_ranks()
        return None if self._statistics is None else self._layer(self._statistics, call)

    def _over_replicas(self, call: Norm, replica: Replica) -> torch.Tensor:
        if self._process_group is not None or self._group_size is not None:
            raise UsageError(
                "inside parwrap.data_parallel, parwrap.sync_bn uses the statistics of all replicas, but process_group and group_size say "
                "which ranks share: remove them."
            )
        self._has_replicas = True
        return normalized_over_replicas(call, replica)

    def _has_whole(self) -> bool:
        """Whether this rank has the whole batch."""
        if is_alone() or os.getpid() != self._process:
            return True
        if (shows := whole_is_open()) is not None:
            return not (shows.inside or in_backward())
        passes = self._passes()
        innermost = None if passes is None else passes.innermost
        return innermost is not None and not (innermost.trains and innermost.shared)

    def _layer(self, statistics: Statistics, call: Norm) -> Exchange:
        """The exchange of the layer of ``call``; the silent one if this rank has no part of the batch."""
        passes, layer = self._passes(), statistics.layer(call)
        return layer.silent if passes is not None and passes.is_stand_in(len(call.input)) else layer

    def _look_for_ranks(self) -> None:
        """Find the ranks to share with, in the process group that parwrap or the script has started."""
        together = dist.group.WORLD if dist.is_initialized() and not groups.is_outside() else None
        if together is self._opened_for:
            return
        self._opened_for, self._statistics = together, None
        if together is not None:
            ranks = self._ranks(dist.get_world_size())
            if len(ranks) > 1:
                self._statistics = statistics_of(ranks, self._process_group)

    def _ranks(self, size: int) -> tuple[int, ...]:
        """The ranks that share a batch with this rank, which is among them."""
        if self._process_group is not None:
            if self._process_group is dist.GroupMember.NON_GROUP_MEMBER:
                raise UsageError(
                    f"rank {groups.rank()} is not in the process_group of parwrap.sync_bn. Pass a group that contains the rank, or use "
                    "group_size."
                )
            return tuple(dist.get_process_group_ranks(self._process_group))
        each = self._group_size or size
        if size % each:
            fitting = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
            raise UsageError(f"group_size={each} does not divide the {size} ranks into groups of the same size: choose one of {fitting}.")
        first = groups.rank() // each * each
        return tuple(range(first, first + each))

    def _is_plain(self, call: Norm) -> bool:
        """Whether ``call`` can be shared: torch does not trace or transform it, and collectives support its tensors."""
        x = call.input
        plain = (
            type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            and x.device.type in ("cpu", "cuda")
            and x.is_floating_point()
            and x.dim() > 1
            and (call.running_mean is None) == (call.running_var is None)
            and current_transform() is None
            and tracing_state() is None
        )
        if not plain and not self._warned:
            self._warned = True
            warn(
                f"parwrap: a batch norm of {type(x).__name__} {[int(size) for size in x.shape]} on {x.device} uses only this rank's part "
                "of the batch: parwrap.sync_bn supports only plain floating point tensors outside of torch.func and torch.jit. This is "
                "shown once."
            )
        return plain
