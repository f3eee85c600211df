"""Private names of torch's elastic launcher. This file does not import torch, because its functions only use their arguments."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CLOSE",
    "POLL",
    "RENDEZVOUS",
    "agent_store",
    "arrived_nodes",
    "given_signals",
    "process_context",
    "remaining_restarts",
    "set_remaining_restarts",
    "this_node",
]

RENDEZVOUS = "_rendezvous"
"""The method of ``SimpleElasticAgent`` that gives ranks their numbers at each start. The agent calls no public method there."""

POLL = "_poll"
"""The method of ``MultiprocessContext`` that checks whether its processes have ended. The public ``wait`` only loops around it."""

CLOSE = "_close"
"""The method of ``MultiprocessContext`` that ends its processes. The public ``close`` passes the signal and the timeout to it."""


def agent_store(agent: Any) -> Any:
    """The store with which the agents of all nodes have found each other. It is not public."""
    return agent._store


def remaining_restarts(agent: Any) -> int:
    """How often an agent may still restart its ranks. It is not public."""
    return agent._remaining_restarts


def set_remaining_restarts(agent: Any, restarts: int) -> None:
    """Set how often an agent may still restart its ranks. Publicly, that is fixed when the agent is made."""
    agent._remaining_restarts = restarts


def process_context(context: Any) -> Any:
    """The ``ProcessContext`` of a ``MultiprocessContext``, with processes and sentinels; ``None`` before start. Only pids are public."""
    return context._pc


def arrived_nodes(handler: Any) -> list[Any]:
    """The nodes that have joined a dynamic rendezvous, in their order. Publicly, a handler only counts those that wait for a restart."""
    return list(handler._state_holder.state.participants)


def this_node(handler: Any) -> Any:
    """This node among :func:`arrived_nodes`. It is not public."""
    return handler._this_node


def given_signals(torchrun: Any) -> str:
    """The names of the signals that the launcher handles, from torchrun's parsed options; torch 2.9 has no such option."""
    return getattr(torchrun, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
