"""Replicas of a module on several devices of one process: makes the copies, and runs replicas at the same time in threads.

The first replica is the module itself, so the running statistics of its batch norms stay up to date. The other replicas are copies, whose
gradients flow back to the module's parameters; changes that a forward makes in a copy are lost. (``torch.nn.parallel.replicate`` needs
different GPUs, and gives unused parameters a gradient of zeros.)

Replicas may compute something together in a forward, as synchronized batch norms do. No replica waits for a failed or finished one.
Replicas on the same device take turns: they share its random stream, whose state a checkpoint must be able to restore.
"""

from __future__ import annotations

import contextvars
import copy
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from parwrap.errors import UsageError
from parwrap.ranks.device import current_stream, on_device, on_stream
from parwrap.torch_private.modules import (
    FLAT_WEIGHTS,
    IS_REPLICA,
    registered_buffers,
    registered_modules,
    registered_parameters,
    shallow_replica,
)
from parwrap.torch_private.process_state import default_device
from parwrap.torch_private.tensors import unsafe_view

__all__ = ["Replica", "current_replica", "is_undivided", "replicas", "run_together", "undivided"]

SMALL = 2**18
"""Tensors up to this number of elements are sent together, because each copy to another device has a fixed cost."""

# copies


def replicas(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """``module``, whose parameters and buffers are on the first of ``devices``, and a copy of it for each of the others.

    >>> layer = nn.Linear(1, 1)
    >>> one, other = replicas(layer, [torch.device("cpu")] * 2)
    >>> one is layer, other.weight is layer.weight, torch.equal(other.weight, layer.weight)
    (True, False, True)
    """
    held = [registry(each) for each in module.modules() for registry in (registered_parameters, registered_buffers)]
    tensors = list({id(t): t for each in held for t in each.values() if t is not None}.values())
    flows = [t for t in tensors if t.requires_grad and torch.is_grad_enabled()]
    stays = [t for t in tensors if not (t.requires_grad and torch.is_grad_enabled())]
    with torch.no_grad():
        still = _sent(stays, devices[1:])
    flowing = _Copies.apply(devices[1:], *flows)
    made = [module]
    for number, device in enumerate(devices[1:]):
        copies = [*flowing[number * len(flows) : (number + 1) * len(flows)], *still[number]]
        made.append(_copy(module, {id(t): own for t, own in zip([*flows, *stays], copies, strict=True)}, device))
    return made


class _Copies(torch.autograd.Function):
    """Copies tensors to several devices, and returns the copies device by device. A tensor whose copies get no gradient gets none."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.homes = [t.device for t in tensors]
        return tuple(copy for each in _sent(tensors, devices) for copy in each)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        count = len(ctx.homes)
        sums: list[torch.Tensor | None] = [None] * count
        for first in range(0, len(grads), count or 1):
            there = {place: grad for place, grad in enumerate(grads[first : first + count]) if grad is not None}
            (back,) = _sent(list(there.values()), [ctx.homes[0]], copying=False)
            for place, grad in zip(there, back, strict=True):
                known = sums[place]
                sums[place] = grad if known is None else known + grad
        return (None, *sums)


def _sent(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], copying: bool = True) -> list[list[torch.Tensor]]:
    """``tensors`` on each of ``devices``.

    Without ``copying``, a large tensor that is already on a device is returned itself; small ones are always packed together.
    """
    together: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel() <= SMALL and tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            together.setdefault(tensor.dtype, []).append(place)
    flat = {dtype: torch.cat([tensors[place].reshape(-1) for place in places]) for dtype, places in together.items()}
    sent = []
    for device in devices:
        there: dict[int, torch.Tensor] = {}
        for dtype, places in together.items():
            # not views: an in-place change of one must not invalidate another that is saved for a backward
            split = torch.unsafe_split_with_sizes(flat[dtype].to(device, copy=copying), [tensors[place].numel() for place in places])
            there |= {place: unsafe_view(each, tensors[place].shape) for place, each in zip(places, split, strict=True)}
        sent.append([there[place] if place in there else t.to(device, copy=copying) for place, t in enumerate(tensors)])
    return sent


def _copy(module: nn.Module, known: dict[int, Any], device: torch.device) -> nn.Module:
    """A copy of ``module`` and its submodules; ``known`` has the copied tensors by the ids of their originals."""
    pairs = [(each, shallow_replica(each)) for each in module.modules()]
    known |= {id(each): own for each, own in pairs}
    for each, own in pairs:
        vars(own).update({name: _exchanged(value, known, device) for name, value in vars(each).items() if name not in _OWN})
        registered_modules(own).update({name: known.get(id(child)) for name, child in registered_modules(each).items()})
        registered_buffers(own).update({name: known.get(id(buffer)) for name, buffer in registered_buffers(each).items()})
        for name, p in registered_parameters(each).items():
            if p is not None:
                setattr(own, name, known[id(p)])  # because recurrent layers also keep it in a separate list
                vars(own).pop(name, None)
            registered_parameters(own)[name] = known.get(id(p))
    return pairs[0][1]


_OWN = {*vars(nn.Module()), IS_REPLICA, FLAT_WEIGHTS}
"""Names of attributes that are not copied like the others: :func:`_copy` or ``shallow_replica`` sets them."""


def _exchanged(value: Any, known: dict[int, Any], device: torch.device) -> Any:
    """Return the copy's value of an attribute: references to the original's modules and tensors become references to the copies."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, MethodType) and id(value.__self__) in known:
        return MethodType(value.__func__, weakref.proxy(known[id(value.__self__)]))  # a cycle would keep the copy alive
    if type(value) is tuple:
        return tuple(_exchanged(each, known, device) for each in value)
    if type(value) in (list, deque, dict, OrderedDict, defaultdict, set):
        own = copy.copy(value)
        for place, each in value.items() if isinstance(value, dict) else () if isinstance(value, set) else enumerate(value):
            own[place] = _exchanged(each, known, device)
        return own
    return value


# threads

_here = threading.local()


def current_replica() -> Replica | None:
    """The replica that runs in this thread, or ``None``.

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


def run_together(
    devices: Sequence[torch.device], calls: Sequence[Callable[[], Any]], modules: Sequence[nn.Module | None] | None = None
) -> list[Any]:
    """Run each of ``calls`` in a separate thread with the modes of the calling thread, and return the results.

    Args:
        devices: the device of each call.
        calls: the functions to run.
        modules: the module of each call, to name layers in which replicas compute together.

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


class Replica:
    """One of several running replicas.

    Attributes:
        index: the number of the replica, from 0.
        device: the device of the replica.
        module: the module that it runs, if known.
    """

    def __init__(self, team: _Team, index: int, module: nn.Module | None) -> None:
        self.index, self.device, self.module = index, team.devices[index], module
        self._team, self._met = team, 0

    def together(self, what: str, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas, and return ``merge(values)``, with their values in the order of the replicas.

        Args:
            what: the name of what is computed together, the same in all replicas.
            value: this replica's value.
            merge: merges the values, in the last replica to arrive; if it raises an error, all replicas raise it.

        Raises:
            UsageError: another replica is at a different point, or has finished its forward.
        """
        self._met += 1
        return self._team.meet(self, self._met - 1, what, value, merge)

    def __str__(self) -> str:
        return f"replica {self.index} on {self.device}"


class _Abandoned(Exception):
    """Raised in a replica that waits for the others when one of these has failed; never shown."""


class _Meeting:
    """One point at which all replicas compute together.

    Attributes:
        arrived: for each replica that has arrived, by its number: what it computes, and its value.
        over: whether all replicas have arrived.
        result: what the merge of their values has returned.
        error: what the merge has raised, or the error if replicas compute different things.
    """

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
        self._meetings: list[_Meeting] = []
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

    def stop(self) -> None:
        """Wake all waiting replicas, and let no replica wait from now on."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _take_turn(self, replica: Replica) -> None:
        """Wait until no other replica runs on this device, and all replicas with lower numbers on this device have begun."""
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

    def meet(self, replica: Replica, number: int, what: str, value: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas at the meeting with this ``number``; see :meth:`Replica.together`."""
        with self._changed:
            if len(self._meetings) == number:
                self._meetings.append(_Meeting())
            meeting = self._meetings[number]
            meeting.arrived[replica.index] = what, value
            if len(meeting.arrived) == len(self.devices):
                self._hold(meeting, merge)
                self._changed.notify_all()
            else:
                self._end_turn(replica)
                self._changed.wait_for(lambda: meeting.over or self._failed or bool(self._finished - meeting.arrived.keys()))
                if meeting.over:
                    self._take_turn(replica)
        if not meeting.over:
            if self._failed:
                raise _Abandoned
            done = min(self._finished)
            raise UsageError(f"{replica} is in {what}, but replica {done} on {self.devices[done]} has finished its forward. {ADVICE}")
        if meeting.error is not None:
            raise meeting.error
        return meeting.result

    def _hold(self, meeting: _Meeting, merge: Callable[[list[Any]], Any]) -> None:
        meeting.over = True
        arrived = sorted(meeting.arrived.items())
        (first, (what, _)), *others = arrived
        try:
            for other, (other_what, _) in others:
                if other_what != what:
                    raise UsageError(
                        f"replica {first} on {self.devices[first]} is in {what} while replica {other} on {self.devices[other]} is in "
                        f"{other_what}. {ADVICE}"
                    )
            meeting.result = merge([value for _, (_, value) in arrived])
        except Exception as error:
            meeting.error = error
        meeting.arrived.clear()


ADVICE = "Run the same layers in the same order on all replicas, or remove parwrap.sync_bn."


def _modes(devices: Sequence[torch.device]) -> Callable[[torch.device], AbstractContextManager]:
    """Record the modes that torch keeps for this thread. The returned function makes a context manager that sets them in another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    # torch.autocast is not used here, because interceptors would take it for the script's own
    autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cached = torch.is_autocast_cache_enabled()
    default = default_device()
    computing = torch.get_num_threads()
    gpus = list(dict.fromkeys(device for device in devices if device.type == "cuda"))
    streams = [(gpu, current_stream(gpu)) for gpu in gpus]

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
            for gpu, stream in streams:
                entered.enter_context(on_stream(gpu, stream))
            if device.type == "cuda":
                entered.enter_context(on_device(device))
            else:  # replicas share the threads that torch computes with
                entered.callback(torch.set_num_threads, computing)
                torch.set_num_threads(max(1, computing // len(devices)))
            if default.type != "cpu":
                entered.enter_context(device if default.type == "cuda" else default)
            yield

    return modes
