"""What a run prints, line by line with its place in the script, and the first line whose numbers differ between two runs.

Two lines are compared if the same line of the script prints them and their texts agree apart from numbers: the first with the first, the
second with the second. Times, rates, sizes of memory and addresses do not count, nor does what differs between two runs of one process.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from parwrap.places import from_script, is_ours, is_standard, script_place
from parwrap.rank_zero.path_rules import passing

__all__ = ["OtherLine", "Printed", "PrintedLines", "compared_lines", "printed_in", "prints_recorded"]

PRINTED = "printed"
"""The file with the lines of a run."""

MOST_LINES = 10_000
"""How many lines are recorded."""

NEAR_A_SHARE = 0.25
"""A number that one rank computes from one of N shares is 1/N of that of all data, up to about this fraction: shares differ."""

_VALUE = r"[-+]?(?:\d+(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNIT = r"(?:[nmuµ]?s(?:/\w+)?|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|days?|[kKMGT]i?B|bytes|[\w.]*/(?:s|sec|second|min)|fps)"
_OF_TIME = r"(?:\b\w*(?:time|elapsed|took|duration|speed|throughput|memory|per_second)|\beta|\bpid)"
_NO_NUMBER = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\d{4}[-/]\d\d[-/]\d\d(?:[T_ ]\d\d[:-]\d\d[:-]\d\d)?(?:[.,]\d+)?"
    r"|\d{1,3}:\d\d(?::\d\d)?(?:[.,]\d+)?(?!\d)"
    rf"|(?<![\w.]){_VALUE} ?{_UNIT}(?![\w/])"
    rf"|(?i:{_OF_TIME})\W{{0,3}}{_VALUE}(?!\.?\w)"
)
"""Dates, times, durations, rates, sizes of memory, addresses, and numbers after a word such as ``elapsed``."""

_NUMBER = re.compile(rf"(?<![\w.]){_VALUE}(?!\.?\w)|(?<!\w)[-+]?(?:nan|inf)(?!\w)")


class Printed(NamedTuple):
    """A line that a run has printed.

    Attributes:
        place: the line of the script that has printed it.
        text: the line.
    """

    place: str
    text: str


@dataclass
class OtherLine:
    """The first line whose numbers differ.

    Attributes:
        place: the line of the script that prints it.
        one: the line with one process.
        several: the line with parwrap.
        values: the numbers that differ, as pairs.
        ratios: those with parwrap divided by those with one process.
        reasons: what may be the cause.
    """

    place: str
    one: str
    several: str
    values: list[tuple[str, str]]
    ratios: list[float]
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        pairs = zip(self.values, self.ratios, strict=True)
        numbers = ", ".join(f"{b} instead of {a} ({ratio:.3g} times)" for (a, b), ratio in pairs)
        return f"{self.place} prints {numbers}\n  one process: {self.one.strip()}\n  parwrap:     {self.several.strip()}"


@dataclass
class PrintedLines:
    """How the lines of two runs compare.

    Attributes:
        lines: how many lines with numbers were compared.
        differing: how many of these differ.
        other_text: how many lines with numbers only one of the runs has printed.
        difference: the first line whose numbers differ; ``None`` if there is none.
    """

    lines: int = 0
    differing: int = 0
    other_text: int = 0
    difference: OtherLine | None = None


@contextmanager
def prints_recorded(folder: Path) -> Iterator[None]:
    """Record in ``folder`` each line that this process prints inside the block, and each that the script logs to stderr."""
    with ExitStack() as around:
        with passing():
            target = around.enter_context(open(folder / PRINTED, "a", buffering=1))
        for stream in {id(each): each for each in (sys.stdout, sys.stderr)}.values():
            around.enter_context(_heard(stream, _Lines(target), all_counts=stream is sys.stdout))
        yield


@contextmanager
def _heard(stream: Any, lines: _Lines, all_counts: bool) -> Iterator[None]:
    """Pass what is written into ``stream`` to ``lines`` too. The stream stays the same object, for loggers that hold it."""
    write: Callable[[str], int] = stream.write

    def note(text: str) -> int:
        frame = sys._getframe().f_back
        if all_counts or _is_scripts(frame):
            lines.add(text, frame)
        return write(text)

    try:
        stream.write = note
    except AttributeError:  # an object without attributes of its own
        yield
        return
    try:
        yield
    finally:
        stream.write = write


def _is_scripts(frame: FrameType | None) -> bool:
    """Whether the script itself writes in ``frame``: it prints, or it logs. Bars, warnings and notes of parwrap do not count."""
    while frame is not None and (is_standard(file := frame.f_code.co_filename) or (is_ours(file) and frame.f_code.co_name != "say")):
        if file == warnings.__file__:
            return False
        frame = frame.f_back
    return frame is not None and from_script(frame)


class _Lines:
    """Joins what is written to lines, and writes each with a number into ``target``."""

    def __init__(self, target: TextIO) -> None:
        self._target, self._process = target, os.getpid()
        self._text, self._place, self._left = "", "", MOST_LINES

    def add(self, text: str, frame: FrameType | None) -> None:
        if os.getpid() != self._process or not self._left:  # a worker prints to the same stream
            return
        if not self._text.strip():
            self._place = str(script_place(frame))
        *ended, self._text = (self._text + text).split("\n")
        for line in ended:
            if "\r" not in line and any(each.isdigit() for each in line):  # with "\r" a line is written over
                self._left -= 1
                self._target.write(json.dumps([self._place, line]) + "\n")
        if ended:
            self._place = str(script_place(frame))


def printed_in(folder: Path) -> list[Printed]:
    """The lines that a run has recorded in ``folder``."""
    if not (folder / PRINTED).exists():
        return []
    return [Printed(*json.loads(line)) for line in (folder / PRINTED).read_text().splitlines() if line.endswith("]")]


def numbers_in(text: str) -> tuple[str, list[str]]:
    """``text`` with a sign in the place of each number, and the numbers.

    >>> numbers_in("epoch 3 loss 0.25 acc 81% [00:03, 12.5it/s] took 3.1s at 0x7f3a")
    ('epoch # loss # acc #% [~, ~] took ~ at ~', ['3', '0.25', '81'])
    """
    without = _NO_NUMBER.sub("~", text)
    return " ".join(_NUMBER.sub("#", without).split()), _NUMBER.findall(without)


def compared_lines(
    one: Sequence[Printed], several: Sequence[Printed], ranks: int, tolerance: float, again: Sequence[Printed] | None = None
) -> PrintedLines:
    """Compare what two runs have printed.

    Args:
        one: the lines with one process.
        several: the lines with parwrap.
        ranks: the number of ranks.
        tolerance: the largest difference that counts as rounding, as a fraction of the number. One unit of its last digit does, too.
        again: the lines of another run with one process. What differs between the two is not compared.
    """
    result = PrintedLines()
    first, second, third = _by_text(one), _by_text(several), _by_text(again or [])
    differences: list[tuple[int, OtherLine]] = []
    for key, mine in first.items():
        theirs, repeated = second.get(key, []), third.get(key, [])
        result.other_text += abs(len(mine) - len(theirs))
        left_out = {
            index
            for (_, _, a), (_, _, b) in zip(mine, repeated, strict=False)
            for index, pair in enumerate(zip(a, b, strict=True))
            if differ(*pair, tolerance)
        }
        if again is not None and len(mine) != len(repeated):
            continue
        for (at, text, a), (_, other, b) in zip(mine, theirs, strict=False):
            pairs = [pair for index, pair in enumerate(zip(a, b, strict=True)) if index not in left_out]
            result.lines += bool(pairs)
            values = [pair for pair in pairs if differ(*pair, tolerance)]
            if values:
                ratios = [_value(y) / _value(x) if _value(x) else math.inf for x, y in values]
                differences.append((at, OtherLine(key[0], text, other, values, ratios, _reasons(values, ratios, ranks))))
    result.other_text += sum(len(lines) for key, lines in second.items() if key not in first)
    result.differing = len(differences)
    if differences:
        result.difference = min(differences, key=lambda each: each[0])[1]
    return result


def _by_text(lines: Sequence[Printed]) -> dict[tuple[str, str], list[tuple[int, str, list[str]]]]:
    """The lines with numbers by their place and text: the position of each among all lines, the line, and its numbers."""
    found = defaultdict(list)
    for at, line in enumerate(lines):
        text, numbers = numbers_in(line.text)
        if numbers:
            found[line.place, text].append((at, line.text, numbers))
    return dict(found)


def differ(one: str, several: str, tolerance: float) -> bool:
    """Whether two printed numbers differ by more than rounding: a unit of the last digit, or ``tolerance`` times the number.

    Whole numbers below 100 must be equal.

    >>> differ("0.4303", "0.4304", 1e-5), differ("0.4303", "0.2096", 1e-5), differ("8", "7", 1e-5)
    (False, True, True)
    """
    a, b = _value(one), _value(several)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return False
    largest = max(abs(a), abs(b))
    unit = max(_unit(one), _unit(several))
    last_digit = 1.01 * unit if unit < 1 or largest >= 100 else 0.0
    return not abs(a - b) <= max(last_digit, tolerance * largest, tolerance / 1000)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _unit(number: str) -> float:
    """The value of one in the last digit of ``number``."""
    mantissa, _, exponent = number.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) if mantissa.strip("+-") not in ("nan", "inf") else 0.0


def _reasons(values: Sequence[tuple[str, str]], ratios: Sequence[float], ranks: int) -> list[str]:
    whole = all(number.replace(",", "").isdigit() for pair in values for number in pair)
    if whole and all(abs(ratio * ranks - 1) < 1e-9 for ratio in ratios):
        return [
            f"1/{ranks} of one process's number: a count of what this rank has read, such as `batch * len(x)`. Leave it if it only shows "
            "progress; `parwrap.total(count, of=loader)` counts what all ranks have read"
        ]
    if any(abs(ratio * ranks - 1) < NEAR_A_SHARE for ratio in ratios):
        return [
            f"about 1/{ranks} of one process's number: likely a sum over this rank's share of a training pass. `parwrap.total(value, "
            "of=loader)` adds up over all ranks"
        ]
    return [
        "the weights are equal, so this number is computed from this rank's share of a training pass: take sums and counts from "
        "`parwrap.total(values, of=loader)`, and print a loss after its backward"
    ]
