"""What a launch runs: a script, a module or another program, with the scope and features around it. ``script_run.py`` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Script"]


@dataclass(frozen=True)
class Script:
    """What to run.

    Attributes:
        target: a path, the name of a module, or a program that is not Python.
        args: its arguments.
        kind: which of these ``target`` is.
        scope: the options of the ``distributed`` around it; ``None`` to only launch it.
        features: names of parwrap's other decorators around it, with their options.
        hand_local_rank: pass on the local rank as an argument if the script has an option for it.
    """

    target: str
    args: tuple[str, ...] = ()
    kind: Literal["file", "module", "program"] = "file"
    scope: Mapping[str, Any] | None = None
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hand_local_rank: bool = False
