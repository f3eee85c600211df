"""Private names of ``torch.compile``. This file does not import torch, because the launcher uses it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["DYNAMO", "EXPORTING", "INLINE", "inlined"]

DYNAMO = "torch._dynamo"
"""The module that a process's first optimizer imports, which takes a second. If imported before a fork, it costs no rank any time."""

INLINE = "_torchdynamo_inline"
"""The attribute of a wrapped function that holds the function to compile instead. ``torch.compiler`` can only leave functions out."""

EXPORTING = "_is_exporting_flag"
"""The attribute of ``torch.compiler`` that says whether a model is exported. Before torch 2.12, ``is_exporting()`` is true in any graph."""


def inlined(traced: Callable) -> dict[str, staticmethod]:
    """The attributes that make torch compile ``traced`` in place of the wrapped functions of a class; see :data:`INLINE`."""
    return {INLINE: staticmethod(traced)}
