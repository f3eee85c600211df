"""Dynamic loss scaling for fp16, with no edit to ``backward``, ``step`` or clipping.

The interceptor multiplies losses by the scale, looks at the gradients after each backward, and skips the steps of optimizers whose
gradients are not finite. Since ranks average, a gradient that is not finite on one rank is so on all, and all of them skip.
How gradients come to be true-scale is in ``unscaling.py``, how they are looked at in ``finite.py``, and the scale and when it changes
in ``loss_scale.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.precision.aside import stand_aside, warn_once
from parwrap.precision.finite import Found
from parwrap.precision.loss_scale import AmpState, Iterations, Policy
from parwrap.precision.unscaling import Unscaling

__all__ = ["Scaling"]

KEY = "parwrap.amp"
"""Of the scale in the state of an optimizer, where torch reads nothing but ``state`` and ``param_groups``."""


class Scaling(Interceptor):
    """Scales losses, and skips steps that would apply gradients that are not finite.

    Args:
        state: holds the scale.
    """

    def __init__(self, state: AmpState) -> None:
        self._state, self._loop = state, Loop()
        self._unscaling, self._iterations = Unscaling(), Iterations(state.end_iteration)
        self._found: weakref.WeakKeyDictionary[Optimizer, Found] = weakref.WeakKeyDictionary()
        self._asked: weakref.ref[Optimizer] | None = None
        self._begun = self._anew = self._running = self._aside = False
        self._find_optimizers()

    def begin(self) -> None:
        """A call of the user's function begins; what was found out in another still holds."""
        self._begun = self._anew = self._state.restored = False

    @intercepts
    def own_parameters(self, optimizer: Optimizer) -> None:
        """An optimizer that is built before the first backward begins a training of its own, with a scale of its own."""
        if not (self._begun or self._anew or self._state.restored):
            self._anew = True
            self._state.reset()
            self._iterations.forget()
        self._loop.own_parameters(optimizer)
        self._iterations.expect(optimizer)

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call`` on the scaled loss, leave true-scale gradients, and look whether they are finite."""
        if self._aside or self._running:
            if self._running:  # inside another, as re-entrant checkpointing does: the gradient that it begins with is scaled
                self._unscaling.nested(call, self._owned())
            call.run()
            return
        self._begun = self._running = True
        try:
            scale = self._state.scale
            with self._unscaling.of(call, scale):
                call.scaled(scale).run()
            self._look(call.averaged)
        finally:
            self._running = False
            self._unscaling.leaves.clear()

    @intercepts
    def skips(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` would step with a gradient that is not finite."""
        self._asked = weakref.ref(optimizer)
        self._iterations.expect(optimizer)
        if not any(known is optimizer for known in self._loop.optimizers()):  # it was built between two calls
            self._loop.own_parameters(optimizer)
            self._found[optimizer] = Found(parameters_of(optimizer), later=True)
        found = self._found.get(optimizer)
        return found is not None and self._counted(optimizer, found)

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are gone if they are not finite, which optimizers pass over."""
        asked, self._asked = self._asked, None
        optimizer = asked() if asked else None
        if optimizer is None:
            return closure  # of a step that is skipped, or that a subclass hands on

        def with_finite_gradients() -> Any:
            loss = closure()
            found = self._found.pop(optimizer, None)
            if found is not None and self._counted(optimizer, found):
                for p in parameters_of(optimizer):
                    p.grad = None
            return loss

        return with_finite_gradients

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Look before a clip, which may make gradients finite that were not; what it changes needs no other look."""
        clipped = {id(p) for p in clip.parameters}
        about = [(each, found) for each, found in self._found.items() if not clipped.isdisjoint(id(p) for p in parameters_of(each))]
        for optimizer, found in about:
            found.look_again(parameters_of(optimizer))
        result = clip.run()
        for optimizer, found in about:
            found.accept(parameters_of(optimizer))
        return result

    @intercepts
    def retain_grad(self, tensor: torch.Tensor) -> None:
        self._unscaling.retain_grad(tensor)

    @intercepts
    def scale_by_hand(self, scaler: torch.amp.GradScaler) -> None:
        """The script has a scaler of its own, which it is left to."""
        if not isinstance(scaler, Policy) and scaler.is_enabled() and not self._aside:
            self._aside = True
            self._found.clear()
            stand_aside("GradScaler", "it scales no loss and skips no step itself here")

    @intercepts
    def optimizer_state(self, optimizer: Optimizer, save: Callable[[], Any]) -> Any:
        """The state of ``optimizer``, with the scale in it."""
        state = save()
        return state if self._aside else {**state, KEY: self._state.state_dict()}

    @intercepts
    def load_optimizer_state(self, optimizer: Optimizer, load: Callable[[Any], None], state: Any) -> None:
        """Go on from the scale in ``state``, and load the rest of it."""
        self._state.load_state_dict(state.get(KEY, {}))
        load({name: value for name, value in state.items() if name != KEY})

    def _counted(self, optimizer: Optimizer, found: Found) -> bool:
        """Whether a gradient was not finite; the step is counted once."""
        found.look_again(parameters_of(optimizer))
        if not found.counted:
            found.counted = True
            self._state.skipped_steps += found.any
            self._iterations.stepped(optimizer, found.any)
        return found.any

    def _find_optimizers(self) -> None:
        self._loop.find_optimizers()
        for optimizer in self._loop.optimizers():
            self._iterations.expect(optimizer)

    def _look(self, averaged: bool) -> None:
        """Look at what the backward has left.

        Where ranks have not averaged it, it is not what a step is taken with, and other ranks know nothing of it: that is looked at later.
        """
        overflowed = self._overflowed()
        if overflowed:
            self._find_optimizers()  # theirs may have been built between two calls
            overflowed = self._overflowed()
        for optimizer in self._loop.optimizers():
            self._found[optimizer] = Found(parameters_of(optimizer), later=not averaged)
        for leaf in overflowed:
            leaf.grad.detach().zero_()  # type: ignore[union-attr]
            warn_once(
                "the gradient of a tensor that no optimizer owns has overflowed in float16. It was set to 0, since there is no step "
                "that parwrap.amp could skip."
            )
        if not self._found or (overflowed and not any(Found(parameters_of(optimizer)).any for optimizer in self._loop.optimizers())):
            self._state.end_iteration(bool(overflowed))

    def _owned(self) -> set[int]:
        """The ids of the parameters of known optimizers."""
        return {id(p) for optimizer in self._loop.optimizers() for p in parameters_of(optimizer)}

    def _overflowed(self) -> list[torch.Tensor]:
        """The leaf tensors of no known optimizer that the backward has left gradients in which are not finite."""
        owned = self._owned()
        unowned = [leaf for key, leaf in self._unscaling.leaves.items() if key not in owned and leaf.grad is not None]
        return [leaf for leaf in unowned if Found([leaf]).any] if Found(unowned).any else []
