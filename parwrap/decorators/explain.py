"""``@explain``: at the end, a table of what parwrap did at each line of the script, by which rule, and what would change it."""

from __future__ import annotations

import builtins
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parwrap.data.loaders import is_replicated
from parwrap.decorators.distributed import open_loop
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError, counted
from parwrap.intercept.intercepted_calls import Backward, Batches
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.patch import Patch, installed
from parwrap.intercept.torch_calls import SERIALIZATION, intercepting
from parwrap.intercept.warned import parwraps_warnings
from parwrap.loop.one_pass import Pass
from parwrap.loop.optimizers import parameters_of
from parwrap.places import Place, from_script, script_place
from parwrap.rank_zero.calls import Opening
from parwrap.ranks.group import rank, say, world_size
from parwrap.strategies.strategy import Loop

__all__ = ["explain"]


class explain(ScopeDecorator):
    """When the function or block ends, print a table of what parwrap did at each line of the script, on rank 0's stderr.

    Write ``@explain``, ``@explain(report="explained.json")`` or ``with explain():`` inside of ``distributed``; for a script, ``--explain``.
    There is a row for each line that reads a loader, runs a backward, steps an optimizer, calls ``torch.save``, opens a file to write, or
    prints, with the rule of the contract that decided and what would change it; then come the warnings. Without several ranks there is
    nothing to explain.

    Args:
        report: a file that gets the same as JSON: ``rows``, a list of objects, and ``warnings``.

    >>> with explain():
    ...     pass
    """

    layer = 100
    """The scope opens inside all other scopes, so that it sees what they do."""

    def __init__(self, *, report: str | os.PathLike[str] | None = None) -> None:
        if report is not None and not isinstance(report, (str, os.PathLike)):
            raise UsageError(f"report={report!r} is not the path of a file.")
        if report is not None and not os.path.isdir(os.path.dirname(report) or "."):
            raise UsageError(f"report={report!r} is in a folder that does not exist: make the folder first.")
        self._report = None if report is None else os.path.abspath(report)  # the script may change the directory

    @contextmanager
    def scope(self, call: Call) -> Iterator[None]:
        loop = open_loop()
        if loop is None:
            yield
            if world_size() == 1:
                say(
                    "one rank runs, so it reads, trains and writes as without parwrap, and there is nothing to explain: start several, as "
                    "with --nproc-per-node 2"
                )
            return
        watcher, module = _Watcher(loop), module_of(call.function)
        patches = [
            *(Patch(module, "save", watcher.save) for module in SERIALIZATION),
            Patch(builtins, "open", watcher.open),
            Patch(builtins, "print", watcher.print),
        ]
        try:
            with intercepting([watcher], module), installed(patches, module), parwraps_warnings() as watcher.warnings:
                yield
        finally:
            if rank() == 0:
                rows = watcher.rows()
                _show(rows, watcher.warnings)
                if self._report is not None:
                    with open(self._report, "w") as target:
                        json.dump({"rows": rows, "warnings": watcher.warnings}, target, indent=1)


HEAD = {"place": "line", "call": "call", "what": "what parwrap did", "rule": "by rule", "change": "what changes it"}
"""The columns of the table, by their keys in a row."""


def _show(rows: list[dict[str, Any]], said: list[str]) -> None:
    """Print the rows and warnings to stderr: on a terminal as a table of rich, if that is installed, so that long cells wrap."""
    notes = "".join(f"warning: {each}\n" for each in said)
    if sys.stderr.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title="parwrap explains", title_justify="left")
        for title in HEAD.values():
            table.add_column(title, overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[name]) for name in HEAD))
        Console(stderr=True).print(table, Text(notes), sep="", end="")
        return
    lines = [HEAD, *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in HEAD}
    text = ["  ".join(line[name].ljust(widths[name]) for name in HEAD).rstrip() for line in lines]
    plain = "\n".join(["parwrap explains:", *text, notes])
    print(plain, end="", file=sys.stderr)


@dataclass
class _Row:
    """What happens at a line.

    Attributes:
        place: the line.
        call: what it calls.
        times: how often it has done so.
        what: what parwrap did.
        rule: the rule of the contract that decided, and why.
        change: what would change it.
    """

    place: Place
    call: str
    times: int = 0
    what: str = ""
    rule: str = ""
    change: str = ""


@dataclass
class _Read(_Row):
    """A line that reads a loader: its last pass, and the name of its sampler."""

    last: Pass | None = None
    sampler: str = ""


@dataclass
class _Averaged(_Row):
    """A line that runs a backward.

    Attributes:
        begin, end: when its first backward began and its last one ended, in seconds of ``time.perf_counter``.
        waited: how long its backwards have waited for averages, in seconds.
        size: the number of parameters with gradients, and the megabytes of these.
    """

    begin: float = 0.0
    end: float = 0.0
    waited: float = 0.0
    size: tuple[int, float] = (0, 0.0)


class _Begun(Batches):
    """Calls ``watcher`` after each batch: a pass begins when its first batch is drawn."""

    def __init__(self, batches: Iterator, watcher: _Watcher, row: _Read, loader: DataLoader) -> None:
        super().__init__(batches)
        self._watcher, self._row, self._loader = watcher, row, loader

    def __next__(self) -> Any:
        batch = super().__next__()
        self._watcher.note_pass(self._row, self._loader)
        return batch


class _Watcher(Interceptor):
    """Notes what happens at each line."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._rows: dict[tuple[Place, str], Any] = {}
        self.warnings: list[str] = []

    def _row(self, call: str, kind: type[_Row] = _Row) -> Any:
        place = script_place()
        row = self._rows.setdefault((place, call), kind(place, call))
        row.times += 1
        return row

    # loaders

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        row = self._row("DataLoader", _Read)
        row.sampler = type(loader.batch_sampler if loader.sampler is None else loader.sampler).__name__
        return _Begun(original(loader), self, row, loader)

    def note_pass(self, row: _Read, loader: DataLoader) -> None:
        """Explain in ``row`` the open pass over ``loader``."""
        if (opened := self._loop.passes.innermost) is not None and row.last is not opened:
            row.last = opened
            self._explain_pass(row, loader, opened)

    def _explain_pass(self, row: _Read, loader: DataLoader, opened: Pass) -> None:
        if opened.shared:
            row.rule = "2, 4: parwrap.shard" if opened.sharded else "2, 4: trains"
            row.change = "replicate(loader)"
        elif is_replicated(loader):
            row.rule, row.change = "2: parwrap.replicate", "shard(loader)"
        else:
            row.rule, row.change = f"2: {opened.why_whole}", "@evaluate shares it, exactly"

    # training

    def backward(self, call: Backward) -> None:
        row = self._row("backward", _Averaged)
        row.begin, waited = row.begin or time.perf_counter(), self._loop.passes.clock.averages
        call.run()
        row.end = time.perf_counter()
        row.waited += self._loop.passes.clock.averages - waited
        strategy = self._loop.options().strategy
        row.rule = f"5, strategy={strategy!r}" if strategy != "ddp" else "5"
        row.change = "no_sync(), @accumulate"
        if not row.size[0]:
            parameters = [p for optimizer in self._loop.optimizers.all() for p in parameters_of(optimizer) if p.grad is not None]
            row.size = len(parameters), sum(p.grad.nbytes for p in parameters if p.grad is not None) / 1e6

    def stepped(self, optimizer: Optimizer) -> None:
        row = self._row(f"{type(optimizer).__name__}.step")
        row.what, row.rule = "the same step on all ranks", "1"

    # files and output

    def save(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        row = self._row("torch.save")
        with suppress(TypeError):
            row.what = f"rank 0 writes {os.path.basename(os.fsdecode(kwargs.get('f', args[1] if len(args) > 1 else '')))}"
        row.what, row.rule, row.change = row.what or "rank 0 writes", "8", "every_rank_writes()"
        return wrapped(*args, **kwargs)

    def open(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        call = Opening(wrapped, *args, **kwargs)
        if call.writes and isinstance(call.file, (str, os.PathLike)) and from_script(sys._getframe(1)):
            row = self._row("open")
            row.what, row.rule, row.change = f"rank 0 writes {os.path.basename(os.fspath(call.file))}", "8", "every_rank_writes()"
        return call.run()

    def print(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        if from_script(sys._getframe(1)):
            row = self._row("print")
            row.what, row.rule, row.change = "rank 0 speaks", "8", "--all-ranks"
        return wrapped(*args, **kwargs)

    # the table

    def _told(self, row: Any) -> str:
        ranks = self._loop.group.world.size
        if isinstance(row, _Read):
            if row.last is None:
                return f"{counted(row.times, 'pass')} without a batch"
            of = "" if row.last.whole is None else f" of {row.last.whole}"
            share = f"each of {ranks} ranks {row.last.samples}{of} samples" if row.last.shared else "all samples on every rank"
            return f"{share}, {row.sampler}, {row.times} passes" if row.times > 1 else f"{share}, {row.sampler}"
        if isinstance(row, _Averaged):
            averaged = self._loop.options().strategy in ("ddp", "zero1", "fsdp")
            verb = "averaged" if averaged else "this rank's gradients of"
            waited = row.waited / (row.end - row.begin) if row.end > row.begin and self._loop.group.device.type == "cpu" else None
            waits = f", {waited:.0%} of the time waiting for averages" if waited is not None and row.times > 1 else ""
            return f"{verb} {counted(row.size[0], 'parameter')}, {row.size[1]:.2g} MB, {row.times} times{waits}"
        return f"{row.what}, {row.times} times" if row.times > 1 else row.what

    def rows(self) -> list[dict[str, Any]]:
        """The rows, in the order of the script's lines."""
        found = sorted(self._rows.values(), key=lambda row: row.place)
        return [
            {"place": str(row.place), "call": row.call, "times": row.times, "what": self._told(row), "rule": row.rule, "change": row.change}
            for row in found
        ]
