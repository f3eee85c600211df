"""Dynamic loss scaling for fp16, without edits to ``backward``, ``step`` or clipping.

The interceptor multiplies losses by the scale, unscales the gradients before the script sees them, and skips the steps of optimizers with
gradients that are not finite. Ranks average gradients: if one rank's gradient is not finite, the average is not, and all ranks skip.
``unscaling.py`` unscales gradients, and ``loss_scale.py`` decides when the scale changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.intercept.intercepted_calls import Backward, Clip
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.optimizers import parameters_of
from parwrap.precision.loss_scale import AmpState, Iterations
from parwrap.precision.unscaling import Unscaling
from parwrap.torch_private.amp import check_finite_and_unscale_
from parwrap.torch_private.tensors import sparse_values

__all__ = ["Scaling", "flags_of"]


class Scaling(Interceptor):
    """Scales losses, and skips steps with gradients that are not finite.

    Args:
        state: the object with the scale.
        say: prints a line on rank 0.
    """

    def __init__(self, state: AmpState, say: Callable[[str], None]) -> None:
        self._state, self._say = state, say
        self._unscaling, self._iterations = Unscaling(), Iterations(state.end_iteration)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._before_clipping: weakref.WeakKeyDictionary[Optimizer, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._begun = self._anew = self._running = self._user_managed = False

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Begin a call of the user's function, which can reach ``optimizers``."""
        self._begun = self._anew = self._state.restored = False
        for each in optimizers:
            self._note(each)

    def built(self, optimizer: Optimizer) -> None:
        """Reset the scale if a call of the user's function builds an optimizer before its first backward: this call trains anew.

        Otherwise the scale goes on from call to call.

        A scale that the script has restored in this call stays.
        """
        added = optimizer in self._optimizers  # a group of parameters, to an optimizer that exists
        if not (added or self._begun or self._anew or self._state.restored):
            self._anew = True
            self._state.reset()
            self._iterations.forget()
        self._note(optimizer)

    def copied(self, optimizer: Optimizer) -> None:
        self._note(optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._iterations.expect(optimizer)

    def backward(self, call: Backward) -> None:
        """Run ``call`` on the scaled loss and unscale the gradients, unless the script scales the loss itself."""
        if self._running:  # inside another backward, as re-entrant checkpoints do it: the incoming gradient is scaled already
            self._unscaling.nested(call, self._owned())
            call.run()
        elif self._user_managed:
            call.run()
        else:
            self._begun = self._running = True
            self._before_clipping.clear()
            try:
                with self._unscaling.of(call, self._state.scale):
                    call.times(self._state.scale).run()
                self._after_backward()
            finally:
                self._running = False
                self._unscaling.leaves.clear()

    def clip(self, clip: Clip) -> Any:
        """Check whether gradients are finite before they are clipped, because clipping may make them finite."""
        if not self._user_managed:
            clipped = {id(p) for p in clip.parameters}
            for optimizer in self._optimizers:
                if not clipped.isdisjoint(map(id, parameters_of(optimizer))):
                    self._before_clipping.setdefault(optimizer, []).extend(flags_of(parameters_of(optimizer)))
        return clip.run()

    def leaves_out(self, optimizer: Optimizer) -> bool:
        """Whether to skip the step of ``optimizer``, because one of its gradients is not finite."""
        if self._user_managed:
            return False
        found = _any([*flags_of(parameters_of(optimizer)), *self._before_clipping.pop(optimizer, [])])
        self._stepped(optimizer, found)
        return found

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that runs ``closure`` and then removes all gradients if one is not finite, so that the step changes nothing."""

        def with_finite_gradients() -> Any:
            loss = closure()
            if not self._user_managed:
                found = _any(flags_of(parameters_of(optimizer)))
                self._stepped(optimizer, found)
                for p in parameters_of(optimizer) if found else ():
                    p.grad = None
            return loss

        return with_finite_gradients

    def retain_grad(self, tensor: torch.Tensor) -> None:
        self._unscaling.retain_grad(tensor)

    def scaled(self, loss: Any, scale: torch.Tensor, result: Any) -> None:
        """Stop scaling, because the script uses its own scaler."""
        if not self._user_managed:
            self._user_managed = True
            self._say(
                "this script uses GradScaler itself, so parwrap.amp leaves it alone: parwrap.amp scales no loss and skips no step. To let "
                "parwrap.amp do that, remove GradScaler from the script."
            )

    def _stepped(self, optimizer: Optimizer, found: bool) -> None:
        self._note(optimizer)  # the optimizer may have been built where the function could not reach it
        self._state.skipped_steps += found
        self._iterations.stepped(optimizer, found)

    def _owned(self) -> set[int]:
        """The ids of the parameters of known optimizers."""
        return {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}

    def _after_backward(self) -> None:
        """Set the non-finite gradients of tensors that no optimizer owns to 0, because there is no step to skip."""
        owned = self._owned()
        unowned = [leaf for key, leaf in self._unscaling.leaves.items() if key not in owned]
        found = _any(flags_of(unowned))
        for leaf in unowned if found else ():
            if leaf.grad is not None and _any(flags_of([leaf])):
                leaf.grad.detach().zero_()
        if found:
            self._say(
                "the gradient of a tensor that no optimizer owns overflowed in float16. It was set to 0, because there is no optimizer "
                "step that parwrap.amp could skip. If the script uses this gradient, compute in bf16."
            )
        if found or not self._optimizers:
            self._state.end_iteration(found)


@torch.no_grad()
def flags_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One flag for each device: above 0 if a gradient of ``parameters`` on this device is not finite. Does not wait for a GPU.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, torch.inf])
    >>> flags_of([weight])
    [tensor(1.)]
    """
    flags: dict[torch.device, torch.Tensor] = {}
    alike: dict[tuple[torch.device, torch.dtype, bool], list[torch.Tensor]] = {}
    for p in parameters:
        if (grad := p.grad) is not None:
            alike.setdefault((grad.device, grad.dtype, grad.requires_grad), []).append(sparse_values(grad) if grad.is_sparse else grad)
    for (device, dtype, has_graph), grads in alike.items():
        flag = flags.setdefault(device, torch.zeros((), dtype=torch.float32, device=device))
        # GradScaler's kernel does not support complex numbers, and even a factor of 1 changes a gradient in place, which may have a graph
        if has_graph or dtype.is_complex:
            for grad in grads:
                flag.copy_(torch.maximum(flag, (~grad.isfinite().all()).float()))
        else:
            check_finite_and_unscale_(grads, flag, torch.ones((), dtype=torch.float32, device=device))
    return [*flags.values()]


def _any(flags: Iterable[torch.Tensor]) -> bool:
    return any(flag.item() for flag in flags)
