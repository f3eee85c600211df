"""``@amp``: mixed precision for a plain training function or script, without changes to backward, step or clipping.

Opens autocast and makes the interceptors of ``precision/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.decorators.inventory import reachable
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import intercepting
from parwrap.options import is_number
from parwrap.precision.autocasting import Autocasting
from parwrap.precision.choice import LEVELS, check, choose, missing_named
from parwrap.precision.halving import HalfForGood, HalfInCalls
from parwrap.precision.loss_scale import AmpState
from parwrap.precision.scaling import Scaling
from parwrap.ranks.device import current_device
from parwrap.ranks.group import current, say

__all__ = ["amp", "amp_state"]

HALVING = {"in calls": HalfInCalls, "for good": HalfForGood}
"""The interceptor for each value of ``Precision.model`` that casts models."""


class amp(ScopeDecorator):
    """Compute in half precision where it is faster; with fp16, also scale the loss dynamically.

    Write ``@amp``, ``@amp(dtype="fp16")`` or ``with amp():``. ``loss.backward()`` leaves unscaled gradients. With a loss scale, a step with
    a gradient that is not finite is skipped on every rank. The scale is kept from call to call, but begins again if the function builds an
    optimizer before its first backward and has loaded no state. Inside another ``amp``, one without a dtype, level or device has no effect.
    One with any of these sets the precision of the forward; if the outer ``amp`` has a loss scale, the inner one uses it.

    Args:
        dtype: ``"bf16"``, ``"fp16"`` (which adds the loss scale), or ``"auto"``: bf16 where the device has it, otherwise fp16.
            ``"bfloat16"``, ``"float16"``, torch's own dtypes and the levels are accepted too.
        level: instead of a dtype, one of Apex's levels. ``"O0"``: float32, without changes; ``"O1"``: as ``"fp16"``; ``"O2"``:
            a float16 model with float32 BatchNorm, float32 master weights and the loss scale; ``"O3"``: a pure float16 model, which
            is still float16 after the function returns.
        device: ``"cuda"`` or ``"cpu"``; by default that of the ranks, or without ranks a GPU if torch can use one.
        init_scale: the first scale.
        growth_factor: multiplies the scale after ``growth_interval`` iterations in a row without a skipped step.
        backoff_factor: multiplies the scale after an iteration with a skipped step.
        growth_interval: how many iterations without a skipped step it takes until the scale grows.

    Raises:
        UsageError: an unknown option or value; an operation that the device lacks in half precision.

    >>> @amp(dtype="bf16")
    ... def train(model, x):
    ...     return model(x).dtype
    >>> train(torch.nn.Linear(2, 2), torch.ones(1, 2))
    torch.bfloat16
    """

    layer = 20

    def __init__(
        self,
        dtype: str | torch.dtype = "auto",
        level: str | None = None,
        *,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if level is None and dtype in LEVELS:
            dtype, level = "auto", str(dtype)
        check(dtype, level)
        if device not in (None, "cpu", "cuda"):
            raise UsageError(f"device={device!r} is not a device type for parwrap.amp: use 'cuda' or 'cpu', or remove it.")
        self._policy: dict[str, Any] = {}
        for name, value, good, wanted in (
            ("init_scale", init_scale, lambda x: x > 0, "a positive number"),
            ("growth_factor", growth_factor, lambda x: x > 1, "a number above 1"),
            ("backoff_factor", backoff_factor, lambda x: 0 < x < 1, "a number between 0 and 1"),
            ("growth_interval", growth_interval, lambda x: x >= 1, "a positive number of iterations"),
        ):
            if not (is_number(value) and good(value)):
                raise UsageError(f"{name}={value!r} is not {wanted}.")
            self._policy[name] = value
        self._asked = dtype, level, device
        self._state: AmpState | None = None
        self._scaling: Scaling | None = None
        self._said: set[str] = set()

    @contextmanager
    def scope(self, call: Call) -> Iterator[None]:
        if _open and self._asked == ("auto", None, None):
            yield
            return
        dtype, level, device = self._asked
        precision, optimizers = choose(dtype, level, device or _device()), reachable(Optimizer, call)
        module = module_of(call.function)
        with ExitStack() as opened:
            opened.enter_context(missing_named(precision.device, precision.dtype))
            interceptors: list[Interceptor] = [HALVING[precision.model](optimizers)] if precision.model else []
            outer = _open[-1] if _open else None
            if outer is None or not outer.scales:
                state = self._state = self._state or AmpState(precision.scales, **self._policy)
                interceptors += self._scalings(state, optimizers)
            else:
                state = outer
            _open.append(state)
            opened.callback(_open.pop)
            if precision.autocasts or torch.is_autocast_enabled(precision.device):
                casting = Autocasting(precision.device, precision.dtype if precision.autocasts else None, self._say)
                opened.enter_context(casting.around())
                interceptors.append(casting)
            opened.enter_context(intercepting(interceptors, module))
            yield

    def _scalings(self, state: AmpState, optimizers: list[Optimizer]) -> list[Scaling]:
        """A list with the interceptor of the loss scale, which is the same in every call; empty if ``state`` does not scale."""
        if not state.scales:
            return []
        self._scaling = self._scaling or Scaling(state, self._say)
        self._scaling.begin(optimizers)
        return [self._scaling]

    def _say(self, text: str) -> None:
        """Print a line on rank 0, once."""
        if text not in self._said:
            say(text)
        self._said.add(text)


def amp_state() -> AmpState:
    """The loss scale and the number of skipped steps of the enclosing ``amp``, for logging and checkpoints.

    It has ``scale``, ``skipped_steps``, ``state_dict()`` and ``load_state_dict(state)``. Outside of ``amp`` and without scaling, the scale
    is 1.

    >>> with amp(dtype="fp16", init_scale=1024.0):
    ...     amp_state()
    AmpState(scale=1024.0, skipped_steps=0)
    >>> amp_state()
    AmpState(scale=1.0, skipped_steps=0)
    """
    return _open[-1] if _open else AmpState(scales=False)


def _device() -> str:
    group = current()
    return (current_device() if group is None else group.device).type


_open: list[AmpState] = []
"""The states of the open scopes, the innermost last."""
