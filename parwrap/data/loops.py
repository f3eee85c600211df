"""Which passes train (contract, rule 2): the rule as a function that touches nothing, then what parwrap remembers of each loop.

A loop is the call stack from which it asks for an iterator, and the dataset. It begins in one of two ways: after the script has put the
model in eval mode, or not.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from parwrap.loop.one_pass import Pass
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes
from parwrap.places import Line, Place, call_stack, warn

__all__ = ["WHOLE_BATCH", "Loops", "Start", "why_whole"]

GRADIENTS_OFF = "gradients are off"
NEVER_STEPPED = "no optimizer stepped in this loop the last time"
NO_OPTIMIZER = "no optimizer has been built"
OTHER_LOOP = "another loop has trained since the optimizer was built"
IN_EVAL = "the model is in eval mode"

LAPSES = 2
"""A loop that has so often run without a step, after it had trained, stays whole."""


def why_whole(
    *, gradients_on: bool, last_time: bool | None, optimizer_built: bool, trained_since_built: bool, eval_is_fresh: bool, suits: bool
) -> str:
    """Why a pass that begins now reads everything; empty if it trains.

    An eval mode that is older than the last pass says nothing: it is what a validation has left behind.

    Args:
        gradients_on: whether gradients are on.
        last_time: whether an optimizer stepped in the pass when its loop last began this way; ``None`` if it never did.
        optimizer_built: whether the script has built an optimizer.
        trained_since_built: whether an optimizer has stepped since the newest one was built.
        eval_is_fresh: whether the script has put the model in eval mode since the last pass.
        suits: whether the model is in train mode or the loader shuffles.

    >>> why_whole(gradients_on=True, last_time=True, optimizer_built=True, trained_since_built=True, eval_is_fresh=False, suits=False)
    ''
    """
    if not gradients_on:
        return GRADIENTS_OFF
    if last_time is not None:
        return "" if last_time else NEVER_STEPPED
    if not optimizer_built:
        return NO_OPTIMIZER
    if eval_is_fresh or (not trained_since_built and not suits):
        return IN_EVAL
    return OTHER_LOOP if trained_since_built else ""


@dataclass(eq=False)
class _Loop:
    """What a loop did when it last began one way.

    Attributes:
        trained: whether an optimizer stepped in its last pass; ``None`` if that is not known.
        lapses: how often it ran without a step after it had trained.
    """

    trained: bool | None = None
    lapses: int = 0

    def last_time(self) -> bool | None:
        return self.trained if self.lapses < LAPSES else False


@dataclass(eq=False)
class _Lines:
    """All loops at one call stack that begin one way, over loaders that all shuffle or all read in order.

    Attributes:
        outcomes: whether optimizers stepped in the passes so far.
        running: the passes whose outcome is not known yet, each with its loop.
    """

    outcomes: set[bool] = field(default_factory=set)
    running: list[tuple[_Loop, Pass]] = field(default_factory=list)

    def settle(self, begins: _Loop, passes: Passes) -> list[Pass]:
        """Note what the passes did, and return those that did not train. One that has not trained yet may still train if it is open, or if
        another loop than that which ``begins`` has left it for the next step."""
        waiting, unused = [], []
        for loop, each in self.running:
            outcome = each.has_trained
            may_train = each in passes.open or (loop is not begins and passes.steps.awaits(each))
            if outcome is not None and (outcome or not may_train):
                loop.lapses += bool(loop.trained and not outcome)
                loop.trained = outcome
                self.outcomes.add(outcome)
                if not outcome:
                    unused.append(each)
            elif may_train:
                waiting.append((loop, each))
        self.running = waiting
        return unused


class Start(NamedTuple):
    """How a pass starts.

    Attributes:
        why_whole: why it reads everything; empty if it trains.
        after_eval: whether the script has put the model in eval mode since the last pass.
        loop: its loop.
        lines: the loops at its lines.
    """

    why_whole: str
    after_eval: bool
    loop: _Loop
    lines: _Lines


WHOLE_BATCH = Start("its batches are whole", False, _Loop(), _Lines())
"""How each pass starts with ``batch="whole"``: whether it trains makes no difference."""


class _Starter(NamedTuple):
    """What a thread was started by: the calls that lead there, and whether gradients were on."""

    stack: tuple[Line, ...] = ()
    gradients_on: bool = True


class Loops:
    """The loops of a script.

    Args:
        passes: the open passes.
        optimizers: the optimizers of the script.
    """

    def __init__(self, passes: Passes, optimizers: Optimizers) -> None:
        self._passes, self._optimizers = passes, optimizers
        self._loops: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from a dataset to its loops, by stack and eval mode
        self._lines: dict[tuple[tuple[Line, ...], bool, bool], _Lines] = {}
        self._named: set[Place] = set()
        self._threads: weakref.WeakKeyDictionary[threading.Thread, _Starter] = weakref.WeakKeyDictionary()

    def starts_thread(self, thread: threading.Thread, frame: FrameType | None) -> None:
        """Note that the script starts ``thread`` in ``frame``."""
        self._threads[thread] = _Starter(self.stack(call_stack(frame)), self.gradients_on())

    def stack(self, lines: tuple[Line, ...]) -> tuple[Line, ...]:
        """The call stack ``lines`` of this thread. In a thread that the script has started, the calls that lead to its start come first."""
        return (*self._starter().stack, *lines)

    def gradients_on(self) -> bool:
        """Whether gradients are on, and were on where this thread was started: torch turns them on in each new thread."""
        return torch.is_grad_enabled() and self._starter().gradients_on

    def _starter(self) -> _Starter:
        return self._threads.get(threading.current_thread(), _Starter())

    def start(self, stack: tuple[Line, ...], dataset: Any, shuffles: bool, sharded: bool = False) -> Start:
        """How a pass starts that begins now.

        Args:
            stack: the calls that lead to the line that asks for its iterator.
            dataset: what identifies its dataset.
            shuffles: whether it reads in another order than that of the dataset.
            sharded: whether the script has called ``parwrap.shard`` on its loader.
        """
        optimizers = self._optimizers
        before = self._passes.evals_before
        fresh = before is not None and optimizers.evaluate(since=before)
        loop, lines = self._find(stack, dataset, shuffles, fresh)
        after_eval, _ = self._find(stack, dataset, shuffles, True)
        last_time = loop.last_time()
        if last_time is None and len(lines.outcomes) == 1:
            (last_time,) = lines.outcomes
        if last_time is None and after_eval.last_time():  # a loop that trained although the model was put in eval mode trains anyway
            last_time = True
        gradients_on = self.gradients_on()
        why = why_whole(
            gradients_on=gradients_on,
            last_time=last_time,
            optimizer_built=optimizers.were_built,
            trained_since_built=optimizers.trained_since_built,
            eval_is_fresh=fresh,
            # a walk over all modules, only where it decides
            suits=not gradients_on or last_time is not None or shuffles or optimizers.trained_since_built or not optimizers.evaluate(),
        )
        if why == IN_EVAL and (place := optimizers.eval_place()) is not None:
            why = f"{why} since {place}"
        return Start("" if sharded else why, fresh, loop, lines)

    def _find(self, stack: tuple[Line, ...], dataset: Any, shuffles: bool, after_eval: bool) -> tuple[_Loop, _Lines]:
        """The loop that begins in this way, and all loops at its lines. What their passes did is noted first."""
        lines = self._lines.setdefault((stack, after_eval, shuffles), _Lines())
        loop = self._loops.setdefault(dataset, {}).setdefault((stack, after_eval), _Loop())
        for unused in lines.settle(loop, self._passes):
            self._name(unused)
        return loop, lines

    def begin(self, start: Start, opened: Pass) -> None:
        """Note that the pass ``opened`` begins as ``start`` says. A pass without gradients shows nothing of its loop."""
        passes = self._passes
        opened.after_eval, opened.in_thread = start.after_eval, not passes.in_loop()
        passes.begun += not opened.in_thread
        if not self.gradients_on() or start is WHOLE_BATCH:
            return
        if not opened.in_thread:
            start.lines.running.append((start.loop, opened))
        elif start.loop.trained is None:  # how far that thread reads before a step depends on the clock
            start.loop.trained = opened.trains
            start.lines.outcomes.add(opened.trains)

    def end(self, opened: Pass) -> None:
        """Note that the pass ``opened`` has ended."""
        if opened.exhausted and not opened.backwards and not opened.in_thread and opened.has_trained is False:
            self._name(opened)

    def _name(self, unused: Pass) -> None:
        """Warn, once for its line, of a pass over a share in which no optimizer has stepped."""
        if not unused.shared or unused.sharded or unused.place in self._named:
            return
        self._named.add(unused.place)
        warn(
            f"parwrap: {unused.place} read {unused.samples} samples on each rank, and no optimizer stepped in the pass: what was computed "
            "from them covers only this rank's share. From now on every rank reads everything in this loop, until an optimizer steps in "
            "it. To read everything from the first pass on, put the loop into `with torch.no_grad():`, or write parwrap.replicate(loader) "
            "if a backward follows the loop. If you keep the batches to train on them later, write parwrap.shard(loader)."
        )
