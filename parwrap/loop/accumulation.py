"""Gradient accumulation: an optimizer takes one step for every few calls of its ``step()``, on the mean of their gradients.

The calls for one step are the *window* of an optimizer. Inside a window, a backward adds up gradients on this rank, and a step only keeps
them. The backward that closes the window gets all of them back and is averaged over the ranks, so gradients travel once a window. It is
known by its line: the one where the last backward before the optimizer's previous step was called.

Rare cases are apart: a window that no such backward closes, a window that its epoch has cut short, and a script's own scaler.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, get_worker_info

from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Backward, Batches, Clip, ScalerCall
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.optimizers import parameters_of
from parwrap.places import call_site, codes_of, script_place, warn
from parwrap.ranks.environment import attribute
from parwrap.ranks.group import is_alone
from parwrap.torch_private.tensors import version_of

__all__ = ["Accumulation"]

LOOKS = 8
"""The number of skipped steps whose gradients are compared with what backward has left."""

BY_HAND = 3
"""After so many calls of an optimizer's ``step()`` it is clear whether the script itself accumulates."""


class _Window:
    """The batches that count for one step of an optimizer. A window keeps its optimizer alive while it has skipped steps.

    Attributes:
        steps: the number of its skipped steps.
        site: where the backward before the last of these steps was called, and the code objects that keep this key valid.
        sums: for the id of each parameter, the parameter and the sum of its gradients in these steps.
        clips: the clipping calls before the last skipped step.
        scaler: the script's own scaler that steps the optimizer.
        closing: whether ``.grad`` has the gradients of the whole window.
        backward: the number of the last backward before the optimizer's last step.
        batches: on how many batches of one line the backwards before each of its first steps ran.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.site: Any = None
        self.scaler: torch.amp.GradScaler | None = None
        self.backward = 0
        self.batches: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin another window."""
        self._kept_alive: Optimizer | None = None
        self.steps, self.closing = 0, False
        self.sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.clips: list[Clip] = []

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. It is alive while this window has skipped steps, or while the script holds it."""
        return cast(Optimizer, self._optimizer())

    @torch.no_grad()
    def keep(self) -> None:
        """Add the gradients of a skipped step to ``sums``."""
        self.steps += 1
        self._kept_alive = self.optimizer
        for p in parameters_of(self.optimizer):
            if p.grad is not None:
                grad, known = p.grad.detach(), self.sums.get(id(p))
                self.sums[id(p)] = p, grad.clone() if known is None else known[1] + grad

    def is_lost(self) -> bool:
        """Whether the loop has zeroed the gradients of the whole window before a step has used them."""
        return all(p.grad is None or not p.grad.any() for p, _ in self.sums.values())


class Accumulation(Interceptor):
    """Lets each optimizer step once for every ``steps`` calls of its ``step()``.

    Args:
        steps: the number of calls of ``step()`` for one step.
        no_sync: makes a context in which backwards are not averaged over the ranks.
        average: averages the gradients of parameters over the ranks outside of a backward.
        drops: returns, in a finalizer, whether the script has dropped the object; false if the garbage collector has found it.
    """

    def __init__(
        self,
        steps: int,
        no_sync: Callable[[], AbstractContextManager[None]],
        average: Callable[[list[torch.Tensor]], None],
        drops: Callable[[], bool],
    ) -> None:
        self._steps, self._no_sync, self._average, self._drops = steps, no_sync, average, drops
        self._windows: weakref.WeakKeyDictionary[Optimizer, _Window] = weakref.WeakKeyDictionary()
        self._skipped: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []
        self._left_by_backward: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._looks = LOOKS
        self._clips: list[Clip] = []
        self._site: Any = None
        self._scaler_used = self._stepped = self._running = self._in_step = self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.get_ident()
        self._batches: dict[Any, set[int]] = {}  # since the last step: for a line and a pass, the batches of its backwards
        self._drawn: tuple[int, int] | None = None  # the pass that drew the last batch, and the number of that batch
        self._told = False
        self.backwards = 0

    # the regular loop

    def backward(self, call: Backward) -> None:
        """Run ``call`` with its loss divided by ``steps``. Only a backward that closes a window is averaged over the ranks.

        A call inside another backward, or on a rank that runs alone, runs unchanged.
        """
        if is_alone() or self._running or self._steps == 1:  # inside another backward, as re-entrant checkpoints do it
            call.run()
            self.backwards += not self._running
            return
        self._raise_failure()
        if self._skipped:
            self._drop_stale()
        site, frame = call_site(sys._getframe(1))
        full = [window for window in self._windows.values() if window.steps == self._steps - 1]
        closing = [window for window in full if window.closing or (window.site is not None and window.site[0] == site)]
        self._put_back(window for window in closing if not window.closing or window.is_lost())
        with attribute(self, "_running", True), nullcontext() if closing else self._no_sync():
            call.times(1 / self._steps).run()
        self.backwards += 1
        if self._drawn is not None:
            self._batches.setdefault((site, self._drawn[0]), set()).add(self._drawn[1])
        self._site = site, codes_of(frame)
        self._left_by_backward = self._states() if self._looks else {}

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether to skip this step, because it is inside a window. The gradients of a skipped step are kept."""
        self._stepped = True
        if is_alone() or self._in_step or self._steps == 1:
            return False
        window = self._windows.setdefault(optimizer, _Window(optimizer))
        if window.backward == self.backwards:
            raise UsageError(
                f"{script_place()} calls {type(optimizer).__name__}.step() without a backward since its last step, but parwrap.accumulate "
                "adds up the gradients of backwards. Call loss.backward() before each step, or train this part without parwrap.accumulate."
            )
        window.backward = self.backwards
        if not self._told and len(window.batches) < BY_HAND:
            self._note_by_hand(window)
        self._batches.clear()
        if window.steps == self._steps - 1:
            self._complete([window])
            window.begin()
            return False
        if self._looks and window.site is not None:
            self._look(optimizer)
        window.keep()
        window.site, window.clips = self._site, list(self._clips)
        self._skipped += [(p, *_state(p.grad)) for p in parameters_of(optimizer) if p.grad is not None]
        return True

    def drew(self, of: int, number: int) -> None:
        """Note that the pass with the id ``of`` has drawn its batch ``number``."""
        self._drawn = of, number

    def _note_by_hand(self, window: _Window) -> None:
        """Warn once if each of the first steps has followed several backwards at one line, on different batches of a pass."""
        window.batches.append(max(map(len, self._batches.values()), default=0))
        if len(window.batches) == BY_HAND and min(window.batches) > 1:
            self._told, number = True, window.batches[-1]
            warn(
                f"parwrap: {script_place()} runs {number} backwards for each step, on a batch each, so accumulate({self._steps}) steps "
                f"once every {number * self._steps} batches. Remove one of the two: accumulate, or what accumulates by hand. This is shown "
                "once."
            )

    def clip(self, clip: Clip) -> Any:
        """Clip before the step that ends a window. Before a skipped step, only note ``clip`` and return the norm."""
        if is_alone() or self._in_step or self._steps == 1:
            return clip.run()
        clipped = {id(p) for p in clip.parameters}
        about = [each for each in self._windows.values() if not clipped.isdisjoint(map(id, parameters_of(each.optimizer)))]
        full = [window for window in about if window.steps == self._steps - 1]
        if full:
            self._complete(full)
            return clip.run()
        self._clips.append(clip)
        return clip.norm()

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        if is_alone() or self._steps == 1:
            return closure
        raise UsageError(
            f"{script_place()} calls {type(optimizer).__name__}.step(closure), which cannot be accumulated: the closure computes the "
            "gradients inside the step. Call backward() and then step() without a closure, or train this part without parwrap.accumulate."
        )

    def _drop_stale(self) -> None:
        """Set ``.grad`` to ``None`` where it still holds the gradient of a skipped step, because the loop has not zeroed it."""
        for p, *before in self._skipped:
            if p.grad is not None and before == [*_state(p.grad)]:
                p.grad = None
        self._skipped.clear()
        self._clips.clear()

    def _put_back(self, windows: Iterable[_Window]) -> None:
        """Add the sums of the skipped steps of ``windows`` to ``.grad``, once for a parameter that two optimizers share."""
        sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for window in windows:
            window.closing = True
            sums.update(window.sums)
        with torch.no_grad():
            for p, total in sums.values():
                p.grad = total.clone() if p.grad is None else total + p.grad

    def _complete(self, windows: list[_Window]) -> None:
        """Add up and average the gradients of ``windows`` that no backward has closed, because the last backward was at another line."""
        late = [window for window in windows if not window.closing]
        if late:
            self._put_back(late)
            self._average(_parameters(late))

    # the end of a loader, of a loop that breaks, and of the function

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Read ``loader``. If the loop trains on it, the open windows end when it is exhausted, or when the script leaves it early."""
        if get_worker_info() is not None or is_alone():
            return original(loader)
        self._raise_failure()
        return _Pass(original(loader), self)

    def finish(self) -> None:
        """Apply the open windows after the function has returned.

        Raises:
            UsageError: the function has run backwards, but never called ``step``.
        """
        self._raise_failure()
        self._apply()
        if self.backwards and not self._stepped:
            raise UsageError(
                f"accumulate({self._steps}) is for a loop that calls optimizer.step() after each backward, but this loop never called "
                f"step: the gradients of {self.backwards} backwards are {self._steps} times too small. Remove accumulate, or step with an "
                "optimizer."
            )

    def end(self) -> None:
        """From now on, the end of a pass has no effect, because the function has returned."""
        self._ended = True

    def exhausted(self) -> None:
        """End the open windows: a loader was read to its end, and the loop has trained on it."""
        if not self._ended and threading.get_ident() == self._thread:
            self._apply()

    def left(self) -> None:
        """End the open windows: the loop has left a loader early. Called in a finalizer, which cannot raise: errors are raised later.

        If the garbage collector finalizes the pass, the windows go on with the next batches.
        """
        if not self._drops():
            return
        try:
            self.exhausted()
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _apply(self) -> None:
        """Take a step on the mean gradient of each open window, and begin another window for each optimizer."""
        windows = [window for window in self._windows.values() if window.steps and not window.closing and window.sums]
        if windows:
            for window in windows:
                for p in parameters_of(window.optimizer):  # a batch without a step counts for nothing
                    p.grad = None
                window.sums = {key: (p, total * (self._steps / window.steps)) for key, (p, total) in window.sums.items()}
            self._put_back(windows)
            self._average(_parameters(windows))
            self._in_step = True
            try:
                self._step(windows)
            finally:
                self._in_step = False
            for p in _parameters(windows):
                p.grad = None
        for window in self._windows.values():
            window.begin()
        self._skipped.clear()
        self._clips.clear()

    def _step(self, windows: list[_Window]) -> None:
        for window in windows:
            if window.scaler is not None and window.clips:
                window.scaler.unscale_(window.optimizer)
        for clip in {id(clip): clip for window in windows for clip in window.clips}.values():
            clip.run_later()
        for window in windows:
            if window.scaler is None:
                window.optimizer.step()
            else:
                window.scaler.step(window.optimizer)
        for scaler in {id(window.scaler): window.scaler for window in windows if window.scaler is not None}.values():
            scaler.update()

    # a script's own scaler

    def use_scaler(self, call: ScalerCall) -> Any:
        """Let a script's own scaler act only where a window ends; until then gradients stay scaled."""
        if is_alone() or self._steps == 1:
            return call.run()
        if call.optimizer is None:
            used, self._scaler_used = self._scaler_used, False
            return call.run() if used else None
        window = self._windows.setdefault(call.optimizer, _Window(call.optimizer))
        window.scaler = call.scaler
        if call.name == "unscale_":
            if window.steps < self._steps - 1:
                return None
            self._complete([window])
        elif self.skips(call.optimizer):
            return None
        self._scaler_used = self._in_step = True
        try:
            return call.run()
        finally:
            self._in_step = False

    # gradients that the loop changes by hand

    def _states(self) -> dict[int, tuple[weakref.ref[torch.Tensor], int]]:
        parameters = (p for window in self._windows.values() for p in parameters_of(window.optimizer))
        return {id(p): _state(p.grad) for p in parameters if p.grad is not None}

    def _look(self, optimizer: Optimizer) -> None:
        """Say once that the loop has changed gradients between backward and the step, if it has."""
        self._looks -= 1
        before = self._left_by_backward
        if any(before.get(id(p)) != _state(p.grad) for p in parameters_of(optimizer) if p.grad is not None):
            self._looks = 0
            warn(
                "parwrap: gradients were changed between backward() and step(). With parwrap.accumulate, .grad holds the gradient of one "
                "batch there. Only after the last batch does it hold the sum of all, so the change acts on single batches. To clip, "
                "use torch.nn.utils.clip_grad_norm_, which acts on the sum only. This is shown once."
            )


class _Pass(Batches):
    """Tells ``accumulation`` when a pass in which the loop has trained ends."""

    def __init__(self, batches: Iterator, accumulation: Accumulation) -> None:
        super().__init__(batches)
        self._accumulation = accumulation
        self._before, self._exhausted, self._count = accumulation.backwards, False, 0

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        try:
            batch = super().__next__()
        except StopIteration:
            self._exhausted = True
            if self._accumulation.backwards > self._before:
                self._accumulation.exhausted()
            raise
        self._count += 1
        self._accumulation.drew(id(self), self._count)
        return batch

    def __del__(self) -> None:
        if not self._exhausted and self._accumulation.backwards > self._before:
            self._accumulation.left()


def _state(grad: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], int]:
    """The identity and the version of ``grad``, which show whether it was replaced or changed in place. They do not keep it alive."""
    return weakref.ref(grad), version_of(grad)


def _parameters(windows: Iterable[_Window]) -> list[torch.Tensor]:
    return list({id(p): p for window in windows for p in parameters_of(window.optimizer)}.values())
