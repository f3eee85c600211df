"""Dynamic loss scaling for fp16, with no edit to ``backward``, ``step`` or clipping.

The actor multiplies losses by the scale, looks at the gradients after each backward, and skips the steps of optimizers whose
gradients are not finite. Since ranks average, a gradient that is not finite on one rank is so on all, and all of them skip.
How gradients come to be true-scale is in ``unscaling.py``, the scale in ``state.py``, and when it changes in ``iterations.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.loop import Loop
from parwrap.precision.aside import stand_aside, warn_once
from parwrap.precision.iterations import Iterations
from parwrap.precision.state import AmpState, Policy
from parwrap.precision.unscaling import Unscaling
from parwrap.verbs.backward import Backward

__all__ = ["Scaling"]

KEY = "parwrap.amp"
"""Of the scale in the state of an optimizer, where torch reads nothing but ``state`` and ``param_groups``."""


class Scaling:
    """Scales losses, and skips steps that would apply gradients that are not finite.

    Args:
        state: holds the scale.
    """

    def __init__(self, state: AmpState) -> None:
        self._state, self._loop = state, Loop()
        self._unscaling, self._iterations = Unscaling(), Iterations(state.end_iteration)
        self._found: weakref.WeakKeyDictionary[Optimizer, _Found] = weakref.WeakKeyDictionary()
        self._asked: Optimizer | None = None
        self._begun = self._anew = self._running = self._aside = False
        self._find_optimizers()

    def begin(self) -> None:
        """A call of the user's function begins; what was found out in another still holds."""
        self._begun = self._anew = self._state.restored = False

    def own_parameters(self, optimizer: Optimizer) -> None:
        """An optimizer that is built before the first backward begins a training of its own, with a scale of its own."""
        if not (self._begun or self._anew or self._state.restored):
            self._anew = True
            self._state.reset()
            self._iterations.forget()
        self._loop.own_parameters(optimizer)
        self._iterations.expect(optimizer)

    def backward(self, call: Backward) -> None:
        """Run ``call`` on the scaled loss, leave true-scale gradients, and look whether they are finite."""
        if self._aside or self._running:
            if self._running:  # inside of another, as re-entrant checkpointing does: the gradient that it begins with is scaled
                self._unscaling.nested(call, self._owned())
            call.run()
            return
        self._begun = self._running = True
        try:
            scale = self._state.scale
            with self._unscaling.of(call, scale):
                call.scaled(scale).run()
            self._look()
        finally:
            self._running = False
            self._unscaling.leaves.clear()

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether the last backward has left a gradient in ``optimizer`` that is not finite."""
        self._asked = optimizer
        self._iterations.expect(optimizer)
        if not any(known is optimizer for known in self._loop.optimizers()):  # it was built between two calls
            self._loop.own_parameters(optimizer)
            self._found[optimizer] = _Found(p.grad for p in _parameters(optimizer))
        found = self._found.get(optimizer)
        return found is not None and self._counted(optimizer, found)

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are gone if they are not finite, which optimizers pass over."""
        optimizer, self._asked = self._asked, None
        if optimizer is None:
            return closure  # of a step that is skipped, or that a subclass hands on

        def with_finite_gradients() -> Any:
            loss = closure()
            found = self._found.pop(optimizer, None)
            if found is not None and self._counted(optimizer, found):
                for p in _parameters(optimizer):
                    p.grad = None
            return loss

        return with_finite_gradients

    def retain_grad(self, tensor: torch.Tensor) -> None:
        self._unscaling.retain_grad(tensor)

    def scale_by_hand(self, scaler: torch.amp.GradScaler) -> None:
        """The script has a scaler of its own, which it is left to."""
        if not isinstance(scaler, Policy) and scaler.is_enabled() and not self._aside:
            self._aside = True
            self._found.clear()
            stand_aside("GradScaler", "it scales no loss and skips no step itself here")

    def state_dict(self, state: Any) -> Any:
        """The state of an optimizer, with the scale in it."""
        return state if self._aside else {**state, KEY: self._state.state_dict()}

    def load_state_dict(self, state: Any) -> Any:
        """The state of an optimizer, after the scale in it was taken out and gone on from."""
        self._state.load_state_dict(state.get(KEY, {}))
        return {name: value for name, value in state.items() if name != KEY}

    def _counted(self, optimizer: Optimizer, found: _Found) -> bool:
        """Whether a gradient was not finite; the step is counted once."""
        if not found.counted:
            found.counted = True
            self._state.skipped_steps += found.any
            self._iterations.stepped(optimizer, found.any)
        return found.any

    def _find_optimizers(self) -> None:
        self._loop.find_optimizers()
        for optimizer in self._loop.optimizers():
            self._iterations.expect(optimizer)

    @torch.no_grad()
    def _look(self) -> None:
        """Look at what the backward, and the averaging over ranks, has left."""
        overflowed = self._overflowed()
        if overflowed:
            self._find_optimizers()  # theirs may have been built between two calls
            overflowed = self._overflowed()
        for optimizer in self._loop.optimizers():
            self._found[optimizer] = _Found(p.grad for p in _parameters(optimizer))
        for leaf in overflowed:
            leaf.grad.detach().zero_()  # type: ignore[union-attr]
            warn_once(
                "the gradient of a tensor that no optimizer owns has overflowed in float16. It was set to 0, since there is no step "
                "that parwrap.amp could skip."
            )
        if not self._found or (overflowed and not any(found.any for found in self._found.values())):
            self._state.end_iteration(bool(overflowed))

    def _owned(self) -> set[int]:
        """The ids of the parameters of known optimizers."""
        return {id(p) for optimizer in self._loop.optimizers() for p in _parameters(optimizer)}

    def _overflowed(self) -> list[torch.Tensor]:
        """The leaf tensors of no known optimizer that the backward has left gradients in which are not finite."""
        owned = self._owned()
        unowned = [leaf for key, leaf in self._unscaling.leaves.items() if key not in owned]
        return [leaf for leaf in unowned if leaf.grad is not None and _Found([leaf.grad]).any]


class _Found:
    """Whether gradients are finite, which a GPU is asked for only when it must be known.

    Attributes:
        counted: whether the step that it is about was counted.
    """

    def __init__(self, grads: Iterable[torch.Tensor | None]) -> None:
        self.counted = False
        self._flags: list[torch.Tensor] = []
        alike: dict[Any, list[torch.Tensor]] = {}
        for grad in grads:
            if grad is not None and grad.requires_grad:  # with a graph of its own, for which even the kernel below is a change
                self._flags.append(~grad.isfinite().all())
            elif grad is not None:
                alike.setdefault((grad.device, grad.dtype), []).append(grad._values() if grad.is_sparse else grad)
        for (device, _), same in alike.items():
            self._flags.append(torch.zeros((), device=device))
            # GradScaler's own kernel, multiplying by 1
            torch._amp_foreach_non_finite_check_and_unscale_(same, self._flags[-1], torch.ones((), device=device))

    @property
    def any(self) -> bool:
        """Whether one is infinite or not a number."""
        return any(flag.item() for flag in self._flags)


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
