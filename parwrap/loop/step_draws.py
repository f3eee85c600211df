"""Random draws of a loop without a ``for`` statement over a loader: draws for every step differ between ranks, all others are shared.

If a line of the script draws before each of several consecutive steps, it draws data or noise, and uses the rank's generators from then on.
A line that draws less often is assumed to split, permute or search, where all ranks must get the same. So is a new line. Forwards in
training mode draw from the rank's generators too, because of dropout.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from parwrap.coordination.call_site import call_site
from parwrap.group.group import is_alone
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["StepDraws"]

STEPS = 2
"""The number of consecutive steps after which a line uses the rank's generators."""

MOST_LINES = 4096
"""The maximum number of lines to remember, in case a script draws at a new place each time."""


@dataclass(eq=False)
class _Line:
    """The state of one line that draws, with the calls that lead to it.

    Attributes:
        codes: the code objects whose ids identify the line, to keep them alive.
        streak: the number of consecutive steps that it has drawn for.
        backwards, forwards, generation: the loop's values at its last draw.
        optimizer: the first optimizer that has stepped since.
        steps: that optimizer's number of steps before.
    """

    codes: list[CodeType] = field(default_factory=list)
    streak: int = 0
    backwards: int = -1
    forwards: int = 0
    generation: int = -1
    optimizer: int | None = None
    steps: int = 0


class StepDraws(Interceptor):
    """Gives each draw the shared streams or the rank's.

    Args:
        loop: what the training loop has done so far.
        streams: the random streams.
    """

    def __init__(self, loop: Loop, streams: RandomStreams) -> None:
        self._loop, self._streams = loop, streams
        self._lines: dict[tuple[int, ...], _Line] = {}
        self._since_step: set[_Line] = set()
        self._steps: defaultdict[int, int] = defaultdict(int)
        self._thread = threading.get_ident()
        self._forwards = self._backwards_before_step = 0
        self._in_forward = self._ranks_differ = False

    @intercepts
    def draw(self, library: str, name: str, original: Callable, args: tuple, kwargs: dict) -> Any:
        """A call of the function ``name`` of ``library``."""
        if self._in_forward and library == "torch":  # the rank's own streams are active there
            self._ranks_differ = True
            return original(*args, **kwargs)
        if not self._may_differ():
            return original(*args, **kwargs)
        if not self._in_forward:
            line = self._line()
            if line is None or not self._draws_for_each_step(line) or _in_checkpoint():
                return original(*args, **kwargs)
        self._ranks_differ = True
        if library != "torch":
            return getattr(self._streams.own_generator(library), name)(*args, **kwargs)
        if self._is_beside():
            return self._drawn_beside(original, args, kwargs)
        return self._streams.with_own_torch(original, args, kwargs)[0]

    @intercepts
    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        """Run a forward pass of ``module``."""
        if self._in_forward or not (module.training and self._loop.trained and self._loop.by_hand and self._may_differ()):
            return original(*args, **kwargs)
        self._forwards += 1
        if not torch.is_grad_enabled() or _in_checkpoint():
            return original(*args, **kwargs)
        self._in_forward = True
        try:
            result, drew = self._streams.with_own_torch(original, args, kwargs)
        finally:
            self._in_forward = False
        self._ranks_differ = self._ranks_differ or drew()
        return result

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``optimizer`` is about to step."""
        self._backwards_before_step = self._loop.backwards

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of ``optimizer``. A step that calls a closure may train a whole fold, so it counts as several."""
        key = id(optimizer)
        for line in self._since_step:
            line.optimizer, line.steps = key, self._steps[key]
        self._since_step.clear()
        self._steps[key] += 1 if self._loop.backwards == self._backwards_before_step else 2

    def ran_backward(self) -> None:
        """Synchronize the shared streams, from which ranks may have drawn different numbers."""
        self._thread = threading.get_ident()
        if self._ranks_differ and self._streams.may_draw_own:
            self._streams.renew(self._loop.backwards)

    def _may_differ(self) -> bool:
        """Whether draws may now use the rank's streams. A checkpoint that is recomputed in a backward pass must repeat its draws."""
        return (
            (self._in_forward or self._streams.may_draw_own)
            and not self._loop.evaluations
            and current_graph_task_id() == NO_GRAPH_TASK
            and not is_alone()
        )

    def _line(self) -> _Line | None:
        """The line that draws now; ``None`` if there are too many."""
        key = call_site()
        line = self._lines.get(key)
        if line is None and len(self._lines) < MOST_LINES:
            line = self._lines[key] = _Line([frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))])
        return line

    def _is_beside(self) -> bool:
        """Whether a thread draws that does not train, such as one that prefetches batches."""
        return threading.get_ident() != self._thread

    def _drawn_beside(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Draw in a thread other than the training thread: torch's streams cannot be switched for one thread only."""
        try:
            return original(*args, **{"generator": self._streams.own_generator("torch"), **kwargs})
        except (RuntimeError, TypeError):  # it takes no generator, or that of a GPU
            return original(*args, **kwargs)

    def _draws_for_each_step(self, line: _Line) -> bool:
        """Record a draw of ``line``. Returns whether it has drawn for each of the last steps."""
        loop = self._loop
        if line.streak >= STEPS and line.generation == loop.generation and self._is_beside():
            return True  # how many steps pass between two draws of a thread differs by rank
        backwards, forwards = loop.backwards - line.backwards, self._forwards - line.forwards
        if not (backwards or forwards or line.optimizer):
            return line.streak >= STEPS  # another draw for the same step
        times = backwards if line.optimizer is None else self._steps[line.optimizer] - line.steps
        if times > 1 or (line.generation != loop.generation and line.streak < STEPS):
            line.streak = 0
        elif line.generation == loop.generation:
            line.streak += 1
        line.backwards, line.forwards, line.generation, line.optimizer = loop.backwards, self._forwards, loop.generation, None
        self._since_step.add(line)
        return line.streak >= STEPS


def _in_checkpoint() -> bool:
    """Whether the caller is a checkpoint, which has kept the state of the streams that ran before."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
