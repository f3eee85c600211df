"""Calls of modules: the outermost one runs on this rank's rows, with plain tensors inside.

A module is cut if cutting a few rows gives the answer of the whole: both are computed once for each module, mode and kind of arguments, and
``Cuts`` has from them where rows are in the answer. Otherwise every rank runs the module on the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from parwrap.places import script_place, warn
from parwrap.rows.few_rows import KEEPS, Answers, Few, answers, exchanged_hooks
from parwrap.rows.layout import Layout
from parwrap.rows.tensors import LOCAL, OfBatch, Partial, Rows, Whole, as_partial, as_rows, collected, plain
from parwrap.torch_private.autograd import current_transform
from parwrap.torch_private.functions import Criterion, all_hooks, has_backward_hooks, pytree
from parwrap.torch_private.modules import ORIGINAL_MODULE

__all__ = ["ModuleCalls", "Part", "part_of_answers"]

SINGLE = (torch.Tensor, int, float, str, type(None))
"""Arguments that hold no others."""

FIRST = 16
"""In so many first calls a module that answers with a number is tried on the whole batch: only there its number shows what it is."""

OTHER_SIZE = "its answer has another size than rows give"

FEW = 8
"""The number of rows on which a module is tried."""

AGAIN = 64
"""A module is tried again at its 2nd, 4th, 8th ... call of a kind, up to this one: what it does may hang on numbers."""


class Part(NamedTuple):
    """What a tensor in a module's answer is.

    Attributes:
        kind: ``"rows"``, ``"mean"`` or ``"sum"`` over the rows, or ``"same"`` for what no row changes.
        dim: the dimension of the rows.
        factor: how many rows of the answer come from one row, next to each other.
        copies: how many times all rows are in the answer, one time after another.
    """

    kind: str
    dim: int = 0
    factor: int = 1
    copies: int = 1

    def of(self, local: Any, layout: Layout) -> Any:
        """What the script gets for ``local``; ``None`` if that has another size than it should."""
        if self.kind == "same":
            return local
        if self.kind == "mean":
            return as_partial(local.as_subclass(torch.Tensor) if layout.weight == 1.0 else local * layout.weight)
        if self.kind == "sum":
            return as_partial(local * len(layout.per_rank))
        local = local.as_subclass(torch.Tensor)  # the module, or autograd, may hold the tensor itself
        if local.ndim <= self.dim or local.shape[self.dim] != layout.mine * self.factor * self.copies:
            return None
        return as_rows(local, layout.times(self.factor).repeated(self.copies), self.dim)


class ModuleCalls:
    """Runs the outermost calls of modules.

    Args:
        whole: what is open.
        own_draws: a context manager in which each rank draws its own random numbers.
    """

    def __init__(self, whole: Whole, own_draws: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._whole, self._own_draws = whole, own_draws
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # for each module, what is known of its answers, by kind of call
        self._said: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the number of the newest hook of all, and the module's own hooks

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable[..., Any]) -> Any:
        whole = self._whole
        if whole.inside:
            return original(*args, **kwargs)
        if kwargs or not all(isinstance(each, SINGLE) for each in args):
            leaves, structure = pytree.tree_flatten((args, kwargs))
        else:
            leaves, structure = list(args), None
        if not any(isinstance(each, OfBatch) for each in leaves) or _stays_outside(module):
            return original(*args, **kwargs)
        cuts = self._cuts(module, leaves, structure, original)
        if isinstance(cuts, str):
            return self._run_whole(module, leaves, structure, original, cuts)
        layout = next(each.row_layout for each in leaves if isinstance(each, Rows))
        local_args, local_kwargs = _built([cuts.own(at, each, layout) for at, each in enumerate(leaves)], structure)
        before, whole.calling = whole.calling, layout
        whole.inside += 1
        try:
            if cuts.draws or cuts.of_hooks:
                with self._own_draws() if cuts.draws else contextlib.nullcontext(), cuts.hooked(module, layout, whole):
                    answer = original(*local_args, **local_kwargs)
            else:
                answer = original(*local_args, **local_kwargs)
        finally:
            whole.inside -= 1
            whole.calling = before
        found = cuts.whole(answer, layout)
        if found is None:
            for known in self._known[module].values():
                known.cuts = OTHER_SIZE
            return self._run_whole(module, leaves, structure, original, OTHER_SIZE)
        return found[0]

    def _run_whole(self, module: nn.Module, leaves: list[Any], structure: Any, original: Callable[..., Any], why: str) -> Any:
        if module not in self._said and why:
            self._said[module] = True
            warn(
                f"parwrap: {script_place()} calls {type(module).__name__} on the whole batch on every rank, because {why}. That is right, "
                "and no faster than one process."
            )
        args, kwargs = _built([collected(each, f"{type(module).__name__}()") for each in leaves], structure)
        return original(*args, **kwargs)

    def _cuts(self, module: nn.Module, leaves: list[Any], structure: Any, original: Callable[..., Any]) -> Cuts | str:
        layout: Layout | None = None
        for each in leaves:
            if isinstance(each, Rows):
                if layout is not None and each.row_layout is not layout and each.row_layout != layout:
                    return "its arguments have rows of different batches"
                layout = each.row_layout
        if layout is None or 0 in layout.per_rank or current_transform() is not None:
            return ""
        kinds = tuple([_kind(each, layout.n) for each in leaves])
        kind = (module.training, structure, kinds, torch.is_autocast_enabled())
        known = self._known.setdefault(module, {})
        if self._hooks.get(module, (-1,))[0] != RemovableHandle.next_id:  # a hook was added somewhere
            before, now = self._hooks.get(module), (RemovableHandle.next_id, all_hooks(module))
            self._hooks[module] = now
            if before is not None and before[1] != now[1]:
                known.clear()
        try:
            found = known.get(kind)
        except TypeError:
            kind = (*kind[:1], str(structure), *kind[2:])
            found = known.get(kind)
        if found is None:
            if any(nn.parameter.is_lazy(each) for each in module.parameters()):
                return ""
            found = known[kind] = _Known(self._tried(module, leaves, structure, layout, original))
            if found.gives_numbers():
                found.cuts = self._tried(module, leaves, structure, layout, original, layout.n)
        found.calls += 1
        if found.is_due():
            found.cuts = self._tried(module, leaves, structure, layout, original, layout.n if found.gives_numbers() else FEW)
        return found.cuts

    def _tried(
        self, module: nn.Module, leaves: list[Any], structure: Any, layout: Layout, original: Callable[..., Any], rows: int = FEW
    ) -> Cuts | str:
        """Find where rows are in the answer of ``module``; or why it must be called on the whole batch."""
        if any(map(has_backward_hooks, module.modules())):
            return "it has hooks on gradients"
        beside = {
            at for at, each in enumerate(leaves) if type(each) is torch.Tensor and each.ndim and each.shape[0] == layout.n and layout.n > 1
        }
        why = ""
        for cut_too in [set(), beside] if beside else [set()]:
            few = [_few(each, self._whole, _few_of_each(layout, rows), layout, at in cut_too) for at, each in enumerate(leaves)]
            original_module = getattr(module, ORIGINAL_MODULE, None)
            run = original if original_module is None else original_module
            found = answers(self._whole, module, run, few, structure)
            if isinstance(found, str):
                why = found
                continue
            parts = part_of_answers(found)
            if isinstance(parts, str):
                why = parts
                continue
            return Cuts(frozenset(cut_too), parts[0], parts[1], found.structure, found.draws)
        return why


@dataclass
class _Known:
    """What is known of a module and a kind of its calls.

    Attributes:
        cuts: how it is called on rows; or why it is called on the whole batch.
        calls: the number of its calls.
    """

    cuts: Cuts | str
    calls: int = 0

    def is_due(self) -> bool:
        """Whether the module is tried again now."""
        if isinstance(self.cuts, str) or not 1 < self.calls <= AGAIN:
            return False
        return not self.calls & (self.calls - 1) or (self.calls <= FIRST and self.gives_numbers())

    def gives_numbers(self) -> bool:
        """Whether the module answers with more than rows."""
        return not isinstance(self.cuts, str) and any(part.kind != "rows" for part in self.cuts.parts)


class Cuts(NamedTuple):
    """How a module is called on rows.

    Attributes:
        beside: which arguments are plain tensors with as many rows, and are cut too.
        parts: what each tensor of the answer is.
        of_hooks: the same for what the script's hooks on the module and those inside get, call by call.
        structure: how the answer is built.
        draws: whether the module draws random numbers.
    """

    beside: frozenset[int]
    parts: Sequence[Part]
    of_hooks: Sequence[Sequence[Part]]
    structure: Any
    draws: bool

    def own(self, at: int, leaf: Any, layout: Layout) -> Any:
        if isinstance(leaf, Rows):
            return plain(leaf)
        if at in self.beside:
            return layout.own(leaf)
        return collected(leaf)

    def whole(self, answer: Any, layout: Layout) -> tuple[Any] | None:
        if isinstance(answer, torch.Tensor) and self.structure.is_leaf():
            found = self.parts[0].of(answer, layout)
            return None if found is None else (found,)
        leaves, structure = pytree.tree_flatten(answer)
        if structure != self.structure:
            return None
        found = [part.of(each, layout) if isinstance(each, torch.Tensor) else each for part, each in zip(self.parts, leaves, strict=True)]
        if any(each is None and leaf is not None for each, leaf in zip(found, leaves, strict=True)):
            return None
        return (pytree.tree_unflatten(found, structure),)

    @contextlib.contextmanager
    def hooked(self, module: nn.Module, layout: Layout, whole: Whole) -> Iterator[None]:
        """Inside the block, hooks of the script on modules get rows."""
        if not self.of_hooks:
            yield
            return
        calls = iter(self.of_hooks)

        def of_rows(hook: Callable, kind: str) -> Callable:
            def run(*args: Any) -> Any:
                parts, (leaves, structure) = next(calls, ()), pytree.tree_flatten(args[1:])
                if len(parts) == len(leaves):
                    leaves = [
                        part.of(each, layout) if isinstance(each, torch.Tensor) and part.kind != "same" else each
                        for part, each in zip(parts, leaves, strict=True)
                    ]
                given = pytree.tree_unflatten(leaves, structure)
                inside, whole.inside = whole.inside, 0
                try:
                    result = hook(args[0], *given)
                finally:
                    whole.inside = inside
                if result is None and kind == "after":
                    result = given[-1]  # what the hook keeps is in the graph
                return pytree.tree_map_only(OfBatch, plain, result)

            return run

        with exchanged_hooks(module, of_rows):
            yield


def _built(leaves: list[Any], structure: Any) -> tuple[Any, Any]:
    """The arguments of a call, as they were given."""
    return (leaves, {}) if structure is None else pytree.tree_unflatten(leaves, structure)


def _stays_outside(module: nn.Module) -> bool:
    """Whether rows reach ``module`` as rows: a criterion, or one that has nothing of its own."""
    if isinstance(module, Criterion):
        return True
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def _kind(leaf: Any, rows: int) -> Any:
    """What a call must have in common with another to be cut like it."""
    if isinstance(leaf, Rows):
        with LOCAL():
            return leaf.row_dim, leaf.ndim, leaf.dtype
    if isinstance(leaf, torch.Tensor):
        with LOCAL():
            return "plain", leaf.ndim, leaf.dtype, leaf.ndim and leaf.shape[0] == rows
    return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)


def _few_of_each(layout: Layout, rows: int) -> list[int]:
    """How many of the ``rows`` that a module is tried on are those of each rank."""
    each = -(-rows // len(layout.per_rank))
    return [min(each, rows) for rows in layout.per_rank]


def _few(leaf: Any, whole: Whole, counts: list[int], layout: Layout, cut_too: bool) -> Any:
    """The first rows of ``leaf``, on every rank, as a tuple with the dimension of the rows; anything else as it is."""
    if isinstance(leaf, Rows):
        with LOCAL(), torch.no_grad():
            dim = leaf.row_dim
            mine = plain(leaf).detach().movedim(dim, 0)[: counts[layout.rank]]
            return Few(torch.cat(whole.between.parts(mine.contiguous(), counts)).movedim(0, dim), dim)
    if cut_too:
        starts = [sum(layout.per_rank[:rank]) for rank in range(len(counts))]
        return Few(torch.cat([leaf.detach()[start : start + count] for start, count in zip(starts, counts, strict=True)]), 0)
    return collected(leaf).detach() if isinstance(leaf, Partial) else leaf


def part_of_answers(found: Answers) -> tuple[list[Part], list[list[Part]]] | str:
    """What each tensor of an answer is, from the answers to all of a few rows and to two parts of them; or why it cannot be cut."""
    parts = []
    for leaves in zip(found.whole, found.first, found.second, strict=True):
        part = _part(*leaves, found.sizes)
        if part is None:
            return "its answer for a row depends on other rows"
        parts.append(part)
    if any(_part(*leaves, found.sizes) != Part("same") for leaves in zip(*found.left, strict=True)):  # type: ignore[call-arg]
        return KEEPS
    if found.gradients and not _adds_up(parts, found):
        return "the backward of a torch.autograd.Function in it looks at other rows"
    of_hooks = []
    for calls in zip(found.hooks_whole, found.hooks_first, found.hooks_second, strict=True):
        of_hooks.append([_part(*leaves, found.sizes) or Part("same") for leaves in zip(*calls, strict=False)])
    return parts, of_hooks


def _adds_up(parts: list[Part], found: Answers) -> bool:
    """Whether the gradients of the parts add up to that of the whole."""
    rows, numbers = ([each[kind] for each in found.gradients] for kind in (0, 1))
    if any(part.kind == "sum" for part in parts):
        return False
    a, b = (size / sum(found.sizes) for size in found.sizes)
    added = all(_close(whole, first + second) for whole, first, second in zip(*rows, strict=True))
    return added and all(_close(whole, first * a + second * b) for whole, first, second in zip(*numbers, strict=True))


def _part(whole: Any, first: Any, second: Any, sizes: tuple[int, int]) -> Part | None:
    if not isinstance(whole, torch.Tensor):
        same = type(whole) in (int, float, bool, str, bytes, type(None)) and whole == first == second
        return Part("same") if same or whole is first is second else None
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and whole.ndim == first.ndim == second.ndim):
        return None
    a, b = sizes
    changed = [dim for dim in range(whole.ndim) if not whole.shape[dim] == first.shape[dim] == second.shape[dim]]
    if not changed:
        if whole.numel() and _close(whole, first) and _close(whole, second):
            return Part("same")
        if not whole.is_floating_point():
            return None
        if _close(whole, (first * a + second * b) / (a + b)):
            return Part("mean")
        return Part("sum") if _close(whole, first + second) else None
    if len(changed) > 1:
        return None
    dim = changed[0]
    each, rest = divmod(whole.shape[dim], a + b)
    if rest or first.shape[dim] != each * a or second.shape[dim] != each * b:
        return None
    if _close(whole, torch.cat([first, second], dim)):
        return Part("rows", dim, each)
    halves = [part.unflatten(dim, (each, -1)) for part in (first, second)]
    return Part("rows", dim, 1, each) if _close(whole, torch.cat(halves, dim + 1).flatten(dim, dim + 1)) else None


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    a, b = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (a, b))
    tolerance = 1e-2 if min(a.element_size(), b.element_size()) < 4 else 1e-3
    scale = float(a.abs().nan_to_num(posinf=0.0, neginf=0.0).max()) if a.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=tolerance, atol=max(1e-6, 1e-4 * scale), equal_nan=True))
