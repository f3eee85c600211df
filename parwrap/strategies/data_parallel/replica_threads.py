"""Runs the replicas of a module at the same time, each in a thread: passes on modes and errors, and synchronizes the replicas.

Replicas synchronize when they compute something together in a forward. No replica waits for one that has failed or finished. Replicas on
the same device take turns, because they share its random stream, and a checkpoint must be able to restore its state. Callers provide the
replicas and their arguments.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from parwrap.errors import UsageError

__all__ = ["Replica", "current_replica", "is_undivided", "run_together", "undivided"]

_here = threading.local()


class Replica:
    """One of several running replicas.

    Attributes:
        index: its number, from 0.
        device: its device.
        module: its module.
        names: the names of its layers by the ids of their tensors; ``None`` until they are computed.
    """

    def __init__(self, team: _Team, index: int, module: nn.Module | None) -> None:
        self.index, self.device, self.module = index, team.devices[index], module
        self.names: dict[int, str] | None = None
        self._team, self._passed = team, 0

    def synchronize(self, what: str, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas, and return ``merge`` of their values in the order of the replicas. The last one to arrive calls it.

        Args:
            what: the name of what is computed together, the same in all replicas.
            value: this replica's value.
            merge: merges the values; if it raises an error, all replicas raise it.

        Raises:
            UsageError: another replica is at a different point, or has finished its forward.
        """
        self._passed += 1
        return self._team.synchronize(self, self._passed - 1, what, value, merge)

    def __str__(self) -> str:
        return f"replica {self.index} on {self.device}"


class _Abandoned(Exception):
    """Raised in a replica that waits for one that has failed; never shown."""


class _SyncPoint:
    def __init__(self) -> None:
        self.arrived: dict[int, tuple[str, Any]] = {}
        self.over = False
        self.result: Any = None
        self.error: Exception | None = None


class _Team:
    """The replicas of one call."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.results: list[Any] = [None] * len(devices)
        self.errors: dict[int, BaseException] = {}
        self._finished: set[int] = set()
        self._failed = False
        self._sync_points: list[_SyncPoint] = []
        self._turns: dict[torch.device, int] = {}
        self._begun: set[int] = set()
        self._changed = threading.Condition()

    def run(self, replica: Replica, call: Callable[[], Any], modes: AbstractContextManager) -> None:
        """Run ``call`` inside ``modes``, in the thread of ``replica``."""
        _here.replica = replica
        self._take_turn(replica)
        try:
            with modes:
                self.results[replica.index] = call()
        except _Abandoned:
            self.stop()
        except BaseException as error:
            # a note below the traceback, because it may not be possible to build an error of this type from a text
            error.__notes__ = [*getattr(error, "__notes__", []), f"in {replica} (parwrap.data_parallel)"]  # type: ignore[attr-defined]
            self.errors[replica.index] = error
            self.stop()
        else:
            with self._changed:
                self._finished.add(replica.index)
        finally:
            self._end_turn(replica)

    def _take_turn(self, replica: Replica) -> None:
        """Wait until no other replica runs on this device, and the replicas before this one there have begun."""
        before = {index for index in range(replica.index) if self.devices[index] == replica.device}
        with self._changed:
            self._changed.wait_for(lambda: replica.device not in self._turns and before <= self._begun)
            self._turns[replica.device] = replica.index
            self._begun.add(replica.index)

    def _end_turn(self, replica: Replica) -> None:
        with self._changed:
            if self._turns.get(replica.device) == replica.index:
                del self._turns[replica.device]
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake all replicas that wait, and let none wait from now on."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def synchronize(self, replica: Replica, number: int, what: str, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        with self._changed:
            if len(self._sync_points) == number:
                self._sync_points.append(_SyncPoint())
            sync_point = self._sync_points[number]
            sync_point.arrived[replica.index] = what, value
            if len(sync_point.arrived) == len(self.devices):
                self._hold(sync_point, merge)
                self._changed.notify_all()
            else:
                self._end_turn(replica)
                self._changed.wait_for(lambda: sync_point.over or self._failed or bool(self._finished - sync_point.arrived.keys()))
                if sync_point.over:
                    self._take_turn(replica)
        if not sync_point.over:
            self._give_up(replica, what)
        if sync_point.error is not None:
            raise sync_point.error
        return sync_point.result

    def _hold(self, sync_point: _SyncPoint, merge: Callable[[list[Any]], Any]) -> None:
        sync_point.over = True
        arrived = sorted(sync_point.arrived.items())
        try:
            (first, (what, _)), *others = arrived
            for other, (other_what, _) in others:
                if other_what != what:
                    raise UsageError(
                        f"replica {first} on {self.devices[first]} is in {what} while replica {other} on {self.devices[other]} is in "
                        f"{other_what}. {ADVICE}"
                    )
            sync_point.result = merge([value for _, (_, value) in arrived])
        except Exception as error:
            sync_point.error = error
        sync_point.arrived.clear()

    def _give_up(self, replica: Replica, what: str) -> None:
        if self._failed:
            raise _Abandoned
        done = min(self._finished)
        raise UsageError(
            f"{replica} is in {what}, but replica {done} on {self.devices[done]} has already finished its forward pass. {ADVICE}"
        )


ADVICE = "Run the same layers in the same order on all replicas, or remove parwrap.sync_bn."


def run_together(
    devices: Sequence[torch.device], calls: Sequence[Callable[[], Any]], modules: Sequence[nn.Module | None] | None = None
) -> list[Any]:
    """Run each of ``calls`` in a thread with the modes of the calling thread, and return the results.

    Args:
        devices: the device of each call.
        calls: the functions to run.
        modules: the module of each call, for replicas that synchronize.

    Raises:
        BaseException: the error of the failed replica with the lowest number.

    >>> run_together([torch.device("cpu")] * 2, [lambda: current_replica().index, torch.is_grad_enabled])
    [0, True]
    """
    team = _Team(devices)
    modes = _modes(devices)
    threads = []
    for index, (call, module) in enumerate(zip(calls, modules or [None] * len(calls), strict=True)):
        replica, context = Replica(team, index, module), contextvars.copy_context()
        given = team.run, replica, call, modes(devices[index])
        threads.append(threading.Thread(target=context.run, args=given, name=f"parwrap {replica}"))
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        team.stop()
        for thread in threads:
            thread.join()
        raise
    if team.errors:
        error = team.errors[min(team.errors)]
        team.errors.clear()  # the error's traceback refers to the team
        try:
            raise error
        finally:
            del error
    return team.results


def current_replica() -> Replica | None:
    """The replica that runs in this thread, among several.

    >>> current_replica() is None
    True
    """
    return getattr(_here, "replica", None)


def is_undivided() -> bool:
    """Whether this thread must not divide calls: it runs a replica, or is inside :func:`undivided`."""
    return current_replica() is not None or getattr(_here, "undivided", False)


@contextmanager
def undivided() -> Iterator[None]:
    """Do not divide calls of this thread inside the block."""
    before, _here.undivided = getattr(_here, "undivided", False), True
    try:
        yield
    finally:
        _here.undivided = before


def _modes(devices: Sequence[torch.device]) -> Callable[[torch.device], AbstractContextManager]:
    """Record the state that torch keeps for this thread; the returned context manager sets it in another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    # torch.autocast is not used here, because interceptors would take it for the script's own
    autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cached = torch.is_autocast_cache_enabled()
    place = torch.get_default_device()
    computing = torch.get_num_threads()
    share = max(1, computing // len(devices))
    gpus = list(dict.fromkeys(device for device in devices if device.type == "cuda"))
    streams = [torch.cuda.current_stream(gpu) for gpu in gpus]

    @contextmanager
    def modes(device: torch.device) -> Iterator[None]:
        with ExitStack() as entered:
            if inference:
                entered.enter_context(torch.inference_mode())
            torch.set_grad_enabled(grad)
            torch.set_autocast_cache_enabled(cached)
            for kind, enabled, dtype in autocasts:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            if device.type == "cuda":
                entered.enter_context(torch.cuda.device(device))
            if device.type == "cpu":  # the replicas share the process's threads
                entered.callback(torch.set_num_threads, computing)
                torch.set_num_threads(share)
            if place.type != "cpu":
                entered.enter_context(device if place.type == "cuda" else place)
            yield

    return modes
