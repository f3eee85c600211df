"""Torch's ``DistributedDataParallel`` as an average of gradients of a list of parameters, armed by hand.

It gets a holder of the parameters instead of the user's model. ``gradient_averager.py`` decides what to average when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parwrap.group.device import uses_nccl
from parwrap.options import Options
from parwrap.strategies.common import sparse_gradients
from parwrap.torch_private.modules import registered_parameters

__all__ = ["Reducer", "reducer_options"]


def reducer_options(options: Options) -> dict[str, Any]:
    """The options of a distributed function that :class:`Reducer` needs."""
    # given 25, DDP would make the first bucket as large as the others; by default, it starts to send at 1 MB
    capacity = None if options.bucket_cap_mb == Options.bucket_cap_mb else options.bucket_cap_mb
    given: dict[str, Any] = {"bucket_cap_mb": capacity, "gradient_as_bucket_view": options.gradient_as_bucket_view}
    if options.compress:  # a compression hook is imported only if it is used
        from parwrap.strategies.common.compression import compressed

        given["compressed"] = compressed(options)
    return given


class Reducer(DistributedDataParallel):
    """Parwrap's own DDP; a subclass, to distinguish it from the user's.

    Args:
        parameters: the leaf tensors; gradients come in reverse order.
        sparse: the ids of those that get sparse gradients.
        signal: the parameter whose gradient must not be compressed.
        compressed: a function that returns the compressor of buckets, given the signal; ``None`` sends them as DDP does.
        options: for ``DistributedDataParallel``, such as ``bucket_cap_mb``.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], sparse: frozenset[int], signal: torch.Tensor, compressed: Any = None, **options: Any
    ) -> None:
        super().__init__(_Holder(parameters, sparse), init_sync=False, **options)
        if compressed is not None:
            self.register_comm_hook(None, compressed(signal).send)
        elif len(sparse) > 1 or (sparse and uses_nccl()):
            self.register_comm_hook(None, sparse_gradients.send)


class _SparselyUsed(nn.Embedding):
    """Tells DDP that the gradient of ``weight`` will be sparse."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.sparse = True
        registered_parameters(self)["weight"] = weight


class _Holder(nn.Module):
    def __init__(self, parameters: Sequence[torch.Tensor], sparse: frozenset[int]) -> None:
        super().__init__()
        # register_parameter takes only nn.Parameter, and a hand-written SGD has bare tensors
        for index, parameter in enumerate(parameters):
            if id(parameter) in sparse:
                self.add_module(f"sparse {index}", _SparselyUsed(parameter))
            else:
                registered_parameters(self)[str(index)] = parameter

    def forward(self) -> None:
        """The forward pass; DDP arms its reducer around this call."""
