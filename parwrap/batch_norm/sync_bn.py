"""The interceptor of batch normalization: which calls are shared, and by which ranks.

It shares calls that use the statistics of their batch: in training, and in layers without running statistics. ``statistics_exchange.py``
sends the ranks' numbers, ``forward_backward.py`` computes with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parwrap.batch_norm.compiled_norm import scopes, traced
from parwrap.batch_norm.forward_backward import BatchNorm, Exchange
from parwrap.batch_norm.kernels import Running
from parwrap.batch_norm.statistics_exchange import StatisticsExchange, own_group, shared_among
from parwrap.coordination.call_site import location, warn, worth_a_look
from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.norm import Norm
from parwrap.loop.autograd_graph import normalizes_by_torch
from parwrap.strategies.data_parallel.replica_norm import shared_over_replicas
from parwrap.strategies.data_parallel.replica_threads import Replica, current_replica
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id
from parwrap.torch_private.modes import current_transform, tracing_state

__all__ = ["SyncBN"]


class SyncBN(Interceptor):
    """Shares the statistics of batch normalizations that use those of their batch.

    Args:
        process_group: the group whose ranks share a batch; by default all.
        group_size: the number of consecutive ranks that share a batch instead.
        reads_whole: whether every rank now has the whole batch, rather than a part.
    """

    def __init__(self, process_group: Any, group_size: int | None, reads_whole: Callable[[], bool]) -> None:
        self._reads_whole = reads_whole
        self._process_group, self._group_size = process_group, group_size
        self._opened_for: Any = None
        self._sharing: StatisticsExchange | None = None
        self._process = os.getpid()
        self._warned = self._said = self._has_replicas = False
        self._backwards = 0

    traced_norm = staticmethod(traced)

    def prepare(self) -> None:
        """Prepare everything if the ranks have already synchronized."""
        if group := groups.current():
            self._open(group)

    @intercepts
    def norm(self, call: Norm) -> torch.Tensor:
        """Run the normalization ``call``. If it uses batch statistics, use those of all ranks or replicas together."""
        if call.training and call.eps > 0 and (replica := current_replica()) is not None:
            return self._over_replicas(call, replica)
        if self._has_replicas and current_graph_task_id() != NO_GRAPH_TASK:
            raise UsageError(
                "a batch norm inside a checkpoint is recomputed in the backward pass, where the replicas of parwrap.data_parallel cannot "
                "synchronize: remove @parwrap.sync_bn, or do not checkpoint that part."
            )
        if not call.training or call.eps <= 0:
            return call.run()
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():  # another tracer than the one that reads traced_norm
            return traced(*call[1:])
        if self._has_whole():
            return call.run()
        self._look_for_ranks()
        if self._sharing is None:
            return call.run_by_itself()  # also inside another sync_bn
        if not self._is_plain(call):
            return call.run()
        layer = self._sharing.layer(call)
        running = Running(call.running_mean, call.running_var, call.momentum)
        return BatchNorm.apply(layer, call.input, call.weight, call.bias, running, call.eps)

    @intercepts
    def backward(self, call: Backward) -> None:
        """Warn about batch norms that patches of Python names do not reach, then run ``call``. The checks become ever rarer."""
        self._backwards += 1
        if worth_a_look(self._backwards) and self._sharing is not None and not (self._said or self._has_whole()):
            self._said = normalizes_by_torch(call.roots)
            if self._said:
                warn(
                    f"parwrap: the backward pass at {location()} goes through a batch norm that used only this rank's part of the batch. "
                    "parwrap.sync_bn works for torch.nn.functional.batch_norm and the modules that call it, but not in TorchScript "
                    "(torch.jit), in exported programs or for torch.batch_norm: train the plain module. This is shown once."
                )
        call.run()

    @intercepts
    def foreign(self, what: str, instance: Any) -> None:
        """Record that the script starts a process group: compiled layers share their statistics in it too."""
        scopes.share()

    def exchange(self, call: Norm) -> Exchange | None:
        """The exchange for the compiled layer of ``call``; ``None`` if this rank normalizes separately."""
        if self._has_whole():
            return None
        self._look_for_ranks()
        return self._sharing.layer(call) if self._sharing else None

    def _has_whole(self) -> bool:
        """Whether this rank has the whole batch."""
        return is_alone() or os.getpid() != self._process or self._reads_whole()

    def _look_for_ranks(self) -> None:
        together = groups.current() or (dist.group.WORLD if dist.is_initialized() and not groups.is_outside_loop() else None)
        if together is not self._opened_for:
            self._open(together)

    def _over_replicas(self, call: Norm, replica: Replica) -> torch.Tensor:
        if self._process_group is not None or self._group_size is not None:
            raise UsageError(
                "inside parwrap.data_parallel, parwrap.sync_bn uses the statistics of all replicas, but process_group and group_size are "
                "for ranks: remove them."
            )
        if not self._is_plain(call):
            return call.run()
        self._has_replicas = True
        return shared_over_replicas(call, replica)

    def _open(self, together: Any) -> None:
        """Find the ranks to share with in ``together``: parwrap's group, or torch's if the user's own code has started it."""
        self._opened_for, self._sharing = together, None
        if together is None:
            return
        ours = isinstance(together, Group)
        ranks = self._ranks(together.world.size if ours else dist.get_world_size())
        if ours:
            self._sharing = shared_among(together, ranks)
        elif len(ranks) > 1:
            self._sharing = StatisticsExchange(self._process_group or own_group(ranks))

    def _ranks(self, size: int) -> tuple[int, ...]:
        """The ranks that this one shares with."""
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
            type(x) in (torch.Tensor, nn.Parameter)
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
