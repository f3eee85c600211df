"""``@evaluate``: the ranks of a plain ``evaluate(model, loader)`` together read each sample once, and return what one process would.

``data/evaluation/evaluation.py`` divides the data, ``data/evaluation/merging.py`` merges the ranks' results. This file has the decorator
and the sync point at the end.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import DataLoader

from parwrap.api import distributed
from parwrap.api.effects import Onlooker, Silent, State, modes_set_together, reached
from parwrap.coordination.call_site import warn
from parwrap.data.evaluation.comparing import compared
from parwrap.data.evaluation.evaluation import BOTH, Evaluation, Reading, check, shared_facts
from parwrap.data.evaluation.merging import REDUCTIONS, Part, Passed, merged
from parwrap.data.evaluation_blocks import is_stream
from parwrap.data.reported_lengths import Lengths
from parwrap.decorator import ScopeDecorator, describe, module_of
from parwrap.errors import ParwrapError, RankMismatchError, UsageError
from parwrap.group.collectives import AloneError, arrived, callers, gathered_objects, sent
from parwrap.group.group import Group, alone, is_alone
from parwrap.intercept.table import intercepting
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import get_state, set_state
from parwrap.patching.patch import installed
from parwrap.system.remote_exception import in_one_line
from parwrap.system.structures import leaves

__all__ = ["evaluate"]


class evaluate(ScopeDecorator):
    """Make each rank read a part of the loaders of an evaluation, and return on every rank what a single process would.

    Write ``@evaluate`` or ``@evaluate(reduce="sum")``, on a function or method that all ranks call together, inside ``distributed``. No
    sample is read twice or missed, even if a loader has fewer batches than there are ranks. Batches are the same as in a single process, so
    the result of each batch is the same. Each pass must read its loader to the end. With one rank it has no effect.

    The first call checks the result: every rank also evaluates all the data. If the merged result differs from this by more than
    floating-point noise, a warning is shown, and this and every later call evaluate all the data on every rank. The same holds for a
    function with side effects, such as a list it appends to, a metric it updates or a file it writes, because these would cover only a
    rank's part.

    Args:
        reduce: how the ranks' results are merged. Dicts, tuples and dataclasses are merged by entry; values other than numbers, tensors
            and arrays must be the same on all ranks.

            - ``"mean"``: weighted by the samples that each rank has read. Use it for a function that divides by the number of samples it
              has counted, or by ``len(loader.dataset)``, which is then the length of the rank's part. A mean of batch means, such as
              ``np.mean(losses)``, equals that of one process only if all batches have the same size.
            - ``"sum"``: for counts, and for sums divided by the length of all the data, such as ``len(loader.dataset)`` and
              ``len(loader)``, which then cover all the data.
            - ``"gather"``: tensors and arrays are concatenated along the first dimension and lists are joined, in the order of a single
              process. Lengths are those of the rank's part, as for ``"mean"``.
            - a function of the list of the ranks' results, in their order; on one rank, a list of one.
            - a dict or tuple of these, one for each entry of the result. If one of them is ``"sum"`` or a function, lengths cover all
              the data.
        check: compare the first result with that of all the data. Compare again if the parts were too similar to tell, and for datasets of
            another length. ``False`` divides the data unchecked.

    Raises:
        UsageError: ``reduce`` has another value, the function trains, or its results cannot be merged exactly.
        Exception: the function raised an error on some rank. All ranks raise the same error, so that all continue in the same way.

    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> @evaluate
    ... def mean(loader):
    ...     return sum(batch.sum().item() for batch in loader) / len(loader.dataset)
    >>> mean(DataLoader(torch.arange(5.0), batch_size=2))
    2.0
    """

    layer = 40

    def __init__(self, *, reduce: Any = "mean", check: bool = True) -> None:
        super().__init__()
        _check(reduce)
        self._reduce, self._checks = reduce, check

    def scope(self, function: Callable[..., Any] | None) -> AbstractContextManager[Any]:
        if function is None:
            raise UsageError("`with parwrap.evaluate():` has no result to merge: decorate the function that returns the result.")
        return nullcontext()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        trust = _Trust(self._checks)

        @functools.wraps(function)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            group = None if is_alone() or distributed.trains_apart() else callers("evaluate")
            if group is None or group.world.size == 1:
                return merged(self._reduce, [Part(function(*args, **kwargs), [])])
            try:
                return _evaluated(_Call(group, self._reduce, function, args, kwargs), trust)
            except _FailedError as failed:
                raise failed.error from failed.error.__cause__

        return evaluated


def _check(reduce: Any) -> None:
    for way in _ways(reduce):
        if not (callable(way) or (isinstance(way, str) and way in REDUCTIONS)):
            meanings = "; ".join(f"{value!r}: {meaning}" for value, meaning in REDUCTIONS.items())
            raise UsageError(
                f"reduce={way!r} is not a way to merge results. Choose one of: {meanings}; or pass a function that takes a list with the "
                "result of each rank."
            )


def _ways(reduce: Any) -> Iterator[Any]:
    """Each reduction that is in ``reduce``."""
    if isinstance(reduce, (Mapping, tuple, list)):
        for each in reduce.values() if isinstance(reduce, Mapping) else reduce:
            yield from _ways(each)
    else:
        yield reduce


_running: list[Evaluation] = []
"""The open evaluations, the innermost last."""


class _Report(NamedTuple):
    """What a rank sends to the other ranks at the end.

    Attributes:
        result: the result of the function.
        readings: its passes.
        readers: the number of ranks with a part.
        streams: the state of the shared random streams.
    """

    result: Any
    readings: list[Reading]
    readers: int
    streams: Any


class _Trust:
    """Whether the merged result of the ranks equals that of all the data, for one function.

    Attributes:
        whole: it does not, so every rank evaluates all the data.
        checks: whether to compare.
    """

    def __init__(self, checks: bool) -> None:
        self.whole, self.checks = False, checks
        self._left: dict[Any, int] = {}

    def asks(self, data: Any) -> bool:
        """Whether to compare the result for ``data``, judging by its lengths."""
        return self.checks and self._left.get(data, TRIES if len(self._left) < MOST_CHECKED else 0) > 0

    def agreed(self, data: Any, proves: bool) -> None:
        """Record that the results were equal; ``proves`` says whether they could have differed."""
        self._left[data] = 0 if proves else self._left.get(data, TRIES) - 1


TRIES = 3
"""The number of calls to check if the parts are so similar that any way to merge them would seem right."""
MOST_CHECKED = 16
"""The number of data lengths to check."""


class _FailedError(Exception):
    """Raised when the function failed on some rank.

    Args:
        error: the exception to raise on this rank.
        text: the error of the lowest failed rank, in one line.
        refused: whether it is one of parwrap's own.
    """

    def __init__(self, error: Exception, text: str, refused: bool) -> None:
        super().__init__(text)
        self.error, self.text, self.refused = error, text, refused


@dataclass
class _Call:
    """One call of a function, on all ranks.

    Attributes:
        group: the ranks.
        reduce: how their results are merged.
        function, args, kwargs: the call.
    """

    group: Group
    reduce: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.kind = f"parwrap.evaluate of {getattr(self.function, '__qualname__', self.function)}"
        self.known = distributed.parts()
        self.shared = self.known.loaders.streams.shared if self.known else nullcontext
        self.arguments = _arguments(self.function, self.args, self.kwargs)
        self.name = describe(inspect.unwrap(self.function))  # a decorator such as torch.no_grad has a separate place

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def together(self, mine: Any, error: Exception | None) -> list[Any]:
        """Each rank's ``mine``; if a rank passes an ``error`` instead, all ranks raise it."""
        self.group.synchronize(self.kind)
        gathered = gathered_objects("evaluate", (mine, None if error is None else _packed(error)), self.group)
        failed = next(((rank, each[1]) for rank, each in enumerate(gathered) if each[1] is not None), None)
        if failed is None:
            return [each[0] for each in gathered]
        rank, (packed, text, refused) = failed
        if error is None:
            error = RankMismatchError(f"rank {rank} failed with {text} in {self.name}, which all ranks evaluate together.")
            if packed is not None:
                cause, error = error, pickle.loads(packed)
                error.__cause__ = cause
        raise _FailedError(error, f"rank {rank} failed with {text}", refused)

    def data(self) -> Any:
        """The lengths of the evaluated datasets, as far as they can be found without running the function."""
        held = [each for value in self.arguments.values() for each in (value, *getattr(value, "__dict__", {}).values())]
        return tuple(len(each.dataset) for each in held if isinstance(each, DataLoader) and hasattr(each.dataset, "__len__"))


def _packed(error: Exception) -> tuple[bytes | None, str, bool]:
    """What other ranks need to know about an ``error``: the exception if it can be sent, its text, and whether it is parwrap's own."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        packed = None
    return packed, in_one_line(error), isinstance(error, ParwrapError)


def _evaluated(call: _Call, trust: _Trust) -> Any:
    if _running:
        if _running[-1].readings:
            raise UsageError(BOTH)
        _running[-1].within = True
    data = call.data()
    asks = not trust.whole and trust.asks(data)
    # a rank that has left an epoch sooner must not evaluate other weights
    call.group.synchronize(call.kind, detail=zlib.crc32(repr((trust.whole, asks, data)).encode()))
    if call.group.coordinator and not call.group.coordinator.alike:
        raise RankMismatchError(
            f"{call.name} evaluates datasets of different lengths on the ranks: {data} on rank {call.group.world.rank}. All ranks must "
            "evaluate the same data, of which each reads a part."
        )
    if call.known:
        _have_same_buffers(call.known.loop, call.arguments)
    if trust.whole:
        return _whole(call, Onlooker())[0]
    if not asks:
        return _shared(call, warns=not trust.checks)[0]
    with call.shared():
        before = get_state()
    onlooker = Onlooker()
    # evaluate all the data first: its output and other side effects are those of a single process
    try:
        whole, hindrance = _whole(call, onlooker)
    except _FailedError as failed:
        if not isinstance(failed.error, AloneError):
            raise
        trust.checks = False  # the object merges its numbers itself
        return _shared(call, warns=True)[0]
    with call.shared():
        after = get_state()
        if not onlooker.loaders and hindrance is None:
            _warn(NOTHING_READ.format(call.name))
            return whole
        if hindrance is None:
            set_state(before)
    if hindrance is None:
        onlooker.rewind()
        if call.known:
            for loader, _ in onlooker.loaders.values():
                if not is_stream(loader):
                    call.known.loaders.agree(loader)  # the warnings of the whole evaluation must be shown
        silent = Silent()
        try:
            shared, parts = _shared(call, silent)
        except _FailedError as failed:
            if failed.refused:
                raise
            hindrance = f"on parts of the data {failed.text}, but it does not fail on the whole data."
        else:
            differing, proves = compared(whole, shared, parts)
            if differing and callable(call.reduce) and leaves(whole).keys() != leaves(shared).keys():
                differing = []  # for example a list of the ranks' results
            if not differing:
                trust.agreed(data, proves)
                if onlooker.printed != silent.printed:
                    _warn(
                        f"{call.name} prints something different for a rank's part of the data than for all of it. From the next call "
                        "on, it prints the numbers of rank 0's part. Print its result instead."
                    )
                return shared
            hindrance = _differs(call.reduce, differing)
    trust.whole = True
    with call.shared():
        set_state(after)
    _warn(f"{call.name} cannot be split across ranks: {hindrance} Every rank evaluates everything, in this and later calls. {REMEDY}")
    return whole


NOTHING_READ = "{} did not read a DataLoader, so every rank computed all of it and returns its own result."

REMEDY = (
    'To divide the work, return the inputs of the metric, such as predictions and labels, with @parwrap.evaluate(reduce="gather"), and '
    "compute, keep and print the metric outside the function. To divide it without this check, pass check=False."
)


def _differs(reduce: Any, differing: list[tuple[str, Any, Any]]) -> str:
    named = "; ".join(f"result{place} is {_short(ours)}, but {_short(whole)} for all of the data" for place, ours, whole in differing[:3])
    way = f"reduce={reduce!r}" if isinstance(reduce, str) else "reduce"
    return (
        f"merged by {way}, {named}. This happens for a result that is not a mean over samples, such as AUC, F1, RMSE, perplexity, median "
        'or maximum; for a mean of batch means, where reduce="sum" with len(loader) is exact; and for random numbers, as in dropout.'
    )


def _whole(call: _Call, onlooker: Onlooker) -> tuple[Any, str | None]:
    """The result of all the data, which is rank 0's on every rank, and the reason not to divide the work, if any."""
    roots = reached(call.function, call.arguments)
    before = State(roots)
    result, error = None, None
    apart = call.known.strategy.apart() if call.known else nullcontext()
    looking = intercepting([onlooker], module_of(call.function))
    with call.shared(), apart, alone(each=True), looking, installed([modes_set_together()]):
        try:
            result = call.run()
        except Exception as raised:
            error = raised
    hindrance = None
    if error is None:
        changed = before.changed(State(reached(call.function, call.arguments)))
        if result is None and not callable(call.reduce):
            hindrance = "it returns nothing, so its output or side effects would cover only a rank's part."
        elif onlooker.written is not None:
            hindrance = f"it writes {onlooker.written}, which would contain only a rank's part."
        elif changed is not None:
            hindrance = f"it changes {changed}, which would contain only a rank's part."
    gathered = call.together((sent(result) if call.group.world.rank == 0 else None, hindrance, _streams(call)), error)
    _go_on(call, gathered[0][2])
    hindrance = gathered[0][1]  # the buffers of other ranks become rank 0's when they evaluate
    result = result if call.group.world.rank == 0 else arrived(gathered[0][0], call.group.device)
    return merged(call.reduce, [Part(result, [])]), hindrance


def _streams(call: _Call) -> Any:
    """The state of the shared streams on rank 0."""
    with call.shared():
        return get_state() if call.known and call.group.world.rank == 0 else None


def _go_on(call: _Call, streams: Any) -> None:
    if call.known:
        with call.shared():
            set_state(streams)


def _shared(call: _Call, silent: Silent | None = None, warns: bool = False) -> tuple[Any, list[Any]]:
    """The result merged from the ranks' parts, and the results of the parts.

    Args:
        call: the call of the function.
        silent: if given, nothing is printed.
        warns: whether to warn of inexact results, because they are not compared with those of the whole.
    """
    group, known, reduce, function = call.group, call.known, call.reduce, call.function
    ways = list(_ways(reduce))
    reports_parts = all(way in ("mean", "gather") for way in ways)
    lengths = Lengths(function, call.arguments, reports_parts) if reports_parts or "mean" in ways else None
    evaluation = Evaluation(group, call.shared, known.loaders.agree if known else lambda loader: None, lengths)
    apart = known.strategy.apart() if known else nullcontext()
    interceptors = [evaluation] if silent is None else [evaluation, silent]
    result, error = None, None
    with _innermost(evaluation, known), lengths or nullcontext(), apart, intercepting(interceptors, module_of(function)), _unseen(silent):
        try:
            result = call.run()
        except Exception as raised:
            error = raised
    mine = _Report(sent(result), [shared_facts(each) for each in evaluation.readings], evaluation.readers, _streams(call))
    gathered = call.together(mine, error)
    _go_on(call, gathered[0].streams)
    readings = check([each.readings for each in gathered])
    if not any(each.batches for each in readings[0]):
        if not evaluation.within and not evaluation.readings:
            _warn(NOTHING_READ.format(call.name))
        return merged(reduce, [Part(result, [])]), [result]
    parts = [
        Part(arrived(each.result, group.device), [Passed(of.sizes, of.in_turn, of.rows) for of in passes])
        for each, passes in zip(gathered[: evaluation.readers], readings, strict=False)
    ]
    if warns and lengths is not None and "mean" in ways and len(parts) > 1:
        lengths.warn([[passed.sizes for passed in of_all] for of_all in zip(*(part.passes for part in parts), strict=True)])
    return merged(reduce, parts), [part.result for part in parts]


@contextmanager
def _unseen(silent: Silent | None) -> Iterator[None]:
    """With ``silent``, output to stdout and stderr is dropped."""
    if silent is None:
        yield
        return
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def _have_same_buffers(loop: Loop, arguments: Mapping[str, Any]) -> None:
    """Copy rank 0's buffers into models in ``arguments`` that are in no optimizer, because each rank evaluates its part with them."""
    for each in arguments.values():
        if isinstance(each, nn.Module):
            loop.know(each)
    loop.looking()


@contextmanager
def _innermost(evaluation: Evaluation, known: Any) -> Iterator[None]:
    """Make ``evaluation`` divide what is read inside the block; outer evaluations do not."""
    around = _running[-1] if _running else None
    if around is not None:
        around.asleep = True
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


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call itself raises it, or has no signature
        return {}


def _warn(text: str) -> None:
    warn(f"parwrap: {text}")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else text[:57] + "..."
