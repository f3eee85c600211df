"""Chooses the modules that FSDP gathers one by one, and the parameters that it leaves whole on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from parwrap.torch_private.modules import registered_modules

__all__ = ["can_be_sharded", "kinds_in", "units", "unmatched", "unsharded"]

Wrap = int | type | str | tuple[type | str, ...] | None
"""What becomes a unit. A number: modules with at least so many elements. Classes or names: modules of these. ``None``: repeated blocks."""

BLOCK = 100_000
"""A block with at least this number of elements is worth gathering separately."""


def units(root: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The modules inside ``root`` that are gathered and sharded separately, inner ones before those around them.

    ``wrap`` selects them, as :data:`Wrap` says. Those that share a parameter with another of them, or with the rest of ``root``, are left
    out.

    >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> len(units(blocks, wrap="Linear")), len(units(blocks, wrap=7)), len(units(blocks, wrap=None))
    (2, 0, 0)
    """
    chosen = [module for module in _wanted(root, wrap) if module is not root and _has_forward(module) and _elements(module.parameters())]
    while True:
        homes: dict[int, set[int]] = {}
        for p, home in _held(root, {id(module) for module in chosen}):
            homes.setdefault(id(p), set()).add(home)
        torn = set().union(*(each for each in homes.values() if len(each) > 1))
        if not torn:
            return chosen
        chosen = [module for module in chosen if id(module) not in torn]


def unmatched(wrap: Wrap, modules: Iterable[nn.Module]) -> list[str]:
    """The classes of ``wrap`` to which none of ``modules`` belongs; a number matches any.

    >>> unmatched(("Linear", "Blok", nn.GRU), nn.Sequential(nn.Linear(2, 2)).modules())
    ['Blok', 'GRU']
    """
    kinds = () if wrap is None or isinstance(wrap, int) else wrap if isinstance(wrap, tuple) else (wrap,)
    there = list(modules)
    return [kind if isinstance(kind, str) else kind.__name__ for kind in kinds if not any(_is_a(module, kind) for module in there)]


def kinds_in(root: nn.Module) -> list[str]:
    """The classes of the modules inside ``root`` that can be units."""
    inner = (module for module in root.modules() if module is not root and _has_forward(module) and _elements(module.parameters()))
    return list(dict.fromkeys(type(module).__name__ for module in inner))


def unsharded(root: nn.Module, inside: Collection[nn.Module], device: torch.device) -> list[nn.Parameter]:
    """The parameters of ``root`` that cannot be sharded, given its units ``inside`` and the training ``device``.

    They are scalars, empty ones, those on devices of another kind or not contiguous (as with ``channels_last``), those of sparse
    embeddings, those of another class than ``nn.Parameter``, such as sharded ones, and those that do not have the most frequent
    floating-point dtype of their unit.
    """
    sparse = {id(p) for module in root.modules() if getattr(module, "sparse", False) for p in module.parameters(recurse=False)}
    of_unit: dict[int, dict[int, nn.Parameter]] = {}
    for p, home in _held(root, {id(module) for module in inside}):
        of_unit.setdefault(home, {})[id(p)] = p
    left: list[nn.Parameter] = []
    for parameters in of_unit.values():
        kinds = Counter(p.dtype for p in parameters.values() if can_be_sharded(p, device) and p.is_floating_point())
        most = max(kinds, key=kinds.__getitem__, default=None)
        left += [p for p in parameters.values() if not can_be_sharded(p, device) or p.dtype != most or id(p) in sparse]
    return left


def can_be_sharded(p: torch.Tensor, device: torch.device) -> bool:
    """Whether ``p`` is an unsharded ``nn.Parameter`` on the same kind of device as ``device``, contiguous, not a scalar and not empty."""
    return type(p) is nn.Parameter and p.device.type == device.type and p.dim() > 0 and p.numel() > 0 and p.is_contiguous()


def _wanted(root: nn.Module, wrap: Wrap) -> Iterator[nn.Module]:
    """The modules that ``wrap`` selects, inner ones first."""
    inner_first = list(root.modules())[::-1]
    if wrap is None:
        blocks = {id(block) for module in inner_first for block in _blocks(module)}
        yield from (module for module in inner_first if id(module) in blocks)
    elif isinstance(wrap, int):
        taken: set[int] = set()
        for module in inner_first:
            left = {id(p): p for p in module.parameters() if id(p) not in taken}
            if _elements(left.values()) >= wrap and _has_forward(module):
                taken |= left.keys()
                yield module
    else:
        kinds = wrap if isinstance(wrap, tuple) else (wrap,)
        yield from (module for module in inner_first if any(_is_a(module, kind) for kind in kinds))


def _is_a(module: nn.Module, kind: type | str) -> bool:
    return any(each.__name__ == kind for each in type(module).__mro__) if isinstance(kind, str) else isinstance(module, kind)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a list or sequence of modules: those whose class occurs several times in it. Small ones are left out."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    kinds = Counter(type(child) for child in module)
    return [child for child in module if kinds[type(child)] > 1 and _elements(child.parameters()) >= BLOCK]


def _held(root: nn.Module, chosen: Collection[int]) -> Iterator[tuple[nn.Parameter, int]]:
    """Each parameter with the id of the innermost ``chosen`` module around it, else of ``root``; once for each path to the parameter."""

    def below(module: nn.Module, home: int) -> Iterator[tuple[nn.Parameter, int]]:
        home = id(module) if id(module) in chosen else home
        yield from ((p, home) for p in module.parameters(recurse=False))
        for child in registered_modules(module).values():
            if child is not None:
                yield from below(child, home)

    return below(root, id(root))


def _has_forward(module: nn.Module) -> bool:
    # the base class defines forward too, but it only raises
    return type(module).forward is not nn.Module.forward


def _elements(parameters: Iterable[torch.Tensor]) -> int:
    """The number of elements of those ``parameters`` that are not sharded yet."""
    return sum(p.numel() for p in parameters if type(p) is nn.Parameter)
