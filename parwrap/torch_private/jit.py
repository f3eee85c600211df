"""Private names of TorchScript. This file does not import torch, because ``warnings.warn`` is patched even without torch."""

from __future__ import annotations

__all__ = ["FIND_BUILTIN", "SCRIPTING"]

SCRIPTING, FIND_BUILTIN = "torch.jit._builtins", "_find_builtin"
"""The module and the name of the function with which ``torch.jit.script`` finds the operator for a Python function, by its identity."""
