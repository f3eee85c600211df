"""Private names for making replicas of a module: copies of modules and of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import _functions

__all__ = ["IS_REPLICA", "Gather", "Scatter", "shallow_replica", "unsafe_view"]

IS_REPLICA = "_is_replica"
"""The attribute that marks a copy that ``nn.DataParallel`` has made. There is no public way to recognize such a copy."""

shallow_replica: Callable[[nn.Module], Any] = methodcaller("_replicate_for_data_parallel")
"""A copy of a module with separate dicts, without parameters yet. ``copy.copy`` would share the dicts."""

unsafe_view: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = torch.ops.aten._unsafe_view
"""A tensor of another shape in the same memory, which autograd does not treat as a view. ``view`` ties its result to its base."""

Scatter: Any = _functions.Scatter
"""The autograd function that cuts a tensor into parts on several GPUs. The public ``scatter`` does not take the sizes of the parts."""

Gather: Any = _functions.Gather
"""The autograd function that joins tensors of several GPUs on one. The public ``gather`` also walks through containers in each step."""
