"""Dynamic loss scaling for fp16, without edits to ``backward``, ``step`` or clipping.

The interceptor multiplies losses by the scale, checks the gradients after each backward, and skips the steps of optimizers with non-finite
gradients. Because ranks average gradients, one that is not finite on one rank is not finite on any, and all ranks skip. ``unscaling.py``
unscales gradients, ``finite.py`` checks them, and ``loss_scale.py`` has the scale and decides when it changes.
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
from parwrap.precision.finite import Found
from parwrap.precision.loss_scale import AmpState, Iterations, Policy
from parwrap.precision.unscaling import Unscaling
from parwrap.precision.user_managed import stand_aside, warn_once

__all__ = ["Scaling"]

KEY = "parwrap.amp"
"""The key of the scale in the state of an optimizer, where torch reads only ``state`` and ``param_groups``."""


class Scaling(Interceptor):
    """Scales losses, and skips steps with non-finite gradients.

    Args:
        state: the object with the scale.
    """

    def __init__(self, state: AmpState) -> None:
        self._state, self._loop = state, Loop()
        self._unscaling, self._iterations = Unscaling(), Iterations(state.end_iteration)
        self._found: weakref.WeakKeyDictionary[Optimizer, Found] = weakref.WeakKeyDictionary()
        self._asked: weakref.ref[Optimizer] | None = None
        self._begun = self._anew = self._running = self._user_managed = False
        self._find_optimizers()

    def begin(self) -> None:
        """Begin a call of the user's function. Results of earlier checks still hold."""
        self._begun = self._anew = self._state.restored = False

    @intercepts
    def own_parameters(self, optimizer: Optimizer) -> None:
        """Begin a separate training, with a new scale, if an optimizer is built before the first backward pass."""
        if not (self._begun or self._anew or self._state.restored):
            self._anew = True
            self._state.reset()
            self._iterations.forget()
        self._loop.own_parameters(optimizer)
        self._iterations.expect(optimizer)

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call`` on the scaled loss, unscale the gradients, and check whether they are finite."""
        if self._user_managed or self._running:
            if self._running:  # inside another backward pass, as in re-entrant checkpointing, the incoming gradient is already scaled
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
        """Whether ``optimizer`` would step with a non-finite gradient."""
        self._asked = weakref.ref(optimizer)
        self._iterations.expect(optimizer)
        is_known = any(known is optimizer for known in self._loop.optimizers()) or self._loop.is_of_one_batch(optimizer)
        if not is_known:  # it was built between two calls
            self._loop.own_parameters(optimizer)
            self._found[optimizer] = Found(parameters_of(optimizer), later=True)
        found = self._found.get(optimizer)
        return found is not None and self._counted(optimizer, found)

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that removes its gradients if they are not finite; optimizers skip parameters without a gradient."""
        asked, self._asked = self._asked, None
        optimizer = asked() if asked else None
        if optimizer is None:
            return closure  # of a skipped step, or one that a subclass forwards

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
        """Check before gradients are clipped, because clipping may make them finite. No second check is needed afterwards."""
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
        """Stop scaling, because the script uses its own scaler."""
        if not isinstance(scaler, Policy) and scaler.is_enabled() and not self._user_managed:
            self._user_managed = True
            self._found.clear()
            stand_aside("GradScaler", "it scales no loss and skips no step itself here")

    @intercepts
    def optimizer_state(self, optimizer: Optimizer, save: Callable[[], Any]) -> Any:
        """The state of ``optimizer``, with the scale in it."""
        state = save()
        return state if self._user_managed else {**state, KEY: self._state.state_dict()}

    @intercepts
    def load_optimizer_state(self, optimizer: Optimizer, load: Callable[[Any], None], state: Any) -> None:
        """Continue from the scale in ``state``, and load the rest of it."""
        self._state.load_state_dict(state.get(KEY, {}))
        load({name: value for name, value in state.items() if name != KEY})

    def _counted(self, optimizer: Optimizer, found: Found) -> bool:
        """Whether a gradient was not finite. Such a step is counted once."""
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
        """Check the gradients of the backward.

        If ranks have not averaged them, no step uses them yet, and other ranks do not know them: they are checked later.
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
                "the gradient of a tensor that no optimizer owns overflowed in float16. It was set to 0, because there is no optimizer "
                "step that parwrap.amp could skip. If the script uses this gradient, compute in bf16."
            )
        if not self._found or (overflowed and not any(Found(parameters_of(optimizer)).any for optimizer in self._loop.optimizers())):
            self._state.end_iteration(bool(overflowed))

    def _owned(self) -> set[int]:
        """The ids of the parameters of known optimizers."""
        return {id(p) for optimizer in self._loop.optimizers() for p in parameters_of(optimizer)}

    def _overflowed(self) -> list[torch.Tensor]:
        """The leaf tensors of no known optimizer whose gradients from the backward are not finite."""
        owned = self._owned()
        unowned = [leaf for key, leaf in self._unscaling.leaves.items() if key not in owned and leaf.grad is not None]
        return [leaf for leaf in unowned if Found([leaf]).any] if Found(unowned).any else []
