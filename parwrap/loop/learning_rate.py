"""The interceptor that lets optimizers step at a larger learning rate, because the ranks together take a larger batch.

Outside the step, the user and the schedules see ``param_groups`` unchanged. A custom optimizer may set its own rate in ``step``: a number
computed from the larger rate is divided again, and any other number is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import intercepting
from parwrap.places import warn
from parwrap.torch_private.optimizer import step_hooks
from parwrap.torch_private.tensors import version_of

__all__ = ["learning_rates_times"]


@contextmanager
def learning_rates_times(factor: Callable[[], float]) -> Iterator[None]:
    """Multiply the learning rate by ``factor()`` in every optimizer step inside the block."""
    rates = _LearningRates(factor)
    try:
        with intercepting([rates]):
            yield
    finally:
        rates.put_back()


class _Scaled(float):
    """A learning rate times the factor. Numbers computed from it have this type too."""


def _computed(name: str) -> Callable[..., Any]:
    operation = getattr(float, name)

    def compute(self: _Scaled, *others: Any) -> Any:
        result = operation(self, *others)
        return _Scaled(result) if type(result) is float else result

    return compute


for _name in ("mul", "rmul", "truediv", "add", "radd", "sub", "rsub"):
    setattr(_Scaled, f"__{_name}__", _computed(f"__{_name}__"))


class _Changed(NamedTuple):
    """The rate of a parameter group during a step.

    Attributes:
        group: the parameter group of the optimizer.
        before: the group's rate outside of the step.
        during: the rate to step at.
        version: the version of ``during``, if it is a tensor.
    """

    group: dict[str, Any]
    before: Any
    during: Any
    version: int


class _LearningRates(Interceptor):
    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._times = 1.0
        self._changed: list[_Changed] = []
        self._sets_own: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def step(self, optimizer: Optimizer) -> None:
        """Set the larger learning rates before ``optimizer`` steps."""
        self.put_back()
        self._times = self._factor()
        marked = not _is_torchs(optimizer)
        for group in optimizer.param_groups:
            if isinstance(before := group.get("lr"), (int, float, torch.Tensor)):  # Adafactor's may be None
                scaled = before * self._times
                group["lr"] = _Scaled(scaled) if marked and isinstance(scaled, float) else scaled
                self._changed.append(_Changed(group, before, group["lr"], version_of(scaled) if isinstance(scaled, torch.Tensor) else 0))

    def stepped(self, optimizer: Optimizer) -> None:
        """Restore the learning rates after the step."""
        if self.put_back() and self._times != 1:
            steps = self._sets_own[optimizer] = self._sets_own.get(optimizer, 0) + 1
            if steps == 2:  # a decay in the step applies to the steps after it
                self._warn(optimizer)

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Keep the larger rates of this step while other optimizers step in ``closure``. Restore them if it raises, because torch calls no
        hook after such a step."""

        def compute() -> Any:
            changed, self._changed = self._changed, []
            try:
                return closure()
            except BaseException:
                for each in changed:
                    self._put_back(each)
                changed = []
                raise
            finally:
                self.put_back()
                self._changed = changed

        return compute

    def put_back(self) -> bool:
        """Restore the learning rates that are still changed, also after a step that raised an error.

        Returns:
            Whether the optimizer has set a rate that does not come from the larger one.
        """
        changed, self._changed = self._changed, []
        own = [self._put_back(each) for each in changed]
        return any(own)

    def _put_back(self, changed: _Changed) -> bool:
        group, before, during, version = changed
        now = group.get("lr")
        if now is during:
            group["lr"] = before
            if isinstance(during, torch.Tensor) and version_of(during) != version:  # changed in place
                before.copy_(during / self._times)
            return False
        if isinstance(now, _Scaled):
            group["lr"] = float(now) / self._times
            return False
        return now is not None

    def _warn(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        warn(
            f"parwrap: {name} sets lr in its step(), to a number that is not computed from the lr in its param_groups. parwrap does not "
            f"change that number, so lr='linear' or 'sqrt' may have no effect on {name}: multiply the learning rate in its step() by "
            f"{self._times:.4g} yourself, and use lr='keep'. This is shown once."
        )


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether a step of ``optimizer`` runs only torch's own code, which never sets the rate."""
    before, after = step_hooks(optimizer)
    return type(optimizer).step.__module__.startswith("torch.") and not before and not after
