"""``@evaluate``: the ranks of a plain ``evaluate(model, loader)`` together read each sample once, and return what one process would.

``data/evaluation_shares.py`` divides the data. ``data/merging.py`` merges the ranks' results, and compares with the result of all the data.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from parwrap.data.evaluation_shares import Evaluation, check, reads_and_calls
from parwrap.data.merging import REDUCTIONS, Part, compared, merged
from parwrap.decorators.distributed import evaluating, trains_apart
from parwrap.decorators.inventory import named
from parwrap.decorators.scope import Call, ScopeDecorator, describe, module_of, refuse_unrun, undecorated
from parwrap.errors import ParwrapError, RankMismatchError, UsageError, in_one_line, shortened
from parwrap.inline.remote_exception import can_pickle
from parwrap.inline.returned import attributes_of, is_of_script
from parwrap.intercept.patch import Patch, installed
from parwrap.intercept.torch_calls import SERIALIZATION, intercepting
from parwrap.loop.random_streams import get_states, set_states
from parwrap.places import warn
from parwrap.rank_zero.calls import Opening
from parwrap.ranks.agreement import agree_on, first_other
from parwrap.ranks.collectives import gathered, group_for
from parwrap.ranks.environment import attribute
from parwrap.ranks.group import Group, is_alone
from parwrap.ranks.structures import leaves
from parwrap.rows.tensors import whole_is_open
from parwrap.torch_private.modules import registered_buffers
from parwrap.torch_private.tensors import version_of

__all__ = ["evaluate"]

TRIES = 3
"""The number of calls to compare if the parts are so similar that any way to merge them would seem right."""

MOST_CHECKED = 16
"""For at most this many different lengths of datasets, a function's results are compared."""


class evaluate(ScopeDecorator):
    """Make each rank read a part of the loaders of an evaluation, and return on every rank what a single process would.

    Write ``@evaluate(reduce="sum")`` on a function or method that all ranks call together, inside ``distributed``. Each sample counts once,
    even if a loader has fewer batches than there are ranks. Batches are those of a single process, and so are the lengths of loaders and
    datasets. Each pass must read its loader to the end. With one rank and with ``strategy="none"`` nothing is divided.

    The first call also evaluates all the data on every rank, and compares the results. If the merged result differs by more than
    floating-point noise, one warning says so, and every rank evaluates everything, in this and later calls. The same holds for a function
    with side effects, such as a list it appends to, a metric it updates or a file it writes: these would cover only a rank's part.

    Args:
        reduce: how the ranks' results are merged. Dicts, tuples and dataclasses are merged by entry; values other than numbers, tensors
            and arrays must be the same on all ranks.

            - ``"mean"``: weighted by the samples that each rank has read, for a function that divides by the samples it has counted. A mean
              of batch means, such as ``np.mean(losses)``, equals that of one process only if all batches have the same size.
            - ``"sum"``: for counts, and for sums divided by the length of all the data: ``len(loader.dataset)`` or ``len(loader)``.
            - ``"gather"``: tensors and arrays are concatenated along the first dimension and lists are joined, in the order of a single
              process.
            - a function that gets a list of the ranks' results, in the order of ranks, and returns the merged one. On one rank, the list
              has one entry.
            - a dict or tuple of these, one for each entry of the result.
        check: whether to compare the result with that of all the data, in the first call and in the first one with datasets of another
            length, up to 16 lengths. If the ranks' parts gave results so alike that a wrong ``reduce`` would not show, up to two more
            calls are compared. ``False`` divides the data unchecked.

    Raises:
        UsageError: ``reduce`` is missing or has another value. In a call: the function trains or does not read a loader to its end, or its
            results cannot be merged.
        RankMismatchError: ranks evaluate different data; or the function failed on another rank, with an exception that cannot be sent. One
            that can be sent is raised on all ranks.

    >>> import torch
    >>> from torch.utils.data import DataLoader
    >>> @evaluate(reduce="sum")
    ... def mean(loader):
    ...     return sum(batch.sum().item() for batch in loader) / len(loader.dataset)
    >>> mean(DataLoader(torch.arange(5.0), batch_size=2))
    2.0
    """

    def __init__(self, *, reduce: Any = None, check: bool = True) -> None:
        _check(reduce)
        self._reduce, self._checks = reduce, check

    def scope(self, call: Call) -> Any:
        raise UsageError("`with parwrap.evaluate():` has no result to merge: decorate the function that returns the result.")

    def wrapped(self, function: Any) -> Any:
        """The decorated function, inside the scopes of its other decorators, in whichever order they are written."""
        plain, scopes = undecorated(function)
        evaluated = self._on_ranks(plain)
        for each in scopes:
            evaluated = each.wrapped(evaluated)
        return evaluated

    def _on_ranks(self, function: Any) -> Any:
        trust = _Trust(self._checks)

        @functools.wraps(function)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            group = None if is_alone() or trains_apart() or whole_is_open() is not None else group_for("evaluate")
            if group is None or group.world.size == 1:
                return merged(self._reduce, [Part(function(*args, **kwargs), [])])
            try:
                return _on_all_ranks(_JointCall(group, self._reduce, function, args, kwargs), trust)
            except _FailedError as failed:
                raise failed.error from failed.error.__cause__

        return evaluated


def _check(reduce: Any) -> None:
    meanings = "; ".join(f"{value!r}: {meaning}" for value, meaning in REDUCTIONS.items())
    choices = f"Choose one of: {meanings}; or pass a function that takes a list with the result of each rank."
    if reduce is None:
        raise UsageError(
            f"@parwrap.evaluate does not say how the ranks' results are merged: write @parwrap.evaluate(reduce=...). {choices}"
        )
    for way in _ways(reduce):
        if not (callable(way) or (isinstance(way, str) and way in REDUCTIONS)):
            raise UsageError(f"reduce={way!r} is not a way to merge results. {choices}")


def _ways(reduce: Any) -> Iterator[Any]:
    """Each reduction that is in ``reduce``."""
    if isinstance(reduce, (Mapping, tuple, list)):
        for each in reduce.values() if isinstance(reduce, Mapping) else reduce:
            yield from _ways(each)
    else:
        yield reduce


class _Trust:
    """What is known of one function: whether the merged result of the ranks equals that of all the data.

    Attributes:
        whole: whether the results differed, so that every rank evaluates all the data.
        checks: the option ``check`` of the decorator.
    """

    def __init__(self, checks: bool) -> None:
        self.whole, self.checks = False, checks
        self._left: dict[Any, int] = {}

    def asks(self, lengths: tuple[int, ...]) -> bool:
        """Whether to compare the result for data of these ``lengths``."""
        return self.checks and not self.whole and self._left.get(lengths, TRIES if len(self._left) < MOST_CHECKED else 0) > 0

    def agreed(self, lengths: tuple[int, ...], proves: bool) -> None:
        """Note that the results were equal; ``proves`` says whether the parts differed enough to show a wrong merge."""
        self._left[lengths] = 0 if proves else self._left.get(lengths, TRIES) - 1


@dataclass
class _JointCall:
    """One call of a function, on all ranks.

    Attributes:
        group: the ranks.
        reduce: how their results are merged.
        function, args, kwargs: the call.
        name: the name of the function, with its file and line.
        arguments: the arguments by their names.
    """

    group: Group
    reduce: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.name = describe(self.function)
        try:
            self.arguments = dict(inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):  # the call itself raises it, or has no signature
            self.arguments = {}

    def lengths(self) -> tuple[int, ...]:
        """The lengths of the datasets, as far as they can be found without running the function."""
        held = [each for value in self.arguments.values() for each in (value, *getattr(value, "__dict__", {}).values())]
        return tuple(len(each.dataset) for each in held if isinstance(each, DataLoader) and hasattr(each.dataset, "__len__"))

    def together(self, mine: Any, error: Exception | None) -> list[Any]:
        """Gather ``mine`` of every rank, in the order of ranks; ``error`` is what the function has raised on this rank, if anything.

        Raises:
            _FailedError: on all ranks, if one of them passes an ``error``.
        """
        everyones = gathered(
            (mine, None if error is None else in_one_line(error), error if can_pickle(error) else None), group_for("gather")
        )
        failed = next(((rank, text, sent) for rank, (_, text, sent) in enumerate(everyones) if text is not None), None)
        if failed is None:
            return [each for each, _, _ in everyones]
        rank, text, sent = failed
        if error is None:
            error = RankMismatchError(f"rank {rank} failed with {text} in {self.name}, which all ranks run together. Fix this error.")
            if sent is not None:  # a script that catches the error stays in lockstep
                sent.__cause__, error = error, sent
        raise _FailedError(error, f"rank {rank} failed with {text}")

    def run(self, evaluation: Evaluation) -> Any:
        """Run the function, with ``evaluation`` as the innermost interceptor, and return its result."""
        around = _running[-1] if _running else None
        _running.append(evaluation)
        try:
            with attribute(around, "asleep", True) if around else nullcontext(), intercepting([evaluation], module_of(self.function)):
                return self.function(*self.args, **self.kwargs)
        finally:
            _running.pop()


class _FailedError(Exception):
    """The function failed on some rank.

    Args:
        error: what to raise on this rank.
        text: the error of the lowest failed rank, in one line.
    """

    def __init__(self, error: Exception, text: str) -> None:
        super().__init__(text)
        self.error, self.text = error, text


_running: list[Evaluation] = []
"""The open evaluations, the innermost last."""


def _on_all_ranks(call: _JointCall, trust: _Trust) -> Any:
    if _running:
        if _running[-1].readings:
            raise reads_and_calls()
        _running[-1].within = True
    lengths = call.lengths()
    asks = trust.asks(lengths)
    facts = trust.whole, asks, lengths
    agree_on(call.group, f"parwrap.evaluate of {call.name}", facts, lambda all_ranks: _differ(call, all_ranks))
    if trust.whole:
        result, error, _ = _whole(call)
        if error is not None:
            raise error
        return result
    if not asks:
        return _divided(call)[0]
    return _compared(call, trust, lengths)


def _differ(call: _JointCall, all_ranks: list[Any]) -> RankMismatchError:
    rank, theirs = first_other(all_ranks)
    return RankMismatchError(
        f"{call.name} evaluates datasets of lengths {all_ranks[0][2]} on rank 0 and {theirs[2]} on rank {rank}. Build the same "
        "datasets on every rank: each rank reads a part of them."
    )


def _whole(call: _JointCall, reads: Callable[[DataLoader], None] = lambda loader: None) -> tuple[Any, Exception | None, Evaluation]:
    """Run the call on all the data, on every rank.

    Args:
        call: the call.
        reads: called with each loader before it is read.

    Returns:
        The result, the exception that the call has raised or ``None``, and the evaluation.
    """
    world = call.group.world
    with evaluating(divides=False) as begins:

        def begins_pass(loader: DataLoader) -> None:
            begins(loader)
            reads(loader)

        evaluation = Evaluation(world.rank, world.size, begins_pass, divides=False)
        return *_attempt(call, evaluation), evaluation


def _attempt(call: _JointCall, evaluation: Evaluation) -> tuple[Any, Exception | None]:
    """The result of ``call`` and ``None``, or ``None`` and the exception. An error of parwrap is not returned but raised."""
    try:
        result = call.run(evaluation)
        refuse_unrun(call.function, result)
        if inspect.isgenerator(result):
            raise UsageError(f"{call.name} returns a generator, which ranks cannot send to each other: return list(...) of it.")
        return result, None
    except ParwrapError:
        raise
    except Exception as error:
        return None, error


def _divided(call: _JointCall, states: Any = None) -> tuple[Any, list[Part]]:
    """Run the call on this rank's part of the data. Returns the merged result of all parts, and the parts in their order.

    Args:
        call: the call.
        states: the random states to begin with; ``None`` for the current ones.
    """
    world = call.group.world
    with evaluating(divides=True) as begins:
        if states is not None:
            set_states(states)
        evaluation = Evaluation(world.rank, world.size, begins)
        with warnings.catch_warnings():  # a metric of a rank that stands in has no data
            warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric .* was called before the ``update``")
            result, error = _attempt(call, evaluation)
        mine = result, evaluation.readings, evaluation.readers, get_states() if world.rank == 0 else None
        gathered = call.together(mine, error)
        set_states(gathered[0][3])  # what ranks draw in an evaluation differs between them
    readings = check([each[1] for each in gathered])
    if not any(each.batches for each in readings[0]):
        if not evaluation.within and not evaluation.readings:
            warn(NOTHING_READ.format(call.name))
        return merged(call.reduce, [Part(result, [])]), [Part(result, [])]
    parts = [Part(each[0], passes) for each, passes in zip(gathered[: evaluation.readers], readings, strict=False)]
    return merged(call.reduce, parts), parts


NOTHING_READ = (
    "parwrap: {} did not read a DataLoader, so every rank computed all of it and returns its own result. Read a DataLoader inside the "
    "function, or remove @parwrap.evaluate."
)

OTHERS = {"mean": ("sum", "lengths are those of all the data"), "sum": ("mean", "it is divided by the samples or batches of a part")}
"""For each reduction, the one that may be right instead, and the reason."""

REMEDY = (
    'To divide the work, return the inputs of the metric, such as predictions and labels, with @parwrap.evaluate(reduce="gather"), and '
    "compute, keep and print the metric outside the function. To divide the work without this check, pass check=False."
)


# the first call


def _compared(call: _JointCall, trust: _Trust, lengths: tuple[int, ...]) -> Any:
    """Evaluate all the data, then the parts, and compare the results.

    Only the output of the first evaluation is shown. It comes first so that its side effects are those of a single process.
    """
    with evaluating(divides=False):
        states = get_states()
    effects, samplers = _Effects(call), _Samplers()
    with effects.noted():
        whole, error, evaluation = _whole(call, samplers.note)
    with evaluating(divides=False):
        after = get_states()
    found = call.together(effects.found(whole), error)
    hindrance = next((each for each in found if each is not None), None)
    if hindrance is None and not evaluation.readings and not evaluation.within:
        warn(NOTHING_READ.format(call.name))
        return whole
    if hindrance is None:
        samplers.rewind()
        try:
            with effects.silenced():
                shared, parts = _divided(call, states)
        except _FailedError as failed:
            hindrance = f"on parts of the data {failed.text}, but it does not fail on the whole data."
        else:
            differing, proves = compared(whole, shared, [part.result for part in parts])
            if callable(call.reduce) and leaves(whole).keys() != leaves(shared).keys():
                differing = []  # for example a list of the ranks' results
            if not differing:
                trust.agreed(lengths, proves)
                if effects.prints_other():
                    warn(
                        f"parwrap: {call.name} prints something different for a rank's part of the data than for all of it. From the next "
                        "call on, it prints the numbers of rank 0's part. Print the result outside of the function instead."
                    )
                return shared
            hindrance = _not_equal(call, differing, whole, parts)
    trust.whole = True
    with evaluating(divides=False):
        set_states(after)
    warn(
        f"parwrap: {call.name} cannot be split across ranks: {hindrance} Every rank evaluates everything, in this and later calls. {REMEDY}"
    )
    return whole


def _not_equal(call: _JointCall, differing: list[tuple[str, Any, Any]], whole: Any, parts: list[Part]) -> str:
    """Words for what differs, and for the ``reduce`` that would be right, if there is one."""
    shared, of_all = _where_they_differ(*(" ".join(repr(each).split()) for each in differing[0][1:]))
    text = f"the result{differing[0][0]} is {shared} when merged by reduce={call.reduce!r}, but {of_all} for all of the data."
    if not isinstance(call.reduce, str) or call.reduce not in OTHERS:
        return text
    name, why = OTHERS[call.reduce]
    with suppress(UsageError):
        if not compared(whole, merged(name, parts), [part.result for part in parts]).differing:
            return f'{text} It is right with reduce="{name}": {why}.'
    return f"{text} It is not a {call.reduce} over parts, or it depends on random numbers, as with dropout."


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Two texts that differ, shortened to where they do."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = same - 20 if same > 50 else 0
    dots = "..." if begin else ""
    return dots + shortened(one[begin:], 60), dots + shortened(other[begin:], 60)


class _Effects:
    """What a call leaves behind besides its result.

    Args:
        call: the call.
    """

    def __init__(self, call: _JointCall) -> None:
        self._call = call
        self._before = _state(call)
        self._written: str | None = None
        self._printed, self._printed_by_part = io.StringIO(), io.StringIO()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the files that the block writes, and what it prints."""

        def opens(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            call = Opening(wrapped, *args, **kwargs)
            if call.writes:
                self._wrote(call.file)
            return call.run()

        def saves(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            self._wrote(args[1] if len(args) > 1 else kwargs.get("f"))
            return wrapped(*args, **kwargs)

        patches = [Patch(builtins, "open", opens), *(Patch(module, "save", saves) for module in SERIALIZATION)]
        with installed(patches, module_of(self._call.function)), redirect_stdout(_Tee(sys.stdout, self._printed)):
            yield

    def _wrote(self, file: Any) -> None:
        if isinstance(file, (str, os.PathLike)):
            path = os.path.abspath(os.fspath(file))
            if not path.startswith(("/dev/", os.path.join(tempfile.gettempdir(), "pymp-"))):
                self._written = self._written or path

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside the block, nothing that Python prints is shown; what goes to stdout is kept for :meth:`prints_other`."""
        with redirect_stdout(self._printed_by_part), redirect_stderr(io.StringIO()):
            yield

    def prints_other(self) -> bool:
        """Whether the call on a part has printed another text than the call on all the data."""
        return self._printed.getvalue() != self._printed_by_part.getvalue()

    def found(self, result: Any) -> str | None:
        """A sentence on the first side effect of the call: a file written, an object changed, or no result. ``None`` if there is none."""
        if self._written is not None:
            return f"it writes {self._written}, which would contain only a rank's part."
        if (place := _changed(self._before, _state(self._call))) is not None:
            return f"it changes {place}, which would contain only a rank's part."
        if result is None:
            return "it returns nothing, so its output or side effects would cover only a rank's part."
        return None


class _Tee(io.TextIOBase):
    """Writes to two streams."""

    def __init__(self, stream: Any, copy: Any) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Samplers:
    """The states of the samplers of the loaders that a call reads, so that the next call draws the same samples."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}

    def note(self, loader: DataLoader) -> None:
        """Note the states of the samplers of ``loader``, which is about to be read."""
        samplers = [loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
        held = (value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values())
        for each in (loader.generator, *held):
            if isinstance(each, torch.Generator):
                self._states.setdefault(id(each), (each, each.get_state()))
        for each in samplers:
            if hasattr(each, "__dict__"):
                self._states.setdefault(id(each), (each, dict(vars(each))))

    def rewind(self) -> None:
        """Restore the states that were noted."""
        for each, state in self._states.values():
            if isinstance(each, torch.Generator):
                each.set_state(state)
            else:
                vars(each).update(state)


# side effects, one level deep

PASSED_OVER = (DataLoader, Dataset, Sampler, torch.optim.Optimizer, nn.Parameter, type)
"""Data, code and weights: an evaluation does not change these, so they are not searched for side effects."""

MOST = 1 << 20
"""Only this many entries of a list, tuple or dict are compared."""

LARGEST = 1 << 20
"""The values of an array with more bytes are not compared."""


def _state(call: _JointCall) -> dict[str, Any]:
    """What a call can change, by the expression that reaches it, such as ``self.history``; each in a form that shows a change.

    These are the values that its code names, and their members. Lists, dicts, modules and objects of the script among the members are
    searched one level deeper.
    """
    found: dict[str, Any] = {}
    for name, value in named(Call(call.function, call.args, call.kwargs)).items():
        for place, each in ((name, value), *_members(name, value)):
            goes_on = isinstance(each, (list, dict, nn.Module)) or is_of_script(type(each))
            for inner_place, inner in ((place, each), *(_members(place, each) if goes_on else ())):
                found[inner_place] = _content(inner)
    return found


def _members(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, PASSED_OVER) or inspect.ismodule(value) or (callable(value) and not hasattr(value, "__dict__")):
        return
    if isinstance(value, dict):
        yield from ((f"{place}[{key!r}]", each) for key, each in list(value.items())[:MOST])
    elif isinstance(value, (list, tuple)):
        yield from ((f"{place}[{at}]", each) for at, each in enumerate(value[:MOST]))
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            inside = f"{place}.{path}" if path else place
            yield from ((f"{inside}.{name}", each) for name, each in registered_buffers(module).items())
            names = (name for name in vars(module) if not name.startswith("_") and name != "training")
            yield from ((f"{inside}.{name}", vars(module)[name]) for name in names)
    elif not isinstance(value, (torch.Tensor, np.ndarray)) and not inspect.isroutine(value):
        yield from ((f"{place}.{name}", each) for name, each in attributes_of(value).items())


def _content(value: Any) -> Any:
    """What is compared to see whether ``value`` has changed: its identity, and a version, checksum, length or text where there is one."""
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else version_of(value)
    if isinstance(value, np.ndarray):
        return id(value), crc32(value.tobytes()) if value.nbytes <= LARGEST and not value.dtype.hasobject else None
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return repr(value)
    return (id(value), len(value)) if isinstance(value, (list, dict, set)) else id(value)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """The first place that differs; ``None`` if there is none. A new private attribute does not count, because it is a cache."""
    for place, content in after.items():
        is_cache = place not in before and place.rpartition(".")[2].startswith("_")
        if content != before.get(place) and not is_cache:
            return place
    return next((place for place in before if place not in after), None)
