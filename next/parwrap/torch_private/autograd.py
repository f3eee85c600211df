"""Private names of autograd: the running backward, nodes of a graph and hooks on tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

__all__ = [
    "NO_GRAPH_TASK",
    "current_graph_task_id",
    "innermost_saved_tensors_hooks",
    "input_metadata",
    "next_sequence_number",
    "saved_input",
    "saved_sparse",
    "saved_tensors",
    "saved_training",
    "sequence_number",
    "tensor_hooks",
    "view_base",
]

NO_GRAPH_TASK = -1
"""What :func:`current_graph_task_id` returns outside of a backward."""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread. No public function says whether a backward runs."""

next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""The number of the next node that this thread adds to a graph. Publicly, nodes have no order in time."""

tensor_hooks: Callable[[torch.Tensor], dict[int, Callable] | None] = attrgetter("_backward_hooks")
"""The hooks of ``register_hook``, by their numbers, in the order in which they run. Publicly, they can only be added and removed."""

view_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that another is a view of. Publicly, there is no way from a view to its base."""

input_metadata: Callable[[Any], tuple[Any, ...]] = attrgetter("_input_metadata")
"""The shape, dtype and device of each gradient that a node takes, which are those of its outputs. ``Node`` does not make them public."""

innermost_saved_tensors_hooks: Callable[[], tuple[Callable, Callable] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
"""The hooks of the innermost ``torch.autograd.graph.saved_tensors_hooks``. The public class only sets them."""


def sequence_number(node: Any) -> int | None:
    """The number of a node, in the order in which its thread has built nodes; ``None`` if it has none. It is not public."""
    return node._sequence_nr() if hasattr(node, "_sequence_nr") else None


def saved_sparse(node: Any) -> bool:
    """Whether an embedding's node makes a sparse gradient; false for other nodes. What a node saves is not public."""
    return getattr(node, "_saved_sparse", False)


def saved_training(node: Any) -> bool:
    """Whether a batch norm's node normalizes by the batch; true if the node does not say. What a node saves is not public."""
    return getattr(node, "_saved_training", True)


def saved_input(node: Any) -> torch.Tensor:
    """The input that a batch norm's node saves for its backward; a ``RuntimeError`` once the backward has freed it. It is not public."""
    return node._saved_input


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """The tensors that a node has saved for its backward; none once the backward has freed them. Only functions in Python make them public.

    Those behind hooks are left out: a checkpoint would compute them again.
    """
    kept = [name for name in dir(node) if name.startswith("_raw_saved_") and _is_unhooked(getattr(node, name))]
    with suppress(RuntimeError):
        saved = [node.saved_tensors if name == "_raw_saved_tensors" else getattr(node, name.removeprefix("_raw")) for name in kept]
        return [each for one in saved for each in (one if isinstance(one, tuple) else (one,)) if isinstance(each, torch.Tensor)]
    return []


def _is_unhooked(saved: Any) -> bool:
    return all(getattr(each, "unpack_hook", None) is None for each in (saved if isinstance(saved, tuple) else (saved,)))
