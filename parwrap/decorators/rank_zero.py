"""``@rank_zero_only``, ``rank_zero_first`` and ``every_rank_writes``: what one rank does for all ranks, and what each does for itself.

Waiting ranks look at the store, without a collective: a download may take longer than a collective's timeout.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from parwrap.decorators.distributed import draws_put_back
from parwrap.decorators.scope import Call, ScopeDecorator, describe
from parwrap.errors import RankMismatchError, RankZeroError, UsageError, in_one_line
from parwrap.places import script_place
from parwrap.rank_zero import files
from parwrap.rank_zero.path_rules import every_rank_writing
from parwrap.ranks.collectives import broadcast
from parwrap.ranks.group import Group, alone, is_alone, local_rank, open_group, rank
from parwrap.ranks.store import SignedStore
from parwrap.rows.tensors import whole_is_open, whole_result

__all__ = ["every_rank_writes", "rank_zero_first", "rank_zero_only"]

NAP = 0.002, 0.25
"""The first and the longest time in seconds between two looks at the store."""


class rank_zero_only(ScopeDecorator):
    """Run a function on rank 0 only. On the other ranks its call does nothing and returns ``None``, or rank 0's result with ``broadcast``.

    Write ``@rank_zero_only`` or ``@rank_zero_only(broadcast=True)``, on functions and methods. Files that rank 0 writes in it are there for
    all ranks afterwards.

    Args:
        local: whether to run it on the first rank of every node instead.
        broadcast: whether to send rank 0's result to all ranks, which wait for it; the result must pickle.

    Raises:
        UsageError: used as a ``with`` block, which cannot skip its body; ``local`` and ``broadcast`` together; or a result that cannot be
            sent.
        RankZeroError: with ``broadcast``, on the waiting ranks, when rank 0 has raised.
        RankMismatchError: with ``broadcast``, rank 0 has not returned within the ``timeout`` of ``distributed``.

    >>> @rank_zero_only
    ... def report(loss):
    ...     return f"loss {loss}"
    >>> report(0.5)
    'loss 0.5'
    """

    def __init__(self, *, local: bool = False, broadcast: bool = False) -> None:
        if local and broadcast:
            raise UsageError(
                "rank_zero_only(local=True, broadcast=True) does not say which node's result to use: remove one of the two options."
            )
        self._local, self._broadcast = local, broadcast

    def scope(self, call: Call) -> Any:
        raise UsageError(
            "`with parwrap.rank_zero_only():` cannot skip its body: write `if parwrap.is_rank_zero():` or decorate a function."
        )

    def wrapped(self, function: Any) -> Any:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if whole_is_open() is not None and not is_alone():
                args, kwargs = whole_result((args, kwargs))  # all ranks collect their rows
            if self._broadcast and not is_alone() and (group := _waiting_group("rank_zero_only(broadcast=True)")):
                return _shared(group, function, args, kwargs)
            if (local_rank() if self._local else rank()) > 0:
                if self._broadcast:
                    raise UsageError(
                        f"{describe(function)} sends rank 0's result to the other ranks, but is called inside rank_zero_first, where "
                        "they wait until rank 0 has left the block. Call it before the block, or leave out broadcast=True."
                    )
                _left_to_rank_zero()
                return None
            with _running_alone():
                return function(*args, **kwargs)

        return guarded


class rank_zero_first(ScopeDecorator):
    """Run the block on rank 0 first, and on the other ranks after rank 0 has left it, even with an error. Use it for downloads.

    Write ``with rank_zero_first():`` or ``@rank_zero_first``.

    Args:
        local: whether the ranks of each node wait only for the first rank of their node.

    >>> with rank_zero_first():
    ...     dataset = list(range(3))
    """

    def __init__(self, *, local: bool = False) -> None:
        self._local = local

    @contextmanager
    def scope(self, call: Call) -> Iterator[None]:
        group = None if is_alone() else _waiting_group("rank_zero_first")
        if group is None:
            yield
            return
        through = _next_key(group, f"rank_zero_first on node {group.world.node_rank}" if self._local else "rank_zero_first")
        first = (group.world.local_rank if self._local else group.world.rank) == 0
        opened = files.current()
        with alone(in_turn=True):
            if first:
                try:
                    yield
                finally:
                    if opened and group.world.rank == 0:
                        opened.crossed()
                    _store(group).set(through, "")
            else:
                block = f"the block of rank_zero_first at {script_place()}"
                _wait(group, through, lambda: block, "the first rank of this node" if self._local else "rank 0")
                yield
        if opened and not first:
            opened.crossed()


class every_rank_writes(ScopeDecorator):
    """Let every rank, not only rank 0, write files in the block. Use a different path on each rank.

    Write ``with every_rank_writes():`` or ``@every_rank_writes``. After the block, every rank may still write to the paths that it has
    written in it, and below the directories that it has made in it. The block affects only the thread that opens it.

    >>> import json, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, every_rank_writes():
    ...     with open(f"{folder}/losses-{rank()}.json", "w") as file:
    ...         json.dump([0.5], file)
    """

    def scope(self, call: Call) -> AbstractContextManager[Any]:
        return every_rank_writing()


@contextmanager
def _running_alone() -> Iterator[None]:
    """Run the block on this rank only. The other ranks see the files that it makes. Afterwards all ranks draw as if it had not run."""
    opened = None if is_alone() else files.current()
    with opened.running_alone() if opened else nullcontext(), draws_put_back(), alone():
        yield


def _left_to_rank_zero() -> None:
    if not is_alone() and (opened := files.current()):
        opened.left_alone()


def _shared(group: Group, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return rank 0's result on every rank. If rank 0 raises an exception, the waiting ranks raise an error too."""
    outcome = _next_key(group, "rank_zero_only")
    if group.world.rank > 0:
        _left_to_rank_zero()
        if failure := _wait(group, outcome, functools.partial(describe, function)):
            raise RankZeroError(f"rank 0 failed with {failure} in {describe(function)}, whose result this rank waits for. Fix this error.")
        return broadcast(None)
    try:
        with _running_alone():
            result = function(*args, **kwargs)
            _check_pickles(result, function)  # while it can still tell the others that it fails
    except BaseException as error:
        _store(group).set(outcome, in_one_line(error))
        raise
    _store(group).set(outcome, "")
    result = broadcast(result)
    _store(group).delete(outcome)  # all ranks have read it: they take part in the broadcast
    return result


def _check_pickles(result: Any, function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(result)
    except Exception as error:
        raise UsageError(
            f"@parwrap.rank_zero_only(broadcast=True) sends the result of {describe(function)} to the other ranks, but it cannot be "
            f"pickled: {type(error).__name__}: {error}. Return tensors or numbers, or objects of classes that are defined at the top of a "
            "module."
        ) from error


def _waiting_group(name: str) -> Group | None:
    """The group in whose store waiting ranks look; ``None`` if there is only one rank."""
    group = open_group()
    if group is not None and group.store is None:
        raise UsageError(
            f"parwrap.{name} needs parwrap's own process group, but this script has started one itself. Leave out its init_process_group, "
            "or use calls of torch.distributed instead, such as barrier or broadcast_object_list."
        )
    return None if group is None or group.world.size == 1 else group


_lock = threading.Lock()
_keys: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""For each store, how often each name has been used. All ranks count alike, so they use the same keys."""


def _next_key(group: Group, name: str) -> str:
    with _lock:
        used = _keys.setdefault(group.store, Counter())
        used[name] += 1
        return f"{name} #{used[name]}"


def _store(group: Group) -> SignedStore:
    return SignedStore(group.store, "rank zero")


def _wait(group: Group, key: str, what: Callable[[], str], first: str = "rank 0") -> str:
    """Wait until the rank that goes first has written the text of ``key``, and return it; empty if that rank has not failed."""
    store, nap, until = _store(group), NAP[0], time.monotonic() + group.timeout.total_seconds()
    while not store.has(key):
        if time.monotonic() > until:
            raise RankMismatchError(
                f"{first} has not finished {what()} within {group.timeout.total_seconds():.0f} s, or has not begun it. Run it on all "
                "ranks. If it takes that long, set a larger @parwrap.distributed(timeout=...)."
            )
        time.sleep(nap)
        nap = min(nap * 1.5, NAP[1])
    return store.get(key, str)
