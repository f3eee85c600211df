"""Private names of mixed precision: the scale and the kernel of a ``GradScaler``, and the state of an ``autocast``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch

from parwrap.torch_private.versions import private

__all__ = ["autocast_enabled", "check_finite_and_unscale_", "scale_of"]

scale_of: Callable[[torch.amp.GradScaler], torch.Tensor] = attrgetter("_scale")
"""The scale as a tensor on the device. The public ``get_scale`` waits for the device."""

check_finite_and_unscale_: Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None] = private(
    "torch._amp_foreach_non_finite_check_and_unscale_"
)
"""Multiplies gradients by a factor and sets a flag if one is not finite, in few kernels. ``GradScaler`` does not make it public."""

autocast_enabled: Callable[[torch.autocast], bool] = attrgetter("_enabled")
"""Whether an autocast was made with ``enabled=True``. ``torch.is_autocast_enabled`` reports the current state, not an instance's."""
