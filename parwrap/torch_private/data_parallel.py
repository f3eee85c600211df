"""Private names that replicas of a module are made with: copies of modules and of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import _functions

__all__ = ["IS_REPLICA", "Gather", "Scatter", "shallow_replica", "unsafe_view"]

IS_REPLICA = "_is_replica"
"""The attribute that marks a copy of ``nn.DataParallel``. Nothing public tells it from a model."""

shallow_replica: Callable[[nn.Module], Any] = methodcaller("_replicate_for_data_parallel")
"""A copy of a module with dicts of its own, in which no parameters are yet. ``copy.copy`` shares the dicts."""

unsafe_view: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = torch.ops.aten._unsafe_view
"""A tensor in another shape, with the same memory but no view for autograd. ``view`` makes what autograd ties to its base."""

Scatter: Any = _functions.Scatter
"""The autograd function that cuts a tensor into parts on several GPUs. The public ``scatter`` takes no sizes of parts."""

Gather: Any = _functions.Gather
"""The autograd function that joins tensors of several GPUs on one. The public ``gather`` walks through containers to it, in each step."""
