"""``@accumulate``: a loop that steps after each batch takes an optimizer step every few batches.

Checks the options and opens the interceptor; ``accumulation/`` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parwrap.accumulation.accumulation import Accumulation
from parwrap.accumulation.by_hand import ByHand
from parwrap.accumulation.over_ranks import OverRanks
from parwrap.api import distributed
from parwrap.errors import UsageError
from parwrap.intercept.table import intercepting
from parwrap.session.feature_scope import FeatureDecorator

__all__ = ["accumulate", "count_batch"]

AUTO = "auto"

_open: list[Accumulation | ByHand] = []


class accumulate(FeatureDecorator):
    """Take an optimizer step every ``steps`` batches, as if each batch were that much larger.

    Write ``@accumulate(steps=4)``, ``@accumulate(4)`` or ``with accumulate(steps=4):``, with or without ``distributed``. Inside another
    ``accumulate``, it has no effect, and a different ``steps`` is an error. Inside a window of ``steps`` batches, ``backward`` sends
    nothing to other ranks, and ``step`` and clipping do nothing. The last batch leaves the mean gradient of the window in ``.grad``. The
    last window of an epoch may be smaller.

    ``@accumulate("auto")`` is for a loop that accumulates by hand, and changes only how often gradients are sent: once for each step. It
    learns from the loop how many backward passes precede a step. If the loop steps, clips or unscales sooner, the remaining gradients are
    averaged first.

    Args:
        steps: batches in a window, from 1, or ``"auto"``.

    Raises:
        UsageError: ``steps`` has another value. Inside the function: a step has a closure, or the loop never calls ``step``.

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
        super().__init__()
        if steps != AUTO and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise UsageError(
                f"accumulate(steps={steps!r}): steps must be a positive integer, the number of batches in one optimizer step, or 'auto' "
                "for a loop that accumulates by hand."
            )
        self._steps = steps
        self.batches_per_step = 1 if steps == AUTO else steps

    def interceptor(self) -> Accumulation | ByHand:
        if strategy := distributed.strategy():
            strategy.check_feature("accumulate")
        known = None if distributed.steps_apart() else distributed.parts()
        over_ranks = OverRanks(known.group, known.loop, known.strategy) if known else None

        def over_ranks_now() -> OverRanks | None:
            now = None if distributed.steps_apart() else distributed.parts()
            if now is not None and now is not known:
                raise UsageError("parwrap.accumulate was opened before parwrap.distributed: open it inside, or decorate the same function.")
            return over_ranks if now else None

        def averaging() -> OverRanks | None:
            now = over_ranks_now()
            return now if now and now.averages_gradients else None

        return ByHand(averaging) if self._steps == AUTO else Accumulation(self._steps, over_ranks_now)

    @contextmanager
    def opened(self, module: str | None) -> Iterator[None]:
        interceptor = self.interceptor()
        _open.append(interceptor)
        try:
            with intercepting([interceptor], module):
                yield
                interceptor.finish()
        finally:
            interceptor.end()
            _open.remove(interceptor)

    def described(self) -> str:
        return f"accumulate({self._steps!r})"

    def asked(self) -> Any:
        return self._steps

    def check_within(self, around: FeatureDecorator) -> None:
        raise UsageError(
            f"parwrap.accumulate({self.asked()!r}) cannot be opened inside parwrap.accumulate({around.asked()!r}), because a batch "
            "belongs to only one window. Use the same steps for both, or remove one of them. The option --accumulate counts as one of "
            "them too."
        )


def count_batch(total: float) -> None:
    """Weight the next batch in the open window by ``total``, its number of tokens or samples on all ranks together."""
    if _open:
        _open[-1].count(total)
