"""What the launchers of several nodes tell each other, beyond what torch's agents do: how their ranks have ended.

By torch's agents alone, a node learns of a failure elsewhere when one of its own ranks misses another, or never; one that is through
waits five minutes for the others; and ranks that start again find what the last ones have left in their store. Here every node is told,
and each start has a store of its own. Where nodes meet is ``network_route.py``'s, what a failure is ``failure_report.py``'s.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from parwrap.errors import LaunchError
from parwrap.launching.elastic.failure_report import Failure, node_name, read_failures
from parwrap.launching.elastic.network_route import towards
from parwrap.system.processes import signal_name
from parwrap.torch_private.elastic import agent_store, remaining_restarts, set_remaining_restarts

__all__ = ["Nodes"]

LINGERING = 3.0
"""Seconds that a node waits, when one has failed, for what the others have to tell about it."""

LOOKING = 0.1
"""Seconds between two looks at that."""

BEAT = 1.0
"""Seconds after which a node tells again that it is there."""

SILENCE = 60.0
"""Seconds after which one that does not is given up."""


class Nodes:
    """This node among those of its job; of a single node there is nothing to tell.

    Args:
        failures: the directory where this node's failures are written, and those of the others will be.
        variables: the environment variables for this node's ranks; the network interface is added if only the other nodes tell.
        timeout: seconds after which a node that is not heard of is given up, if that is sooner than by itself.
        waiting: a context for the time in which torch's rendezvous, which it is given, waits for other nodes.

    Attributes:
        lost: whether the ranks have failed because a node was lost, which has been told.
    """

    def __init__(
        self, failures: Path, variables: dict[str, str], timeout: float, waiting: Callable[[Any], AbstractContextManager[None]]
    ) -> None:
        self._waiting = waiting
        self._failures, self._variables, self._silence = failures, variables, max(3 * BEAT, min(SILENCE, timeout))
        self._started = 0
        self._mine, self._names = 0, [""]
        self._store: Any = None
        self._ranks_meet: TCPStore | None = None
        self._through = self._all_through = self._failed = False
        self._answered = 0.0
        self.lost = False

    def rendezvous(self, wrapped: Callable, agent: Any, args: tuple, kwargs: dict) -> None:
        """A wrapper for the rendezvous of torch's agents: the ranks get a store that no others have used, and nodes agree on restarts."""
        self._store = None
        while True:
            try:
                with _ranks_store_apart(), self._waiting(agent.get_worker_group().spec.rdzv_handler):
                    wrapped(*args, **kwargs)
                store = self._agree(agent)
                break
            except RendezvousGracefulExitError:
                raise LaunchError("the job has had as many nodes as --nnodes allows, and has ended without this one.") from None
            except DistStoreError:  # a node has left right after it came
                if not remaining_restarts(agent):
                    raise
                set_remaining_restarts(agent, remaining_restarts(agent) - 1)
        if self._started and self._mine == 0:
            print(f"parwrap: started again on {', '.join(self._names)}", file=sys.stderr)
        if not self._started:
            # nobody waits for this thread: the machine that keeps the store may be switched off
            threading.Thread(target=self._listen, name="parwrap nodes", daemon=True).start()
        self._started += 1
        self._through = self._all_through = self._failed = False
        self._answered = time.monotonic()
        self._store = store.clone()

    def _agree(self, agent: Any) -> Any:
        """Agree with the other nodes on what torch leaves open; returns a store for this start."""
        group = agent.get_worker_group()
        self._mine = group.group_rank
        static = group.spec.rdzv_handler.get_backend() == "static"  # which has one store for all starts
        store = PrefixStore(f"parwrap/{self._started if static else ''}", agent_store(agent))
        if self._mine == 0:
            if self._started or not static:
                self._ranks_meet = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False)
                group.master_port = self._ranks_meet.port
            store.set("ranks", json.dumps([group.master_addr, group.master_port]))
        store.set(f"beat/{self._mine}", "")
        store.set(f"node/{self._mine}", json.dumps([remaining_restarts(agent), socket.gethostname(), group.spec.local_addr]))
        told = [json.loads(node) for node in store.multi_get([f"node/{node}" for node in range(group.group_world_size)])]
        # a node that has joined later has not seen the failures before, and all ranks are to be of the same attempt
        set_remaining_restarts(agent, min(left for left, _, _ in told))
        self._names = [node_name(node, host) for node, (_, host, _) in enumerate(told)]
        self._variables.update(towards([address for _, _, address in told if address], {**os.environ, **self._variables}))
        group.master_addr, group.master_port = json.loads(store.get("ranks"))
        return store

    @property
    def failed(self) -> bool:
        """Whether a node has told of a failure, or is not heard of any more."""
        return not self._alone and (self._failed or self._deaf)

    def through(self) -> bool:
        """This node's ranks have all ended well; whether those of the others have too."""
        self._through = True
        return self._alone or self._all_through

    def leave(self, signalled: int) -> None:
        """This node's launcher is ended by a signal: the others need not wait to miss it."""
        if not self._alone and self._store and not self._deaf:
            with suppress(DistError):
                self._tell([], f"{self._names[self._mine]} was stopped by {signal_name(signalled)}")
                self._wait_until_read(time.monotonic() + LINGERING)

    def exchange(self) -> None:
        """The job has failed, here or elsewhere: have what is known of it written down on every node."""
        if self._alone:
            return
        others = [node for node in range(len(self._names)) if node != self._mine]
        try:
            if self._deaf:
                raise DistError
            self._tell(read_failures(self._failures))
            until = time.monotonic() + LINGERING
            self._wait_for([f"failures/{node}" for node in others], until)
            silent = [node for node in others if not self._store.check([f"failures/{node}"])]
            for node in {*others} - {*silent}:
                for failure in json.loads(self._store.get(f"failures/{node}")):
                    Failure(**failure).write(self._failures)
            lost = self._store.get("failed").decode()
            self.lost = bool(lost)
            if lost:
                print(f"parwrap: {lost}", file=sys.stderr)
            elif silent:
                names = ", ".join(self._names[node] for node in silent)
                print(f"parwrap: no answer from {names}; if it is gone, that is why ranks here miss others", file=sys.stderr)
            self._wait_until_read(until)
        except DistError:
            self.lost = True
            print(f"parwrap: {self._names[0]}, where the job has met, is not heard of any more", file=sys.stderr)

    def _listen(self) -> None:
        """Be heard by the other nodes, and hear them, for as long as this process lives. Each node watches the one before it."""
        store, beaten, heard = None, 0.0, (None, 0.0)
        told_through = False
        while True:
            time.sleep(LOOKING)
            if store is not self._store:
                store, heard, told_through = self._store, (None, 0.0), False
            if store is None or self._alone or self._failed:
                continue
            all_through = failed = False
            try:
                if time.monotonic() > beaten + BEAT:
                    beaten = time.monotonic()
                    store.set(f"beat/{self._mine}", str(beaten))
                    watched = (self._mine or len(self._names)) - 1
                    beat = store.get(f"beat/{watched}")
                    heard = heard if beat == heard[0] else (beat, beaten)
                    if beaten - heard[1] > self._silence:
                        self._tell([], f"{self._names[watched]} has not been heard of for {self._silence:g} s")
                if self._through:
                    if not told_through and store.add("through", 1) == len(self._names):
                        store.set("all through", "")
                    told_through = True
                    all_through = store.check(["all through"])
                failed = store.check(["failed"])
            except DistError:
                failed = True
            if store is self._store:  # and not the next start's
                self._all_through, self._failed, self._answered = all_through, failed, time.monotonic()

    def _tell(self, failures: Iterable[Failure], lost: str = "") -> None:
        self._store.set(f"failures/{self._mine}", json.dumps([asdict(failure) for failure in failures]))
        self._store.compare_set("failed", "", lost)

    @property
    def _alone(self) -> bool:
        return len(self._names) == 1

    @property
    def _deaf(self) -> bool:
        """Whether the store, which another node keeps, does not answer."""
        return time.monotonic() - self._answered > self._silence

    def _wait_until_read(self, until: float) -> None:
        """Until every node has read what is known, for the store may be this one's."""
        self._store.set(f"read/{self._mine}", "")
        with suppress(DistError):  # it is another's, who has seen this
            self._wait_for([f"read/{node}" for node in range(len(self._names))], until)

    def _wait_for(self, keys: list[str], until: float) -> None:
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(LOOKING)


@contextmanager
def _ranks_store_apart() -> Iterator[None]:
    """With a store that it shares with ranks, torch lets a node that joins later wait for word of it in vain."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
