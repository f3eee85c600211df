"""Private names of TorchScript. It imports no torch, for patches of ``warnings.warn`` are installed without it too."""

from __future__ import annotations

__all__ = ["FIND_BUILTIN", "SCRIPTING"]

SCRIPTING, FIND_BUILTIN = "torch.jit._builtins", "_find_builtin"
"""The module and the name of the function by which ``torch.jit.script`` finds the operator of a Python function, by its identity."""
