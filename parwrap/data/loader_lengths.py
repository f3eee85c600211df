"""Which pass a length belongs to that a script asks for while no pass is open (contract, rule 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from parwrap.loop.one_pass import Pass
from parwrap.places import Line, Place

__all__ = ["Lengths", "shows_share", "stands_above"]

Stack = tuple[Line, ...]


def shows_share(*, last_trained: bool | None, gradients_on: bool, in_eval: bool, shuffled: bool) -> bool:
    """Whether ``len(loader)`` is that of a share, at a line that asks for the first time.

    Args:
        last_trained: whether its last pass was a training pass; ``None`` before the first.
        gradients_on: whether gradients are on.
        in_eval: whether the models of the optimizers at work are in eval mode.
        shuffled: whether the loader reads in any other order than that of its dataset.

    >>> shows_share(last_trained=None, gradients_on=True, in_eval=False, shuffled=True)
    True
    >>> shows_share(last_trained=None, gradients_on=True, in_eval=False, shuffled=False)
    False
    """
    if last_trained is not None:
        return last_trained
    return shuffled and gradients_on and not in_eval


def stands_above(read: Stack, asked: Stack) -> bool:
    """Whether the function that asks for a length has begun a pass above, itself or through the functions that it calls.

    Args:
        read: the calls that led to the pass.
        asked: the calls that lead to the function that asks; its own line is the last.
    """
    return _same_function(read, asked) and read[len(asked) - 1].line <= asked[-1].line


def _same_function(read: Stack, asked: Stack) -> bool:
    callers = len(asked) - 1
    return len(read) > callers >= 0 and read[:callers] == asked[:callers] and read[callers].is_in(asked[callers])


def of_script(stack: Stack) -> Stack:
    """``stack`` up to the script's innermost line: progress bars and trainers ask for it. A stack of libraries alone stays whole."""
    last = max((at for at, line in enumerate(stack) if line.in_script), default=len(stack) - 1)
    return stack[: last + 1]


class Lengths:
    """The lengths that the script has asked for, and the passes to which they belong."""

    def __init__(self) -> None:
        self._asked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from a loader to the lengths given at stacks: length, place
        self._followed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from a dataset to stacks: whether a share followed there
        self._reported: set[Place] = set()

    def followed(self, dataset: Any, asked: Stack) -> bool | None:
        """Whether the pass that followed ``asked`` the last time was a share; ``None`` if none did."""
        return self._followed.get(dataset, {}).get(asked)

    def given(self, loader: DataLoader, asked: Stack, length: int, place: Place) -> None:
        """Note that ``length`` was returned at ``asked``, below no pass."""
        self._asked.setdefault(loader, {})[asked] = length, place

    def begins(self, loader: DataLoader, dataset: Any, opened: Pass, first: bool) -> Iterator[tuple[int, Place]]:
        """Note that the pass ``opened`` begins. Yields the lengths given for it and their lines, each line once.

        Before the loader's ``first`` training pass, a length may be for a schedule: all belong to that pass.
        """
        asked = self._asked.get(loader, {})
        for stack, (length, place) in list(asked.items()):
            follows = _same_function(opened.stack, stack)
            if follows:
                self._followed.setdefault(dataset, {})[stack] = opened.shared
            if follows or (first and opened.shared):
                if opened.shared or not first:
                    del asked[stack]
                if place not in self._reported:
                    yield length, place

    def reported(self, place: Place) -> None:
        """Note that the length given at ``place`` was reported as wrong."""
        self._reported.add(place)
