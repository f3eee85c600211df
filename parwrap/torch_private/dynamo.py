"""Private names of ``torch.compile``. This file does not import torch, because the launcher uses it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from parwrap.torch_private.versions import private

__all__ = [
    "DYNAMO",
    "EXPORTING",
    "GRAPH_SPLITTER",
    "INLINE",
    "has_backward",
    "inlined",
    "leave_frames",
    "left_out",
    "not_in_graphs",
    "outside",
    "running_compiler",
    "without_compiler",
]

DYNAMO = "torch._dynamo"
"""The module that a process's first optimizer imports, which takes a second. If imported before a fork, it costs no rank any time."""

INLINE = "_torchdynamo_inline"
"""The attribute of a wrapped function that holds the function to compile instead. ``torch.compiler`` can only leave functions out."""

GRAPH_SPLITTER = "torch._dynamo.backends.distributed"
"""The module whose ``DDPOptimizer`` splits the graphs of a model in DDP, so that gradients arrive while the backward runs."""

EXPORTING = "_is_exporting_flag"
"""The attribute of ``torch.compiler`` that says whether a model is exported. Before torch 2.12, ``is_exporting()`` is true in any graph."""


def inlined(traced: Callable) -> dict[str, staticmethod]:
    """The attributes that make torch compile ``traced`` in place of the wrapped functions of a class; see :data:`INLINE`."""
    return {INLINE: staticmethod(traced)}


def left_out(why: str) -> dict[str, Any]:
    """The attributes of a function, or of its class, that make ``torch.compile`` call it outside of graphs, ``why`` being for its error."""
    return {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": why}


def running_compiler() -> Callable[[], object]:
    """The function that returns what compiles the frames of this thread; ``None`` if nothing does."""
    return private("torch._C._dynamo.eval_frame.get_eval_frame_callback")


def without_compiler(function: Callable, why: str) -> Callable:
    """``function``, which nothing compiles while it runs. ``why`` is as in :func:`left_out`."""
    return sys.modules[DYNAMO].disable(function, reason=why)


def outside(function: Callable, why: str) -> Callable:
    """``function`` for ``torch.compile`` to call outside of its graphs: neither it nor what it calls is compiled.

    ``why`` is as in :func:`left_out`. Unlike ``torch.compiler.disable``, this imports no compiler, and costs nothing where none is at work.
    """
    disabled: Callable | None = None
    compiler = running_compiler()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if compiler() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = without_compiler(function, why)
        return disabled(*args, **kwargs)

    vars(call).update(left_out(why))
    return call


def has_backward(graph: Any) -> bool:
    """Whether a graph that ``torch.compile`` has traced returns a tensor that requires grad. What a node computes is not public."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return any(getattr(node.meta.get("example_value"), "requires_grad", False) for node in output.all_input_nodes)


def leave_frames(dynamo: ModuleType) -> tuple[()]:
    """Never compile a function of parwrap by itself, as torch's own functions: only where a function calls it that is compiled.

    Where a graph breaks, torch runs the rest as it is, and compiles every new frame there. Returns the patches that this needs: none.
    """
    rules, folder = dynamo.trace_rules, os.path.dirname(os.path.dirname(__file__)) + os.sep
    if folder not in rules.SKIP_DIRS:
        rules.SKIP_DIRS.append(folder)
        rules._recompile_re()
    rules.get_mod_inlinelist().add(folder)  # torch forgets it when it clears its caches
    return ()


@contextmanager
def not_in_graphs(dynamo: ModuleType, functions: Iterable[Callable]) -> Iterator[None]:
    """Inside the block, break graphs at ``functions``, although torch would put their names into graphs."""
    disallowed, ids = dynamo.trace_rules._disallowed_callable_ids, [*map(id, functions)]
    for each in ids:
        disallowed.add(each)
    try:
        yield
    finally:
        for each in ids:
            disallowed.remove(each)
