"""What the launchers of several nodes exchange, in addition to torch's agents: how their ranks ended.

Torch's agents alone have three problems. A node learns of a failure on another node late or never. A finished node waits five minutes for
the others. Restarted ranks find old keys in their store. This file notifies every node, and gives each start a new store. What nodes tell
each other is signed and typed (``ranks/store.py``). ``routes.py`` finds the rendezvous, ``failures.py`` describes a failure.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import DistError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from parwrap.errors import LaunchError
from parwrap.launching.failures import Failure, node_name, read_failures
from parwrap.launching.routes import interface_variables, listener
from parwrap.ranks.environment import environment
from parwrap.ranks.processes import signal_name
from parwrap.ranks.store import SignedStore
from parwrap.torch_private.elastic import agent_store, remaining_restarts, set_remaining_restarts

__all__ = ["Nodes"]

REPORT_WAIT = 3.0
"""Seconds that a node waits after a failure for the reports of the other nodes."""

STORES_APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Keeps the ranks' store apart from the rendezvous store. Otherwise a node that joins later would wait forever for a notification."""

POLLING = 0.1
"""Seconds between two checks of the store, for reports and other messages."""

HEARTBEAT = 1.0
"""Seconds between two heartbeats of a node."""

HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a node counts as lost."""


class Nodes:
    """This node among the nodes of its job. A single node exchanges nothing.

    Args:
        failures: the directory for the failures of this node and, later, of the other nodes.
        variables: the environment variables for this node's ranks; the network interface is added if only other nodes know it.
        timeout: seconds without a heartbeat after which a node counts as lost, if less than the default; at least three heartbeats.
        waiting: a function that returns a context manager to enter while torch's rendezvous, its argument, waits.

    Attributes:
        lost: whether the ranks have failed because a node was lost or stopped, and this was reported.
    """

    def __init__(
        self, failures: Path, variables: dict[str, str], timeout: float, waiting: Callable[[Any], AbstractContextManager[None]]
    ) -> None:
        self._waiting = waiting
        self._failures, self._variables, self._heartbeat_timeout = failures, variables, max(3 * HEARTBEAT, min(HEARTBEAT_TIMEOUT, timeout))
        self._started = 0
        self._mine, self._names = 0, [""]
        self._store: SignedStore | None = None
        self._refused: LaunchError | None = None
        self._rank_store: TCPStore | None = None
        self._finished = self._all_finished = self._failed = False
        self._answered = 0.0
        self.lost = False

    def rendezvous(self, wrapped: Callable, agent: Any, args: tuple, kwargs: dict) -> None:
        """A wrapper for the rendezvous of torch's agents: each start gets a new store, and nodes agree on restarts."""
        self._store = None
        while True:
            try:
                with environment(STORES_APART), self._waiting(agent.get_worker_group().spec.rdzv_handler):
                    wrapped(*args, **kwargs)
                store = self._agree(agent)
                break
            except RendezvousGracefulExitError:
                raise LaunchError(
                    "the job already had as many nodes as --nnodes allows, and ended without this node: raise MAX in --nnodes MIN:MAX, or "
                    "start fewer nodes."
                ) from None
            except DistStoreError:  # a node has left right after joining
                if not remaining_restarts(agent):
                    raise
                set_remaining_restarts(agent, remaining_restarts(agent) - 1)
        if self._started and self._mine == 0:
            print(f"parwrap: the ranks start again, on {', '.join(self._names)}", file=sys.stderr)
        if not self._started:
            # this does not join the process: the machine that hosts the store may be off
            threading.Thread(target=self._listen, name="parwrap nodes", daemon=True).start()
        self._started += 1
        self._finished = self._all_finished = self._failed = False
        self._answered = time.monotonic()
        self._store = store.clone()

    def _agree(self, agent: Any) -> SignedStore:
        """Agree with the other nodes on the ranks' store, the network interface and the restarts left. Returns a store for this start."""
        group = agent.get_worker_group()
        self._mine = group.group_rank
        static = group.spec.rdzv_handler.get_backend() == "static"  # torch has one store for all starts
        store = SignedStore(agent_store(agent), f"start {self._started if static else ''}")
        if self._mine == 0:
            if self._started or not static:
                with listener(group.master_addr) as listening:
                    group.master_port = listening.getsockname()[1]
                    self._rank_store = TCPStore(
                        group.master_addr, group.master_port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
                    )
            store.set("ranks' address", str(group.master_addr))
            store.set("ranks' port", int(group.master_port))
        store.set(f"beat/{self._mine}", 0.0)
        store.set(f"host/{self._mine}", socket.gethostname())
        store.set(f"address/{self._mine}", group.spec.local_addr or "")
        store.set(f"restarts/{self._mine}", remaining_restarts(agent))
        nodes = range(group.group_world_size)
        hosts = [store.get(f"host/{node}", str) for node in nodes]
        addresses = [store.get(f"address/{node}", str) for node in nodes]
        # a node that joined later has not seen earlier failures, and all ranks need the same attempt number
        set_remaining_restarts(agent, min(store.get(f"restarts/{node}", int) for node in nodes))
        self._names = [node_name(node, host) for node, host in enumerate(hosts)]
        self._variables.update(interface_variables(filter(None, addresses), {**os.environ, **self._variables}))
        group.master_addr, group.master_port = store.get("ranks' address", str), store.get("ranks' port", int)
        return store

    @property
    def failed(self) -> bool:
        """Whether a node has reported a failure, or counts as lost."""
        return not self._alone and (self._failed or self._unreachable)

    def finish(self) -> bool:
        """Report that this node's ranks have all succeeded. Returns whether those of the other nodes have too."""
        self._finished = True
        return self._alone or self._all_finished

    def leave(self, signalled: int) -> None:
        """Report that a signal ends this node's launcher, so that other nodes need not wait for its heartbeat."""
        if not self._alone and self._store and not self._unreachable:
            with suppress(DistError):
                self._publish([], f"{self._names[self._mine]} was stopped by {signal_name(signalled)}")
                self._wait_until_read(time.monotonic() + REPORT_WAIT)

    def exchange(self) -> None:
        """Send this node's failure reports to the other nodes, and save theirs here.

        Every node calls this after a rank has failed on any node.

        Raises:
            LaunchError: something else has written into the store.
        """
        if self._alone or self._store is None:
            return
        if self._refused:
            raise self._refused
        others = [node for node in range(len(self._names)) if node != self._mine]
        try:
            if self._unreachable:
                raise DistError
            self._publish(read_failures(self._failures))
            until = time.monotonic() + REPORT_WAIT
            self._wait_for([f"failures/{node}" for node in others], until)
            silent = [node for node in others if not self._store.has(f"failures/{node}")]
            for node in {*others} - {*silent}:
                for failure in self._store.get(f"failures/{node}", list):
                    Failure.checked(failure).write(self._failures)
            lost = self._store.get("failed", str)
            unexplained = not lost and all(failure.lost_another for failure in read_failures(self._failures))
            if unexplained:
                # a node that is being stopped has lost its ranks, and so have others, before it could say so
                lost = next((self._store.get(f"lost/{node}", str) for node in others if self._store.has(f"lost/{node}")), "")
            self.lost = bool(lost)
            if lost:
                print(f"parwrap: {lost}", file=sys.stderr)
            elif silent and unexplained:
                names = ", ".join(self._names[node] for node in silent)
                print(
                    f"parwrap: no answer from {names}: look there first, because ranks here lose their connection to a node that stops",
                    file=sys.stderr,
                )
            self._wait_until_read(until)
        except DistError:
            self.lost = True
            print(
                f"parwrap: no heartbeat from {self._names[0]}, which hosted the rendezvous: look there first, and start the job again",
                file=sys.stderr,
            )

    def _listen(self) -> None:
        """Send heartbeats, and check those of other nodes, while this process lives. Each node watches the node before it."""
        store, beaten, last_beat = None, 0.0, (None, 0.0)
        reported_done = False
        while True:
            time.sleep(POLLING)
            if store is not self._store:
                store, last_beat, reported_done = self._store, (None, 0.0), False
            if store is None or self._alone or self._failed:
                continue
            all_finished = failed = False
            try:
                if time.monotonic() > beaten + HEARTBEAT:
                    beaten = time.monotonic()
                    store.set(f"beat/{self._mine}", beaten)
                    watched = (self._mine or len(self._names)) - 1
                    beat = store.get(f"beat/{watched}", float)
                    last_beat = last_beat if beat == last_beat[0] else (beat, beaten)
                    if beaten - last_beat[1] > self._heartbeat_timeout:
                        self._publish([], f"no heartbeat from {self._names[watched]} for {self._heartbeat_timeout:g} s")
                if self._finished:
                    if not reported_done:
                        store.set(f"finished/{self._mine}", True)
                    reported_done = True
                    all_finished = store.has(*(f"finished/{node}" for node in range(len(self._names))))
                failed = store.has("failed")
            except DistError:
                failed = True
            except LaunchError as error:  # something else has written into the store
                failed, self._refused = True, error
            if store is self._store:  # and not the next start's
                self._all_finished, self._failed, self._answered = all_finished, failed, time.monotonic()

    def _publish(self, failures: Iterable[Failure], lost: str = "") -> None:
        """Tell the other nodes the ``failures`` of this node; ``lost`` is a message that a node was lost or stopped, if one was."""
        assert self._store is not None
        if lost:
            self._store.set(f"lost/{self._mine}", lost)
        self._store.set(f"failures/{self._mine}", [asdict(failure) for failure in failures])
        self._store.set_first("failed", lost)

    @property
    def _alone(self) -> bool:
        return len(self._names) == 1

    @property
    def _unreachable(self) -> bool:
        """Whether the store, which another node hosts, does not answer."""
        return time.monotonic() - self._answered > self._heartbeat_timeout

    def _wait_until_read(self, until: float) -> None:
        """Wait until every node has read the reports or ``until`` is over: if this node hosts the store, the store ends with it."""
        assert self._store is not None
        self._store.set(f"read/{self._mine}", True)
        with suppress(DistError):  # another node hosts the store, and has read this
            self._wait_for([f"read/{node}" for node in range(len(self._names))], until)

    def _wait_for(self, keys: list[str], until: float) -> None:
        assert self._store is not None
        while not self._store.has(*keys) and time.monotonic() < until:
            time.sleep(POLLING)
