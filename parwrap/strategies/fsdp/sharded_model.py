"""One model whose parameters torch's ``fully_shard`` shards in place, and how it becomes a plain model again.

Modules keep the user's classes. Hooks and states that torch adds are recorded, so that they can be removed, temporarily for a copy or
permanently. ``wrap_policy.py`` chooses the units, and ``fsdp.py`` decides what runs when.
"""

from __future__ import annotations

import copy
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parwrap.errors import UsageError
from parwrap.strategies.fsdp.sharded_tensors import Moved, sharded_like
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id, view_base
from parwrap.torch_private.fsdp import (
    UNSHARDED_PARAM,
    collect_grad_tensors,
    communication_context,
    forget_state,
    forward_root,
    initialize,
    module_info,
    param_groups,
    parameter_name,
    pre_backward,
    replace_on_modules,
    reset_iteration,
    set_pre_backward_registration,
    to_sharded,
)
from parwrap.torch_private.tensors import disable_torch_function

__all__ = ["ShardedModel"]

MOST_NAMED = 3
"""The most parameters without a gradient to name in a unit's description."""


class ShardedModel:
    """A root module with its units.

    Args:
        root: the module.
        units: the modules inside it that are gathered separately, inner ones first.
        unsharded: parameters that stay whole.
        mesh: the ranks.
        enter: a function, called before the units of this model send anything: with the operation, the unit's name and a number that must
            be the same on all ranks.
        past: a function, called when a forward has finished.

    Attributes:
        root: a function that returns the module while it is alive.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[nn.Module],
        unsharded: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        enter: Callable[[str, str, int], None],
        past: Callable[[], None],
    ) -> None:
        self.root, self._enter, self._past = weakref.ref(root), enter, past
        self._inside = 0
        self._apart: list[Any] = []
        plain = {(id(module), name): p for module in root.modules() for name, p in module.named_parameters(recurse=False)}
        before = {module: _attachments(module) for module in root.modules()}
        names = {module: name for name, module in root.named_modules()}
        for unit in (*units, root):
            kind = type(unit)
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=set(unsharded))
            unit.__class__ = kind
        self._states = [fully_shard.state(unit) for unit in (*units, root)]  # type: ignore[attr-defined]
        initialize(self._states[-1])  # makes this the root, whichever of its units is called first
        self._watch(units, root, names)
        for module in root.modules():  # copy and pickle ask for these
            module.__dict__["__deepcopy__"] = functools.partial(self._copied, module)
            module.__dict__["__reduce_ex__"] = functools.partial(self._reduced, module)
        self._added = [(module, _added(before[module], _attachments(module))) for module in root.modules()]
        infos = [(p, module_info(p)) for p in self.parameters()]
        self._moved = [(p, plain[id(info.module), info.param_name]) for p, info in infos]
        for p, old in self._moved:
            _move(old, p.sharded_param)

    def sharded(self) -> list[tuple[DTensor, nn.Parameter]]:
        """Each sharded parameter, and the parameter that it replaces."""
        return [(p.sharded_param, old) for p, old in self._moved]

    def in_graphs(self) -> Iterator[tuple[int, nn.Parameter]]:
        """The unsharded parameters that autograd graphs reach, each by its own id and by the ids of the script's tensors for it."""
        for p, old in self._moved:
            if (whole := getattr(p, UNSHARDED_PARAM, None)) is not None:
                for known in (p.sharded_param, whole, old):
                    yield id(known), whole

    def groups(self) -> Iterator[Any]:
        """The groups of parameters that torch gathers together."""
        return (group for state in self._states for group in param_groups(state))

    def parameters(self) -> Iterator[Any]:
        """Torch's own state for each parameter."""
        return (p for group in self.groups() for p in group.fsdp_params)

    def reset(self) -> None:
        """Reset the state of FSDP after a forward or backward pass that failed halfway."""
        self._inside = 0
        reset_iteration(self._states[-1])
        for p in self.parameters():
            if (whole := getattr(p, UNSHARDED_PARAM, None)) is not None:
                whole.grad = None

    def left_over(self) -> bool:
        """Whether a backward has left gradients that were not reduced."""
        return any((whole := getattr(p, UNSHARDED_PARAM, None)) is not None and whole.grad is not None for p in self.parameters())

    def _copied(self, module: nn.Module, memo: dict) -> nn.Module:
        """A plain copy of a sharded module, whole on every rank."""
        with self._hidden():
            return copy.deepcopy(module, memo)

    def _reduced(self, module: nn.Module, protocol: Any) -> Any:
        return copy.deepcopy(module).__reduce_ex__(protocol)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Remove torch's FSDP hooks and states from the modules inside the block, so that they can be copied as plain modules."""
        attributes = [(module, dict(module.__dict__)) for module, _ in self._added]
        orders = [(kept, list(kept.items())) for module, added in self._added for kept in _places(module, added)]
        self._take_off()
        try:
            yield
        finally:
            for module, all_of_them in attributes:
                module.__dict__.update(all_of_them)
            for kept, items in orders:  # hooks run in their order in the dict
                kept.clear()
                kept.update(items)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Unshard the model on every rank inside the block; its forward then sends nothing."""
        if self._apart:
            yield
            return
        self._apart = [(group, group.post_forward_mesh_info) for group in self.groups()]
        for group, _ in self._apart:
            group.unshard()
            group.wait_for_unshard()
            group.post_forward_mesh_info = None
        try:
            yield
        finally:
            for group, info in self._apart:
                group.post_forward_mesh_info = info
                to_sharded(group)
            self._apart = []

    def put_back(self, whole: Callable[[DTensor], torch.Tensor] | None) -> None:
        """Remove the sharding from the modules.

        Args:
            whole: a function that gathers a tensor on all ranks, to restore the original parameters. Without it, parameters stay sharded.
        """
        self._take_off()
        for state in self._states:
            forget_state(state)
        for p, old in self._moved if whole else ():
            _return(old, p.sharded_param, whole)  # type: ignore[arg-type]
            replace_on_modules(p, old)
        for state in self._states:  # graphs may hold the state, and a referenced process group does not signal its end to other ranks
            param_groups(state).clear()
            communication_context(state).post_forward_order.clear()
        for held in (self._states, self._moved, self._added):
            held.clear()

    def _take_off(self) -> None:
        for module, added in self._added:
            for attribute, keys in added.items():
                if keys is None:
                    module.__dict__.pop(attribute, None)
                else:
                    for key in keys:
                        module.__dict__[attribute].pop(key, None)

    def _watch(self, units: Sequence[nn.Module], root: nn.Module, names: dict[nn.Module, str]) -> None:
        for unit, state in zip((*units, root), self._states, strict=True):
            name = f"{type(unit).__name__} {names[unit]}".rstrip()
            unit.register_forward_pre_hook(functools.partial(self._before, name, state), prepend=True)
            unit.register_forward_hook(self._after, always_call=True)
            set_pre_backward_registration(state, functools.partial(_gather_before_backward, state))
            for group in param_groups(state):
                group.post_backward = functools.partial(self._reduce, group.post_backward, name, group)

    def _before(self, name: str, state: Any, module: nn.Module, args: Any) -> None:
        if self._apart or current_graph_task_id() != NO_GRAPH_TASK:  # a checkpoint recomputes it in a backward
            return
        if not self._inside and forward_root(self._states[-1]) is not None:
            self.reset()
        self._inside += 1
        _refuse_exchanged(name, state)
        self._enter("forward", name, 0)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._apart and current_graph_task_id() == NO_GRAPH_TASK:
            self._inside = max(0, self._inside - 1)
            if not self._inside:
                self._past()

    def _reduce(self, post_backward: Callable, name: str, group: Any, *unused: Any) -> None:
        """Reduce the gradients of a unit; all ranks must have gradients of the same parameters."""
        there = [(whole := getattr(p, UNSHARDED_PARAM, None)) is not None and whole.grad is not None for p in group.fsdp_params]
        if any(there):
            without = [parameter_name(p) for p, has in zip(group.fsdp_params, there, strict=True) if not has]
            unit = f"{name} without {', '.join(without[:MOST_NAMED])}" if without else name
            self._enter("gradients", unit, zlib.crc32(bytes(there)))
        post_backward(*unused)


def _gather_before_backward(state: Any, outputs: Any) -> Any:
    """Make a backward gather the weights of a unit when it reaches the unit's ``outputs``.

    Torch's own way forgets an output that is a view once a script changes it in place, as ``h += x`` does.
    """
    for tensor in collect_grad_tensors(outputs) if torch.is_grad_enabled() else ():
        base = view_base(tensor)
        if base is None or base.grad_fn is None:
            tensor.register_hook(pre_backward(state))
        else:
            base.grad_fn.register_prehook(lambda grads: pre_backward(state)(None))
    return outputs


def _refuse_exchanged(name: str, state: Any) -> None:
    for group in param_groups(state):
        for p in group.fsdp_params:
            info = module_info(p)
            if group.is_sharded and getattr(info.module, info.param_name, None) is not p.sharded_param:
                raise UsageError(
                    f"the parameter {info.param_name!r} of a {type(info.module).__name__} in {name} was replaced after the optimizer was "
                    "built, but strategy='fsdp' has sharded the original one. Change the model before you build its optimizer, or copy "
                    "values: p.data.copy_(values). torch.func.functional_call replaces parameters too: compute gradients with backward() "
                    "instead."
                )


def _move(old: nn.Parameter, new: Any) -> None:
    """Make ``old`` stand for ``new``, and free its memory."""
    if old.grad is not None:
        new.grad = sharded_like(old.grad, new)
    old.grad = None
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    old.__class__ = Moved
    old.__dict__["sharded"] = new
    with disable_torch_function():  # a loss that uses it outside the forward, such as a penalty, leaves gradients with any placement
        trained = new.requires_grad
        new.requires_grad_(True).register_hook(functools.partial(DTensor.redistribute, placements=new.placements))
        new.requires_grad_(trained)


def _return(old: nn.Parameter, new: Any, whole: Callable[[DTensor], torch.Tensor]) -> None:
    """Make ``old`` a plain parameter again, with the values of ``new``."""
    values, grad = whole(new.detach()), None if new.grad is None else whole(new.grad)
    with disable_torch_function():
        old.__class__ = nn.Parameter
        del old.__dict__["sharded"]
        old.data = values.clone()
        old.requires_grad_(new.requires_grad)
        old.grad = grad


def _attachments(module: nn.Module) -> dict[str, set[Any] | None]:
    """A module's attributes, and the keys in those that are dicts."""
    return {name: set(value) if isinstance(value, dict) else None for name, value in module.__dict__.items()}


def _added(before: dict[str, set[Any] | None], after: dict[str, set[Any] | None]) -> dict[str, set[Any] | None]:
    """The attributes that are new (``None``), and the new keys in those that are not."""
    added: dict[str, set[Any] | None] = {}
    for name, keys in after.items():
        if name not in before:
            added[name] = None
        elif keys is not None and keys - (before[name] or set()):
            added[name] = keys - (before[name] or set())
    return added


def _places(module: nn.Module, added: dict[str, set[Any] | None]) -> list[dict]:
    """The dicts of a module that have new entries."""
    return [module.__dict__[name] for name, keys in added.items() if keys is not None]
