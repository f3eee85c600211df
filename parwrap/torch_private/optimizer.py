"""Private names of optimizers: the hooks on ``step``, and the function that torch puts around it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter

from torch.optim import Optimizer

from parwrap.torch_private.versions import private

__all__ = ["STEP", "global_post_hooks", "global_pre_hooks", "step_hooks", "stepping"]

Hooks = OrderedDict[int, Callable]
"""Hooks by the number of their handle, in the order in which they run."""

global_pre_hooks: Hooks = private("torch.optim.optimizer._global_optimizer_pre_hooks")
"""The hooks of ``register_optimizer_step_pre_hook``, in the order in which they run. Publicly, they can only be added and removed."""

global_post_hooks: Hooks = private("torch.optim.optimizer._global_optimizer_post_hooks")
"""The hooks of ``register_optimizer_step_post_hook``, in the order in which they run. Publicly, they can only be added and removed."""

step_hooks: Callable[[Optimizer], tuple[Hooks, Hooks]] = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The hooks on the step of one optimizer: those before it, and those after it. Publicly, they can only be added and removed."""


STEP = Optimizer.profile_hook_step(print).__code__
"""The code of the function that torch puts around the ``step`` of every class; it calls the hooks."""


def stepping() -> list[Optimizer]:
    """The optimizers whose steps run where this is called, innermost first; the step of each is part of the step of the next.

    >>> stepping()
    []
    """
    running, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code is STEP:
            running.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return running
