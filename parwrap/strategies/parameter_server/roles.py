"""Divides the ranks of a launch into workers and parameter servers: opens the workers' own group, and connects workers with servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch.distributed as dist

from parwrap.coordination import status_board
from parwrap.coordination.sync_points import Coordinator
from parwrap.errors import UsageError
from parwrap.group.device import torch_backend
from parwrap.group.group import Group, within
from parwrap.loop.random_streams import get_state, set_state
from parwrap.options import Options
from parwrap.strategies.parameter_server.transport import Transport

__all__ = ["Roles", "joined", "roles_of"]

POLLING = 0.1
"""Seconds between two checks for dead workers."""


@dataclass
class Roles:
    """The ranks of a process group, divided by role.

    Attributes:
        group: the group of all ranks.
        workers: the number of workers; they have the first ranks.
        among_workers: the group of the workers; ``None`` on a server.
        process_group: torch's process group of the workers.
        connections: torch's process group of all ranks, for point-to-point calls only.
        runs: the number of runs so far.
        survives: whether workers continue without those that die.
        transports: the transport of each run, the current one last.
    """

    group: Group
    workers: int
    among_workers: Group | None
    process_group: Any
    connections: Any
    runs: int = 0
    survives: bool = False
    transports: list[Transport] = field(default_factory=list)
    _looked: float = 0.0
    _lost: frozenset[int] = frozenset()

    @property
    def transport(self) -> Transport:
        return self.transports[-1]

    @property
    def servers(self) -> range:
        return range(self.workers, self.group.world.size)

    def report_lost(self, lost: set[int]) -> None:
        """Record dead workers."""
        self.group.store.set(self._key, json.dumps(sorted(lost)))

    def lost(self) -> frozenset[int]:
        """The workers that servers have reported dead; without ``survives``, servers raise an error instead."""
        if self.survives and time.monotonic() > self._looked + POLLING:
            self._looked = time.monotonic()
            if self.group.store.check([self._key]):
                self._lost = frozenset(json.loads(self.group.store.get(self._key)))
        return self._lost

    @property
    def _key(self) -> str:
        return f"lost/{self.workers}/{self.runs}"


def roles_of(group: Group, servers: int) -> Roles:
    """The roles with that many ``servers``, created when all ranks first call this; ``group`` is that of all ranks or of the workers."""
    return cast(Roles, group.once(("parameter server", servers), lambda: _assigned(group, servers)))


@contextmanager
def joined(group: Group | None, options: Options) -> Iterator[Group | None]:
    """Yield the group of the workers, which replaces ``group`` inside the block; ``None`` on a server, and on a single rank.

    Raises:
        UsageError: there are too few ranks.
    """
    if group is None:
        yield None
        return
    if group.world.size <= options.servers:
        raise UsageError(
            f"servers={options.servers} leaves no worker among {group.world.size} ranks: the last ranks are the servers. Start more "
            "ranks, or use fewer servers."
        )
    roles = roles_of(group, options.servers)
    group.coordinator.begin()
    state = group.exchange("random state", get_state() if group.world.rank == 0 else None)[0]
    roles.runs += 1
    roles.survives, roles._lost = options.survive, frozenset()
    roles.transports.append(Transport(roles.connections, roles.runs))
    set_state(state)
    try:
        with within(roles.among_workers, roles.process_group, replace(group.world, size=roles.workers)):
            yield roles.among_workers
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            group.coordinator.fail(error)  # otherwise ranks that begin the next run would wait for this one
        raise


@contextmanager
def _assigned(group: Group, servers: int) -> Iterator[Roles]:
    group.synchronize("parameter servers")
    world, workers = group.world, group.world.size - servers
    connections = dist.new_group(backend="gloo", timeout=group.timeout)
    process_group = dist.new_group(list(range(workers)), backend=torch_backend(group.backend), timeout=group.timeout)
    if world.rank >= workers:
        yield Roles(group, workers, None, process_group, connections)
        return
    # launchers may assign ranks to the nodes in any order
    mine = replace(world, size=workers, local_size=workers if world.on_one_node else 0)
    store = dist.PrefixStore(f"workers/{workers}", group.store)
    with status_board.opened(mine, store) as entries:
        coordinator = Coordinator(entries, group.timeout, group.backend == "nccl")
        among = Group(mine, group.backend, group.device, store, group.timeout, coordinator)
        roles = Roles(group, workers, among, process_group, connections)
        with among._ends:
            among.once(("parameter server", servers), lambda: nullcontext(roles))
            yield roles
