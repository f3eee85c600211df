"""The ranks of a launch as workers and parameter servers: the workers' own group, and the connections between both."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from parwrap.coordination import status_board
from parwrap.coordination.sync_points import Coordinator
from parwrap.errors import UsageError
from parwrap.group.device import torch_backend
from parwrap.group.group import Group, within
from parwrap.loop.random_streams import get_state, set_state
from parwrap.options import Options
from parwrap.strategies.parameter_server.transport import Transport

__all__ = ["Roles", "joined", "the_split"]

LOOKING = 0.1
"""Seconds between two checks for dead workers."""


@dataclass
class Roles:
    """The ranks of a process group, divided by role.

    Attributes:
        group: of all ranks.
        workers: the number of workers; they have the first ranks.
        among_workers: their group; ``None`` on a server.
        process_group: torch's, of the workers.
        connections: torch's group of all ranks, for point-to-point calls only.
        runs: the number of runs so far.
        survives: whether workers continue without those that die.
        wires: one for each run, the last for the present one.
    """

    group: Group
    workers: int
    among_workers: Group | None
    process_group: Any
    connections: Any
    runs: int = 0
    survives: bool = False
    wires: list[Transport] = field(default_factory=list)
    _looked: float = 0.0
    _lost: frozenset[int] = frozenset()

    @property
    def wire(self) -> Transport:
        return self.wires[-1]

    @property
    def servers(self) -> range:
        return range(self.workers, self.group.world.size)

    def tell(self, lost: set[int]) -> None:
        """Record dead workers."""
        self.group.store.set(self._key, json.dumps(sorted(lost)))

    def lost(self) -> frozenset[int]:
        """The workers that servers have reported dead; without ``survives`` they raise an error instead."""
        if self.survives and time.monotonic() > self._looked + LOOKING:
            self._looked = time.monotonic()
            if self.group.store.check([self._key]):
                self._lost = frozenset(json.loads(self.group.store.get(self._key)))
        return self._lost

    @property
    def _key(self) -> str:
        return f"lost/{self.workers}/{self.runs}"


_current: Roles | None = None


def the_split() -> Roles:
    """The wire of the open run."""
    assert _current is not None
    return _current


@contextmanager
def joined(group: Group | None, options: Options) -> Iterator[Group | None]:
    """The group of the workers for the length of the block; ``None`` on a server, and on a single rank.

    Raises:
        UsageError: there are too few ranks.
    """
    global _current
    if group is None:
        yield None
        return
    if group.world.size <= options.servers:
        raise UsageError(
            f"servers={options.servers} leaves no worker among {group.world.size} ranks: the last ranks are the servers. Start more "
            "ranks, or use fewer servers."
        )
    split = group.once(("parameter server", options.servers), lambda: _split(group, group.world.size - options.servers))
    group.coordinator.begin()
    state = group.exchange("random state", get_state() if group.world.rank == 0 else None)[0]
    split.runs += 1
    split.survives, split._lost = options.survive, frozenset()
    split.wires.append(Transport(split.connections, split.runs))
    _current = split
    set_state(state)
    try:
        with within(split.among_workers, split.process_group, replace(group.world, size=split.workers)):
            yield split.among_workers
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            group.coordinator.fail(error)  # the first rank in the next run waits for this one
        raise
    finally:
        _current = None


@contextmanager
def _split(group: Group, workers: int) -> Iterator[Roles]:
    group.synchronize("parameter servers")
    world, ranks = group.world, list(range(workers))
    connections = dist.new_group(backend="gloo", timeout=group.timeout)
    process_group = dist.new_group(ranks, backend=torch_backend(group.backend), timeout=group.timeout)
    if world.rank >= workers:
        yield Roles(group, workers, None, process_group, connections)
        return
    # launchers may assign ranks to the nodes in any order
    mine = replace(world, size=workers, local_size=workers if world.on_one_node else 0)
    store = dist.PrefixStore(f"workers/{workers}", group.store)
    with status_board.opened(mine, store) as entries:
        among = Group(mine, group.backend, group.device, store, group.timeout, Coordinator(entries, group.timeout))
        with among._ends:
            yield Roles(group, workers, among, process_group, connections)
