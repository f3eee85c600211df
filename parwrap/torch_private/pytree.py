"""Torch's functions for nested values, which know its registered types. Torch has no public module for them."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]
