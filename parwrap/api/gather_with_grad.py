"""``gather_with_grad``: the batch of all ranks, for losses that compare the samples of a batch with each other."""

from __future__ import annotations

from typing import cast

import torch

from parwrap.api import distributed
from parwrap.api.gathered_rows import NAME, row_gatherer
from parwrap.errors import UsageError
from parwrap.group.collectives import callers
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["gather_with_grad"]


def gather_with_grad(x: torch.Tensor) -> torch.Tensor:
    """Gather the rows of every rank's ``x``, in the order of ranks, on every rank. Gradients flow back to the rank that a row came from.

    Use it for losses over pairs of samples, such as those of CLIP and SupCon. On every rank, compute the loss of the whole batch from the
    gathered rows; ``backward`` then leaves the gradient that a single process with the whole batch would compute. See
    docs/batch_losses.rst.

    Args:
        x: a tensor with at least one dimension. Only the number of rows may differ between ranks.

    Returns:
        A tensor with the rows of all ranks along dimension 0, on the device of ``x``. ``x`` itself on one rank, outside of a
            distributed function, in an evaluation (where every rank reads whole batches), and if ranks step separately
            (``strategy="none"``,
        ``"hogwild"``).

    Raises:
        UsageError: ``x`` is not a tensor with rows, or the call is in a checkpoint that the backward recomputes.
        RankMismatchError: dtypes or shapes of rows differ; on every rank, with the difference.

    >>> gather_with_grad(torch.tensor([[1.0], [2.0]]))
    tensor([[1.],
            [2.]])
    """
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"parwrap.gather_with_grad() takes a tensor, not {type(x).__name__}: call it once for each tensor.")
    if x.dim() == 0 or x.layout != torch.strided or (x.is_complex() and x.requires_grad):
        what = f"one of shape {list(x.shape)}, {x.dtype}, {x.layout}"
        raise UsageError(
            "parwrap.gather_with_grad() takes a dense tensor with one row per sample, and with a real dtype if it requires a gradient, "
            f"not {what}."
        )
    return cast(torch.Tensor, _gathered(x))


@torch.compiler.disable
def _gathered(x: torch.Tensor) -> torch.Tensor:
    group = callers(NAME)
    if group is None or distributed.steps_apart():
        return x
    parts = distributed.parts()
    if parts is not None and parts.loop.evaluations:
        return x
    if current_graph_task_id() != NO_GRAPH_TASK:
        raise UsageError(
            "parwrap.gather_with_grad() runs in a checkpoint that is recomputed in the backward pass, where the ranks cannot "
            "synchronize: call it outside of the checkpointed part."
        )
    if parts is not None and parts.loop.weights.upcoming(lambda: {len(x)}).weight == 0:
        x = x[:0]  # this rank has no batch left and repeats one
    return row_gatherer(group).gather(x)
