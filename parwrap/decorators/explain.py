"""``@explain``: at the end, a table of what parwrap did at each line of the script, by which rule, and what would change it."""

from __future__ import annotations

import builtins
import io
import json
import linecache
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parwrap.data.loaders import is_replicated
from parwrap.data.loops import GRADIENTS_OFF
from parwrap.decorators.added_up import added_up, imported_classes
from parwrap.decorators.distributed import open_loop
from parwrap.decorators.explained_page import Note, page
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError, counted
from parwrap.intercept.intercepted_calls import Backward, Batches
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.patch import Patch, caller, installed
from parwrap.intercept.torch_calls import SERIALIZATION, intercepting
from parwrap.intercept.warned import Warned, parwraps_warnings
from parwrap.loop.losses import reached
from parwrap.loop.one_pass import Pass
from parwrap.loop.optimizers import parameters_of
from parwrap.places import Line, Place, call_stack, from_script, script_place
from parwrap.rank_zero.calls import Opening
from parwrap.ranks.group import rank, say, world_size
from parwrap.rows.tensors import whole_is_open
from parwrap.strategies.strategy import Loop
from parwrap.torch_private.tensors import sparse_values, version_of

__all__ = ["explain"]


class explain(ScopeDecorator):
    """When the function or block ends, print a table of what parwrap did at each line of the script, on rank 0's stderr.

    Write ``@explain``, ``@explain(report="explained.json")`` or ``with explain():`` inside of ``distributed``; for a script, ``--explain``.
    There is a row for each loop over a loader and kind of pass, and for each line that runs a backward, steps an optimizer, calls
    ``torch.save``, opens a file to write, or prints, with the rule of the contract that decided and what would change it. Then come names
    that a training loop adds up and the script uses after it, and the warnings. Without several ranks there is nothing to explain.

    Args:
        report: a file that gets the same as JSON: ``rows`` and ``added_up``, lists of objects, and ``warnings``.
        html: a file that gets a page: the script with a margin that says what each line did.

    >>> with explain():
    ...     pass
    """

    layer = 100
    """The scope opens inside all other scopes, so that it sees what they do."""

    def __init__(self, *, report: str | os.PathLike[str] | None = None, html: str | os.PathLike[str] | None = None) -> None:
        for name, file in (("report", report), ("html", html)):
            if file is not None and not isinstance(file, (str, os.PathLike)):
                raise UsageError(f"{name}={file!r} is not the path of a file.")
            if file is not None and not os.path.isdir(os.path.dirname(file) or "."):
                raise UsageError(f"{name}={file!r} is in a folder that does not exist: make the folder first.")
        self._report = None if report is None else os.path.abspath(report)  # the script may change the directory
        self._html = None if html is None else os.path.abspath(html)

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
                found, added = watcher.rows(), watcher.added_up()
                rows = [watcher.told(row) for row in found]
                sums = [{"place": str(place), "name": name} for place, name in added]
                said = [each.text for each in watcher.warnings]
                _show(rows, sums, said)
                if self._report is not None:
                    with open(self._report, "w") as target:
                        json.dump({"rows": rows, "added_up": sums, "warnings": said}, target, indent=1)
                if self._html is not None:
                    main = str(getattr(sys.modules["__main__"], "__file__", ""))
                    with open(self._html, "w", encoding="utf-8", errors="replace") as target:
                        target.write(page(_notes(found, rows, added, watcher.warnings), main, loop.group.world.size))


HEAD = {"place": "line", "call": "call", "what": "what parwrap did", "rule": "by rule", "change": "what changes it"}
"""The columns of the table, by their keys in a row."""


ADDED_UP = (
    "added up in a training loop and used after it: each rank has the sum over its own samples (rule 7). "
    "`parwrap.total(..., of=loader)` adds up over all ranks"
)


def _show(rows: list[dict[str, Any]], sums: list[dict[str, str]], said: list[str]) -> None:
    """Print all to stderr: the rows on a terminal as a table of rich, if that is installed, so that long cells wrap."""
    notes = "".join([f"{ADDED_UP}:\n"] * bool(sums) + [f"  {each['place']}  {each['name']}\n" for each in sums])
    notes += "".join(f"warning: {each}\n" for each in said)
    if (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")) and find_spec("rich"):
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


KIND_OF_RULE = {"2, 4": "share", "2": "whole", "5": "average"}
"""The kind of a note on the page, by the rule that has decided."""


def _notes(found: list[_Row], rows: list[dict[str, Any]], added: list[tuple[Place, str]], warned: list[Warned]) -> list[Note]:
    """What the margin of the page says."""
    notes = [
        Note(
            row.place,
            KIND_OF_RULE.get(re.split("[:,] ?[a-z]", told["rule"])[0], "other"),
            told["call"],
            told["what"],
            f"rule {told['rule']}"
            + (f"; what changes it: {told['change']}" if told["change"] else "")
            + (f"; {told['seconds']:.3g} s on rank 0" if told["seconds"] else ""),
            row.printed,
        )
        for row, told in zip(found, rows, strict=True)
    ]
    notes += [Note(place, "warning", f"adds up {name}:", *ADDED_UP.split(": ")[1].split(". ")) for place, name in added]
    return notes + [Note(each.place, "warning", "warning:", each.text) for each in warned]


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
        printed: the last that it has printed.
        seconds: how long this rank has spent there, in backwards, in ``next`` or in saves; 0 for other calls.
    """

    place: Place
    call: str
    times: int = 0
    what: str = ""
    rule: str = ""
    change: str = ""
    printed: str = ""
    seconds: float = 0.0


@dataclass
class _Read(_Row):
    """A loop over a loader, and one kind of its passes.

    Attributes:
        last: its last passes, the newest last: those that were open when this one began, as where loaders are zipped. Empty for passes
            without a batch.
        sampler: the name of its sampler.
        whys: why its passes were of this kind, in the order of the passes.
        earlier: the number of batches of passes before these.
        trained: whether an optimizer has stepped in one of these.
    """

    last: list[Pass] = field(default_factory=list)
    sampler: str = ""
    whys: dict[str, None] = field(default_factory=dict)
    earlier: int = 0
    trained: bool = False

    @property
    def batches(self) -> int:
        """The number of batches of all its passes."""
        return self.earlier + sum(each.drawn for each in self.last)

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer has stepped in one of its passes."""
        return self.trained or any(each.trained for each in self.last)

    def begins(self, opened: Pass, still_open: list[Pass]) -> None:
        """Note that the pass ``opened`` begins, while those in ``still_open`` are read."""
        ended = [each for each in self.last if each not in still_open]
        self.earlier += sum(each.drawn for each in ended)
        self.trained = self.trained or any(each.trained for each in ended)
        self.last = [each for each in self.last if each not in ended] + [opened]


@dataclass
class _Averaged(_Row):
    """A line that runs a backward.

    Attributes:
        begin, end: when its first backward began and its last one ended, by ``time.perf_counter``.
        waited: how long its backwards have waited for averages, in seconds.
        size: the number of parameters whose gradients its first backward has changed, and the megabytes of these.
    """

    begin: float = 0.0
    end: float = 0.0
    waited: float = 0.0
    size: tuple[int, float] = (0, 0.0)


MOST_PRINTED = 300
"""How many characters of what a line prints are kept."""


class _Begun(Batches):
    """Times each ``next``. After the first it calls ``begun``, with whether there was a batch: that is when a pass begins."""

    def __init__(self, batches: Iterator, begun: Callable[[bool], _Row]) -> None:
        super().__init__(batches)
        self._begun = begun
        self._row: _Row | None = None

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = super().__next__()
        except StopIteration:
            self._took(time.perf_counter() - began, drew=False)
            raise
        self._took(time.perf_counter() - began, drew=True)
        return batch

    def _took(self, seconds: float, drew: bool) -> None:
        if self._row is None:
            self._row = self._begun(drew)
        self._row.seconds += seconds


def _kind_of(loader: DataLoader, opened: Pass | None) -> tuple[str, str, str, str]:
    """Of which kind the pass ``opened`` is, the rule that has decided so, why, and what would change it."""
    if opened is None:
        return "empty", "2", "there was no batch", ""
    if opened.shared:
        return "share", "2, 4", "parwrap.shard" if opened.sharded else "trains", "replicate(loader)"
    if opened.rows is not None:
        return "rows", "W1", "batch='whole'", "replicate(loader)"
    if is_replicated(loader):
        return "replicated", "2", "parwrap.replicate", "shard(loader)"
    return GRADIENTS_OFF * (opened.why_whole == GRADIENTS_OFF), "2", opened.why_whole, ""


class _Watcher(Interceptor):
    """Notes what happens at each line."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._rows: dict[tuple, Any] = {}
        self.warnings: list[Warned] = []

    def _row(self, call: str) -> _Row:
        place = script_place()
        row = self._rows.setdefault((place, call), (_Averaged if call == "backward" else _Row)(place, call))
        row.times += 1
        return row

    # loaders

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        place, stack = script_place(), call_stack(sys._getframe(1))
        return _Begun(original(loader), lambda drew: self._note_pass(loader, place, stack, drew))

    def _note_pass(self, loader: DataLoader, place: Place, stack: tuple[Line, ...], drew: bool) -> _Row:
        """Note that a pass over ``loader`` has begun in the loop at ``stack``; ``drew`` says whether it has a batch. Returns its row."""
        opened = self._loop.passes.innermost if drew else None
        kind, rule, why, change = _kind_of(loader, opened)
        key = stack, kind
        if key not in self._rows:
            library = stack[-1] if stack and not stack[-1].in_script else None
            call = "DataLoader" if library is None else f"DataLoader in {Place(library.file, library.line)}"
            sampler = type(loader.batch_sampler if loader.sampler is None else loader.sampler).__name__
            self._rows[key] = _Read(place, call, rule=rule, change=change, sampler=sampler)
        row = self._rows[key]
        row.times += 1
        row.whys[why] = None
        if opened is not None:
            row.begins(opened, self._loop.passes.open)
        return row

    # training

    def backward(self, call: Backward) -> None:
        row = cast(_Averaged, self._row("backward"))
        looks = not row.size[0]
        leaves = reached(call.roots) if looks else ()
        before = self._gradients(leaves) if looks else {}
        began, waited = time.perf_counter(), self._loop.passes.clock.averages
        call.run()
        row.begin, row.end = row.begin or began, time.perf_counter()
        row.seconds += row.end - began
        row.waited += self._loop.passes.clock.averages - waited
        options = self._loop.options()
        row.rule = f"5, strategy={options.strategy!r}" if options.is_given("strategy") else "5"
        row.change = "no_sync(), @accumulate"
        if looks:
            after = self._gradients(leaves)
            changed = [
                grad for p, (grad, version) in after.items() if p not in before or before[p][0] is not grad or before[p][1] != version
            ]
            row.size = len(changed), sum((sparse_values(grad) if grad.is_sparse else grad).nbytes for grad in changed) / 1e6

    def _gradients(self, leaves: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[torch.Tensor, int]]:
        """The gradients of the parameters of all optimizers and among ``leaves``, each with its version."""
        optimizers = self._loop.optimizers
        owned = (p for optimizer in optimizers.all() for p in parameters_of(optimizer))
        free = (leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or not optimizers.were_built)
        return {p: (p.grad, version_of(p.grad)) for p in chain(owned, free) if p.grad is not None}

    def stepped(self, optimizer: Optimizer) -> None:
        row = self._row(f"{type(optimizer).__name__}.step")
        row.what, row.rule = "the same step on all ranks", "1"

    # files and output

    def save(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        file = kwargs.get("f", args[1] if len(args) > 1 else "")
        if not isinstance(file, io.BytesIO):  # into which a tensor is pickled that goes to another rank
            row = self._row("torch.save")
            with suppress(TypeError):
                row.what = f"rank 0 writes {os.path.basename(os.fsdecode(file))}"
            row.what, row.rule, row.change = row.what or "rank 0 writes", "8", "every_rank_writes()"
            began = time.perf_counter()
            try:
                return wrapped(*args, **kwargs)
            finally:
                row.seconds += time.perf_counter() - began
        return wrapped(*args, **kwargs)

    def open(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        call = Opening(wrapped, *args, **kwargs)
        if call.writes and isinstance(call.file, (str, os.PathLike)) and from_script(caller()):
            row = self._row("open")
            row.what, row.rule, row.change = f"rank 0 writes {os.path.basename(os.fspath(call.file))}", "8", "every_rank_writes()"
        return call.run()

    def print(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        if from_script(caller()):
            row = self._row("print")
            row.what, row.rule, row.change = "rank 0 speaks", "8", "--all-ranks"
            args = tuple(map(str, args))  # as print would do; only once, in case an object notices
            row.printed = (" " if (sep := kwargs.get("sep")) is None else str(sep)).join(args)[:MOST_PRINTED]
        return wrapped(*args, **kwargs)

    # the table

    def _told(self, row: Any) -> str:
        ranks = self._loop.group.world.size
        if isinstance(row, _Read):
            passes = counted(row.times, "pass")
            if not row.last:
                return f"{passes} without a batch"
            last, idle = row.last[-1], ""
            share = f"the rows of each batch on {ranks} ranks" if last.rows is not None else "all samples on every rank"
            if last.shared:
                of = "" if last.whole is None else f" of {last.whole}"
                share = f"each of {ranks} ranks {last.samples}{of} samples"
                idle = "" if row.has_trained else ", no optimizer has stepped"
            return f"{share}, {row.sampler}, {passes}, {counted(row.batches, 'batch')}{idle}"
        if isinstance(row, _Averaged):
            verb = "averaged" if self._loop.options().traits.averages else "this rank's gradients of"
            waited = row.waited / (row.end - row.begin) if row.end > row.begin and self._loop.group.device.type == "cpu" else None
            waits = f", {waited:.0%} of the time waiting for averages" if waited is not None and row.times > 1 else ""
            return f"{verb} {counted(row.size[0], 'parameter')}, {row.size[1]:.2g} MB, {row.times} times{waits}"
        return f"{row.what}, {row.times} times" if row.times > 1 else row.what

    def added_up(self) -> list[tuple[Place, str]]:
        """The names that loops which read a share add up, and that the script uses after them."""
        shares = {each.place for each in self._rows.values() if isinstance(each, _Read) and each.last and each.last[-1].shared}
        return [
            (Place(place.file, each.line), each.name)
            for place in sorted(shares)
            for each in added_up("".join(linecache.getlines(place.file)), place.line, imported_classes(place.file))
        ]

    def rows(self) -> list[_Row]:
        """The rows, in the order of the script's lines."""
        if (whole := whole_is_open()) is not None:
            for (place, name), times in whole.collections.items():
                size = whole.collected_bytes[place, name] / 1e6
                what = f"collected the rows of all ranks, {size:.2g} MB"
                self._rows[place, name] = _Row(place, name, times, what, "W2", "")
        for row in self._rows.values():
            if isinstance(row, _Read):
                row.rule = f"{row.rule}: {'; later '.join(row.whys)}"
                if row.last and not row.change:  # whole
                    by_hand = row.last[-1].backwards and not self._loop.optimizers.were_built
                    row.change = "shard(loader)" if row.has_trained or by_hand else "@evaluate shares it, exactly"
        return sorted(self._rows.values(), key=lambda row: row.place)

    def told(self, row: _Row) -> dict[str, Any]:
        """A row in words."""
        return {
            "place": str(row.place),
            "call": row.call,
            "times": row.times,
            "what": self._told(row),
            "rule": row.rule,
            "change": row.change,
            "seconds": round(row.seconds, 6),
        }
