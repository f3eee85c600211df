"""``@accumulate``: a loop that steps after each batch takes an optimizer step every few batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parwrap.decorators.distributed import average_gradients, no_sync
from parwrap.decorators.scope import Call, ScopeDecorator, describe, module_of
from parwrap.errors import UsageError
from parwrap.intercept.torch_calls import intercepting
from parwrap.loop.accumulation import Accumulation
from parwrap.loop.passes import script_drops
from parwrap.places import warn

__all__ = ["accumulate"]


class accumulate(ScopeDecorator):
    """Take an optimizer step every ``steps`` batches, as if each batch were that much larger.

    Write ``@accumulate(steps=4)``, ``@accumulate(4)`` or ``with accumulate(steps=4):``, with or without ``distributed``. Each optimizer
    takes one step for every ``steps`` calls of its ``step()``, on the mean of their gradients. The other calls of ``step``, and clipping
    before them, change nothing. The backwards before them send nothing to other ranks, except with fsdp. When a loader or the function
    ends, the optimizer steps on the mean of the batches since its last step. Inside another ``accumulate`` with the same ``steps`` it has
    no effect; with a different one it is an error.

    Args:
        steps: the number of calls of ``step()`` for one optimizer step, at least 1.

    Raises:
        UsageError: ``steps`` is not an integer of at least 1. Inside the function: a step has a closure, a step follows another without a
            backward, or the loop never calls ``step``.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> @accumulate(steps=2)
    ... def train(batches):
    ...     optimizer = torch.optim.SGD([weight], lr=1.0)
    ...     for batch in batches:
    ...         optimizer.zero_grad()
    ...         (batch * weight).sum().backward()
    ...         optimizer.step()
    >>> train([1.0, 3.0]); weight.item()
    -2.0
    """

    layer = 30

    def __init__(self, steps: Any = None) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UsageError(f"accumulate(steps={steps!r}): steps must be a positive integer, the number of batches in one optimizer step.")
        self._steps = steps
        self._singles = 0

    @contextmanager
    def scope(self, call: Call) -> Iterator[None]:
        if _open:
            steps = _open[-1]._steps
            if self._steps != steps:
                around = f"--accumulate {steps} of the command" if _open[-1].of_command else f"parwrap.accumulate({steps})"
                raise UsageError(
                    f"parwrap.accumulate({self._steps}) cannot be opened inside {around}, because each batch counts for one step only. Use "
                    "the same number for both, or remove one of the two."
                )
            yield
            return
        with script_drops() as drops:
            accumulation = Accumulation(self._steps, no_sync, average_gradients, drops)
            _open.append(self)
            try:
                with intercepting([accumulation], module_of(call.function)):
                    yield
                    accumulation.finish()
                    if accumulation.backwards == 1 < self._steps:
                        self._note_single(call)
            finally:
                accumulation.end()
                _open.pop()

    def _note_single(self, call: Call) -> None:
        """Warn, in the second such call, that each call trains on one batch only, so that every batch gets a step of its own."""
        self._singles += 1
        if self._singles == 2:
            warn(
                f"parwrap: {describe(call.function) if call.function else 'the block'} has one backward each time it runs, and accumulate("
                f"{self._steps}) ends when it returns, so each batch gets a step of its own. Put accumulate around the loop over the "
                "batches."
            )


_open: list[accumulate] = []
"""The open scope, if any."""
