"""Chooses the modules that FSDP shards: the outermost ones that hold an optimizer's parameters, and the units inside them.

Units are gathered one by one. ``sharded_model.py`` shards what is chosen here. Parameters that cannot be sharded stay whole on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from parwrap.strategies.common.state_transfer import outermost_modules
from parwrap.torch_private.modules import registered_modules

__all__ = ["Wrap", "roots", "units", "unsharded"]

Wrap = int | type | str | tuple[type | str, ...] | None
"""The number of elements from which a module is a unit, or the classes of units, or ``None`` for repeated blocks."""

BLOCK = 100_000
"""The number of elements from which a block is worth gathering separately."""


def roots(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The outermost modules that hold one of ``parameters`` and have a forward, in the order of ``parameters``.

    If two of them share a parameter, only the larger one is returned; the other computes with its parameters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [each is model for each in roots(model[1].parameters())]
    [True]
    """
    place = {id(p): number for number, p in enumerate(parameters)}
    trained = [module for module in outermost_modules() if _first(module, place) < len(place)]
    callable_ones = [each for module in trained for each in _with_forward(module) if _first(each, place) < len(place)]
    chosen: list[nn.Module] = []
    taken: set[int] = set()
    for module in sorted(callable_ones, key=lambda module: (-_elements(module.parameters()), _first(module, place))):
        held = {id(p) for p in module.parameters()}
        if taken.isdisjoint(held):
            chosen.append(module)
            taken |= held
    return sorted(chosen, key=lambda module: _first(module, place))


def units(root: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The modules inside ``root`` that are gathered and sharded separately, inner ones before those around them.

    Modules that share a parameter with modules outside of them are excluded.

    >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> len(units(blocks, wrap="Linear")), len(units(blocks, wrap=7)), len(units(blocks, wrap=None))
    (2, 0, 0)
    """
    chosen = [
        module for module in _wanted(root, wrap) if module is not root and _has_forward(module) and any(True for _ in module.parameters())
    ]
    while True:
        homes: dict[int, set[int]] = {}
        for p, home in _held(root, {id(module) for module in chosen}):
            homes.setdefault(id(p), set()).add(home)
        torn = set().union(*(each for each in homes.values() if len(each) > 1))
        if not torn:
            return chosen
        chosen = [module for module in chosen if id(module) not in torn]


def unsharded(root: nn.Module, inside: Collection[nn.Module], device: torch.device) -> list[nn.Parameter]:
    """The parameters of ``root`` that cannot be sharded, given its units ``inside`` and the training ``device``.

    They are scalars, parameters on other devices or not contiguous (as with ``channels_last``), sparse embeddings, and those whose
    dtype differs from most of their unit.
    """
    sparse = {id(p) for module in root.modules() if getattr(module, "sparse", False) for p in module.parameters(recurse=False)}
    of_unit: dict[int, dict[int, nn.Parameter]] = {}
    for p, home in _held(root, {id(module) for module in inside}):
        of_unit.setdefault(home, {})[id(p)] = p
    left: list[nn.Parameter] = []
    for parameters in of_unit.values():
        count = Counter(p.dtype for p in parameters.values() if p.is_floating_point())
        most = count.most_common(1)[0][0] if count else None
        left += [p for p in parameters.values() if p.dtype != most or not _can_be_sharded(p, device) or id(p) in sparse]
    return left


def _can_be_sharded(p: nn.Parameter, device: torch.device) -> bool:
    return (
        p.device.type == device.type
        and type(p) is nn.Parameter
        and p.dim() > 0
        and p.numel() > 0
        and p.is_contiguous()
        and p.layout == torch.strided
    )


def _wanted(root: nn.Module, wrap: Wrap) -> Iterator[nn.Module]:
    """The modules that ``wrap`` selects, inner ones first."""
    if wrap is None:
        blocks = {id(block) for module in root.modules() for block in _blocks(module)}
        yield from (module for module in _inner_first(root) if id(module) in blocks)
    elif isinstance(wrap, int):
        taken: set[int] = set()
        for module in _inner_first(root):
            left = {id(p): p for p in module.parameters() if id(p) not in taken}
            if _elements(left.values()) >= wrap and _has_forward(module):
                taken |= left.keys()
                yield module
    else:
        kinds = wrap if isinstance(wrap, tuple) else (wrap,)
        yield from (module for module in _inner_first(root) if any(_is_a(module, kind) for kind in kinds))


def _is_a(module: nn.Module, kind: type | str) -> bool:
    return any(each.__name__ == kind for each in type(module).__mro__) if isinstance(kind, str) else isinstance(module, kind)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks that ``module`` is a list of."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    kinds = Counter(type(child) for child in module)
    return [child for child in module if kinds[type(child)] > 1 and _elements(child.parameters()) >= BLOCK]


def _inner_first(root: nn.Module) -> list[nn.Module]:
    return list(root.modules())[::-1]


def _held(root: nn.Module, chosen: Collection[int]) -> Iterator[tuple[nn.Parameter, int]]:
    """Each parameter with the id of the innermost of the ``chosen`` modules around it, once for each path to it."""

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


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """``module``, or if it cannot be called, the outermost module below it that can."""
    if _has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _with_forward(child)


def _first(module: nn.Module, place: dict[int, int]) -> int:
    """The position of the first parameter that ``module`` holds, or one past the last."""
    return min((place[id(p)] for p in module.parameters() if id(p) in place), default=len(place))


def _elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() for p in parameters)
