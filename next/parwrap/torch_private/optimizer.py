"""Private names of optimizers: the hooks on ``step``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter

from torch.optim import Optimizer

__all__ = ["step_hooks"]

Hooks = OrderedDict[int, Callable]
"""Hooks by the number of their handle, in the order in which they run."""

step_hooks: Callable[[Optimizer], tuple[Hooks, Hooks]] = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The hooks on an optimizer's own step, before and after. Publicly, they can only be added and removed."""
