"""``@rank_zero_only`` and ``rank_zero_first``: one rank does work for all ranks.

Waiting ranks use the store, not a collective: a download may take longer than a collective's timeout.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parwrap.decorator import ScopeDecorator, describe
from parwrap.errors import RankZeroError, UsageError
from parwrap.group import group as groups
from parwrap.group.collectives import broadcast, group_for
from parwrap.group.group import Group, alone, local_rank, rank

__all__ = ["rank_zero_first", "rank_zero_only"]


class rank_zero_only(ScopeDecorator):
    """Run a function on rank 0 only; on the other ranks it does nothing and returns ``None``.

    Write ``@rank_zero_only`` or ``@rank_zero_only(broadcast=True)``, on functions and methods.

    Args:
        local: run it on the first rank of every node.
        broadcast: send rank 0's result to all ranks, which wait for it; the result must pickle.

    Raises:
        UsageError: used as a ``with`` block, which cannot skip its body; or ``local`` and ``broadcast`` together.
        RankZeroError: on the waiting ranks, when rank 0 has raised.

    >>> @rank_zero_only
    ... def report(loss):
    ...     return f"loss {loss}"
    >>> report(0.5)
    'loss 0.5'
    """

    def __init__(self, *, local: bool = False, broadcast: bool = False) -> None:
        super().__init__()
        if local and broadcast:
            raise UsageError(
                "rank_zero_only(local=True, broadcast=True) does not say which node's result to use: remove one of the two options."
            )
        self._local, self._broadcast = local, broadcast

    def scope(self, function: Callable[..., Any] | None) -> Any:
        raise UsageError(
            "`with parwrap.rank_zero_only():` cannot skip its body: write `if parwrap.is_rank_zero():` or decorate a function."
        )

    def wrapped(self, function: Any) -> Any:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._broadcast and not groups.is_alone() and (group := _waiting_group("rank_zero_only(broadcast=True)")):
                return _shared(group, function, args, kwargs)
            if (local_rank() if self._local else rank()) > 0 and not (self._broadcast and groups.is_outside_loop()):
                return None
            with alone():
                return function(*args, **kwargs)

        return guarded


class rank_zero_first(ScopeDecorator):
    """Run the block on rank 0 first, and on the other ranks once rank 0 has finished: rank 0 downloads, then the others read.

    Write ``with rank_zero_first():`` or ``@rank_zero_first``.

    Args:
        local: the first rank of every node goes first on its node.

    >>> with rank_zero_first():
    ...     dataset = list(range(3))
    """

    def __init__(self, *, local: bool = False) -> None:
        super().__init__()
        self._local = local

    @contextmanager
    def scope(self, function: Callable[..., Any] | None) -> Iterator[None]:
        group = None if groups.is_alone() else _waiting_group("rank_zero_first")
        if group is None:
            yield
            return
        place = f"node {group.world.node_rank}" if self._local else "all nodes"
        through = group.key(f"rank_zero_first on {place}")
        first = (group.world.local_rank if self._local else group.world.rank) == 0
        with alone():
            if first:
                try:
                    yield
                finally:
                    group.store.set(through, b"through")
            else:
                group.fetch(through, group.world.rank - group.world.local_rank if self._local else 0, "rank_zero_first")
                yield


def _waiting_group(name: str) -> Group | None:
    """The group whose store the ranks wait at; ``None`` if this rank is the only one."""
    group = group_for(name)
    if group is not None and group.store is None:
        raise UsageError(
            f"parwrap.{name} needs parwrap's own process group, but the script has started another one: use torch.distributed there."
        )
    return group


def _shared(group: Group, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return rank 0's result on every rank. If rank 0 raises an exception, the waiting ranks raise an error too."""
    outcome = group.key("rank_zero_only")
    if group.world.rank > 0:
        failure = group.fetch(outcome, 0, f"rank_zero_only {describe(function)}").decode()
        if failure:
            raise RankZeroError(f"rank 0 failed in {describe(function)}, whose result this rank waits for: {failure}")
        return broadcast(None)
    try:
        with alone():
            result = function(*args, **kwargs)
            pickle.dumps(result)  # while it can still tell the others that it fails
    except BaseException as error:
        group.store.set(outcome, f"{type(error).__name__}: {error}")
        raise
    group.store.set(outcome, b"")
    return broadcast(result)
