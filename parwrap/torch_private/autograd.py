"""Private names of autograd: nodes of a graph and hooks on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from parwrap.torch_private.versions import private

__all__ = [
    "current_transform",
    "in_backward",
    "input_metadata",
    "is_traced",
    "is_transformed",
    "outside_of_transforms",
    "saved_sparse",
    "saved_sum",
    "tensor_hooks",
    "tracing_state",
    "view_base",
]

tensor_hooks: Callable[[torch.Tensor], dict[int, Callable] | None] = attrgetter("_backward_hooks")
"""The hooks of ``register_hook``, by their numbers, in the order in which they run. Publicly, they can only be added and removed."""

view_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The tensor that another is a view of. Publicly, there is no way from a view to its base."""

input_metadata: Callable[[Any], tuple[Any, ...]] = attrgetter("_input_metadata")
"""The shape, dtype and device of each gradient that a node takes, which are those of its outputs. ``Node`` does not make them public."""

is_transformed: Callable[[torch.Tensor], bool] = private("torch._C._functorch.is_functorch_wrapped_tensor")
"""Whether a tensor stands for others inside a transform such as ``vmap``. ``torch.func`` does not make that public."""

current_transform: Callable[[], Any] = private("torch._C._functorch.peek_interpreter_stack")
"""The innermost running transform, such as ``vmap`` or ``grad``, or ``None``. ``torch.func`` does not make it public."""

tracing_state: Callable[[], Any] = private("torch._C._get_tracing_state")
"""The trace of ``torch.jit.trace`` that is being recorded, or ``None``. ``torch.jit.is_tracing`` would add a call to each forward."""


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """A context in which no transform such as ``vmap`` runs, for tensors that it does not change. ``torch.func`` has none."""
    with ExitStack() as left:
        while current_transform() is not None:
            left.enter_context(temporarily_pop_interpreter_stack())
        yield


def is_traced() -> bool:
    """Whether a compiler records what runs now, with tensors that stand for others. No public function says so."""
    return bool(_get_current_dispatch_mode_stack())


def in_backward() -> bool:
    """Whether a backward runs in this thread. No public function says so."""
    return torch._C._current_graph_task_id() != -1


def saved_sparse(node: Any) -> bool:
    """Whether an embedding's node makes a sparse gradient; false for other nodes. What a node saves is not public."""
    return getattr(node, "_saved_sparse", False)


def saved_sum(node: Any) -> bool:
    """Whether the node of a loss function adds its terms up, as ``reduction="sum"`` asks; false for other nodes."""
    return getattr(node, "_saved_reduction", 0) == 2
