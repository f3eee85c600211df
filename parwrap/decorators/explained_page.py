"""The page that ``explain(html=FILE)`` writes: the script with a margin that says what each line did. One file that loads nothing."""

from __future__ import annotations

import linecache
import os
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from parwrap.places import Place

__all__ = ["Note", "page"]

AROUND, FOLDED = 6, 30
"""How many lines around a note are shown, and from how many on the lines between are folded."""

KINDS = {
    "share": "each rank reads its share",
    "whole": "every rank reads everything",
    "average": "gradients are averaged",
    "other": "steps, files and output",
    "warning": "look here",
}
"""The kinds of notes, each with its words."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2126; --soft: #59636e; --line: #e3e6e8; --note: #f6f7f9;
  --share: #1a7f4b; --whole: #9a6700; --average: #2f6db0; --other: #6b7680; --warning: #c2361c; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e4e8ec; --soft: #9aa5b1; --line: #2a3138; --note: #1d232a;
  --share: #4cc38a; --whole: #d6a32f; --average: #6caff0; --other: #8d98a3; --warning: #ff8466; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 88rem; padding: 1rem; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
code, pre, .number { font: 13px/1.6 ui-monospace, monospace; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: 0; list-style: none; color: var(--soft); }
.legend li { border-left: 4px solid var(--kind); padding-left: .5rem; }
.share { --kind: var(--share); } .whole { --kind: var(--whole); } .average { --kind: var(--average); }
.other { --kind: var(--other); } .warning { --kind: var(--warning); }
.line { display: grid; grid-template-columns: 2.6rem minmax(0, 1fr); border-top: 1px solid transparent; }
.noted { border-color: var(--line); }
.number { color: var(--soft); text-align: right; padding-right: .7rem; user-select: none; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.notes { grid-column: 2; margin: .1rem 0 .5rem; }
.note { border-left: 4px solid var(--kind); background: var(--note); padding: .2rem .6rem; margin-bottom: .3rem; overflow-wrap: anywhere; }
.note b { color: var(--kind); } .note small { display: block; }
.note small, .note pre, summary { color: var(--soft); }
summary { cursor: pointer; padding-left: 2.6rem; }
@media (min-width: 60rem) { .line { grid-template-columns: 3.2rem minmax(0, 1fr) minmax(0, 34rem); } .notes { grid-column: 3; margin: 0; } }
"""


class Note(NamedTuple):
    """What the margin says of a line.

    Attributes:
        place: the line.
        kind: one of ``KINDS``.
        head: what the line calls, or a word for what to look at.
        text: what parwrap did.
        small: the rule, and what changes it.
        printed: the last that the line has printed.
    """

    place: Place
    kind: str
    head: str
    text: str
    small: str = ""
    printed: str = ""


def page(notes: Sequence[Note], script: str, ranks: int) -> str:
    """The page on what happened on ``ranks`` ranks: each file with a note, first ``script``, the file that was run."""
    by_line: defaultdict[str, defaultdict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))
    for note in notes:
        by_line[note.place.file][note.place.line].append(note)
    files = sorted(by_line, key=lambda file: (file != script, file))
    name, has = escape(os.path.basename([*files, script][0])), {note.kind for note in notes}
    legend = "".join(f'<li class="{kind}">{words}</li>' for kind, words in KINDS.items() if kind in has)
    shown = "".join(_file(file, by_line[file]) for file in files)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name}, explained</title><style>{STYLE}</style></head>\n"
        f'<body><h1>What parwrap did to {name} on {ranks} ranks</h1><ul class="legend">{legend}</ul>\n{shown}</body></html>\n'
    )


def _file(file: str, notes: dict[int, list[Note]]) -> str:
    source = linecache.getlines(file)
    size = max(len(source), *notes)
    lines = source + [""] * (size - len(source))  # of a file that cannot be read only the notes are shown
    near = {each for line in notes for each in range(line - AROUND, line + AROUND + 1)}
    parts, far = [f"<h2>{escape(str(Place(file, 1)).rpartition(':')[0])}</h2>\n"], list[str]()
    for number in range(1, size + 1):
        text = _line(number, lines[number - 1], notes.get(number, ()))
        if number not in near:
            far.append(text)
        if far and (number in near or number == size):
            last = number - 1 if number in near else number
            folded = f"<details><summary>lines {last - len(far) + 1} to {last}</summary>{''.join(far)}</details>\n"
            parts += [folded] if len(far) >= FOLDED else far
            far = []
        if number in near:
            parts.append(text)
    return "".join(parts)


def _line(number: int, source: str, notes: Sequence[Note]) -> str:
    code = f'<span class="number">{number}</span><pre>{escape(source.rstrip())}</pre>'
    if not notes:
        return f'<div class="line">{code}</div>\n'
    return f'<div class="line noted" id="line-{number}">{code}<div class="notes">{"".join(map(_note, notes))}</div></div>\n'


def _note(note: Note) -> str:
    small = f"<small>{escape(note.small)}</small>" if note.small else ""
    printed = f"<pre>{escape(note.printed)}</pre>" if note.printed else ""
    return f'<div class="note {note.kind}"><b>{escape(note.head)}</b> {escape(note.text)}{printed}{small}</div>'
