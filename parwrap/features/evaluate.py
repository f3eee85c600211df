"""``@evaluate``: a plain ``evaluate(model, loader)`` reads each sample once on all ranks together, and returns what one process would.

What each rank reads is ``data/evaluation.py``'s, how the ranks' results become one ``data/merging.py``'s. Here are the decorator and
the meeting of the ranks at the end.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from parwrap.collectives import arrived, callers, sent
from parwrap.data.evaluation import BOTH, Evaluation, Reading, check, told
from parwrap.data.lengths import Lengths
from parwrap.data.merging import REDUCTIONS, Part, Passed, merged
from parwrap.decorator import ScopeDecorator, describe, module_of
from parwrap.errors import UsageError
from parwrap.features import distributed
from parwrap.group import Group, is_alone
from parwrap.loop import Loop
from parwrap.streams import get_state, set_state
from parwrap.verbs import acting

__all__ = ["evaluate"]


class evaluate(ScopeDecorator):
    """Have each rank read a part of the loaders of an evaluation, and return on every rank what a single process would.

    As ``@evaluate`` or ``@evaluate(reduce="sum")``, on a function or method that all ranks call together, inside of ``distributed``. No
    sample is read twice and none is missed; a loader with fewer batches than ranks is right too. Batches are those of a single process,
    so what is computed of each is the same. Each pass must read its loader to the end. With one rank it changes nothing.

    Args:
        reduce: how the ranks' results become one. Dicts, tuples and dataclasses are entered; what is no number, tensor or array must be
            the same on all ranks.

            - ``"mean"``: weighted by the samples that each rank has read. For a function that divides by the samples it has counted, or
              by ``len(loader.dataset)``, which is told as that of the rank's part. A mean of batch means, as ``np.mean(losses)``, is that
              of one process only if all batches are of one size.
            - ``"sum"``: for counts, and for what is divided by a length of the whole, such as ``len(loader.dataset)`` and
              ``len(loader)``, which are whole here.
            - ``"gather"``: tensors and arrays are concatenated along the first dimension and lists are joined, in the order of a single
              process. Lengths are told as for ``"mean"``.
            - a function of the list of the ranks' results, in their order; on one rank, a list of one.
            - a dict or tuple of these, one for each entry of the result. With a ``"sum"`` or a function in it, lengths are whole.

    Raises:
        UsageError: ``reduce`` is none of these, the function trains, or its results cannot be put together exactly.

    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> @evaluate
    ... def mean(loader):
    ...     return sum(batch.sum().item() for batch in loader) / len(loader.dataset)
    >>> mean(DataLoader(torch.arange(5.0), batch_size=2))
    2.0
    """

    layer = 40

    def __init__(self, *, reduce: Any = "mean") -> None:
        super().__init__()
        _check(reduce)
        self._reduce = reduce

    def scope(self, function: Callable | None) -> AbstractContextManager:
        if function is None:
            raise UsageError("`with parwrap.evaluate():` has no result to put together: decorate the function that returns it.")
        return nullcontext()

    def around(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            group = None if is_alone() or distributed.trains_apart() else callers("evaluate")
            if group is None or group.world.size == 1:
                return merged(self._reduce, [Part(function(*args, **kwargs), [])])
            return _evaluated(group, self._reduce, function, args, kwargs)

        return evaluated


def _check(reduce: Any) -> None:
    for way in _ways(reduce):
        if not (callable(way) or (isinstance(way, str) and way in REDUCTIONS)):
            meanings = "; ".join(f"{value!r}: {meaning}" for value, meaning in REDUCTIONS.items())
            raise UsageError(f"reduce={way!r} is not one of the ways to put results together. {meanings}; or a function of their list.")


def _ways(reduce: Any) -> Iterator[Any]:
    """Each way to put results together that is in ``reduce``."""
    if isinstance(reduce, (Mapping, tuple, list)):
        for each in reduce.values() if isinstance(reduce, Mapping) else reduce:
            yield from _ways(each)
    else:
        yield reduce


_running: list[Evaluation] = []
"""The evaluations that are open, the innermost last."""


class _Told(NamedTuple):
    """What a rank tells the others at the end.

    Attributes:
        result: of the function.
        readings: its passes.
        readers: how many ranks have a part.
        streams: the state of the shared random streams.
    """

    result: Any
    readings: list[Reading]
    readers: int
    streams: Any


def _evaluated(group: Group, reduce: Any, function: Callable, args: tuple, kwargs: dict) -> Any:
    kind = f"parwrap.evaluate of {getattr(function, '__qualname__', function)}"
    group.meet(kind)  # one that has left an epoch sooner must not evaluate other weights
    known = distributed.parts()
    if known:
        _have_same_buffers(known.loop, _arguments(function, args, kwargs))
    ways = list(_ways(reduce))
    told_parts = all(way in ("mean", "gather") for way in ways)
    lengths = Lengths(function, _arguments(function, args, kwargs), told_parts) if told_parts or "mean" in ways else None
    shared = known.loaders.streams.shared if known else nullcontext
    evaluation = Evaluation(group, shared, known.loaders.agree if known else lambda loader: None, lengths)
    apart = known.strategy.apart() if known else nullcontext()
    with _innermost(evaluation, known), lengths or nullcontext(), apart, acting([evaluation], module_of(function)):
        result = function(*args, **kwargs)
    with shared():
        streams = get_state() if known and group.world.rank == 0 else None
    mine = _Told(sent(result), [told(each) for each in evaluation.readings], evaluation.readers, streams)
    group.meet(kind)
    gathered: list[Any] = [None] * group.world.size
    dist.all_gather_object(gathered, mine)
    if known:
        with shared():
            set_state(gathered[0].streams)
    readings = check([each.readings for each in gathered])
    if not any(each.batches for each in readings[0]):
        if not evaluation.within and not evaluation.readings:
            _warn(f"{describe(function)} has read no DataLoader, so every rank has computed all of it, and its own result is returned.")
        return merged(reduce, [Part(result, [])])
    parts = [
        Part(arrived(each.result, group.device), [Passed(of.sizes, of.in_turn, of.rows) for of in passes])
        for each, passes in zip(gathered[: evaluation.readers], readings, strict=False)
    ]
    if lengths is not None and "mean" in ways and len(parts) > 1:
        lengths.warn([[passed.sizes for passed in of_all] for of_all in zip(*(part.passes for part in parts), strict=True)])
    if result is None and not callable(reduce):
        _warn(
            f"{describe(function)} returns nothing, and what it prints is of rank 0's part: return the numbers and print what comes back."
        )
    return merged(reduce, parts)


def _have_same_buffers(loop: Loop, arguments: Mapping[str, Any]) -> None:
    """Models among the ``arguments`` that no optimizer knows get rank 0's buffers: each rank evaluates its part with them."""
    for each in arguments.values():
        if isinstance(each, nn.Module):
            loop.know(each)
    loop.looking()


@contextmanager
def _innermost(evaluation: Evaluation, known: Any) -> Iterator[None]:
    """``evaluation`` shares out what is read, and those around it do not."""
    around = _running[-1] if _running else None
    if around is not None:
        if around.readings:
            raise UsageError(BOTH)
        around.within = around.asleep = True
    _running.append(evaluation)
    before = known.loop.parts if known else False
    if known:
        known.loop.parts = True
    try:
        yield
    finally:
        _running.pop()
        if known:
            known.loop.parts = before
        if around is not None:
            around.asleep = False


def _arguments(function: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # which the call itself raises, or which has no signature
        return {}


def _warn(text: str) -> None:
    warnings.warn(f"parwrap: {text}", stacklevel=2)
