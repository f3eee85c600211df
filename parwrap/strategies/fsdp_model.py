"""One model whose parameters torch's ``fully_shard`` shards in place, and how it becomes a plain model again.

Modules keep the user's classes, and each parameter of the script stands for a sharded ``DTensor``. Hooks and states that torch adds are
recorded, so that they can be removed: while a module is copied, or for good. ``fsdp_units.py`` chooses the units, and ``fsdp.py`` calls
this file.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from parwrap.errors import UsageError
from parwrap.places import script_place
from parwrap.strategies.fsdp_tensors import Sharded
from parwrap.torch_private import fsdp
from parwrap.torch_private.autograd import in_backward, view_base
from parwrap.torch_private.modules import registered_parameters

__all__ = ["ShardedModel"]

CAST_ANYWAY = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d},
)
"""The modules whose parameters autocast rounds to its dtype in each call. Subclasses may compute otherwise."""


class ShardedModel:
    """A sharded model: a root module with its units.

    Args:
        root: the root module.
        units: the modules inside the root that are gathered separately, inner modules first.
        whole: parameters that stay whole.
        mesh: the device mesh of all ranks.
        sends: called before a unit sends anything, with a text that names the message.
        gather: gathers a tensor on all ranks.
        low: whether the weights that autocast would round to bfloat16 travel so: see ``CAST_ANYWAY``.

    Attributes:
        root: a function that returns the module while it is alive.
        parameters: the sharded parameters of the script, each with torch's ``FSDPParam``.
        reached: the ids of parameters that backwards have reached since this set was cleared.
        zeros: parameters without a gradient that got a gradient of zeros, because another parameter of their unit has a gradient.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[nn.Module],
        whole: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        sends: Callable[[str], None],
        gather: Callable[[DTensor], torch.Tensor],
        low: bool,
    ) -> None:
        self.root, self._sends, self._gather = weakref.ref(root), sends, gather
        self.reached: set[int] = set()
        self.zeros: list[nn.Parameter] = []
        self._leaves: set[int] = set()
        self._outdated: list[weakref.ref[torch.Tensor]] = []
        self._low: dict[nn.Module, tuple[str, Any, list[Any]]] = {}
        plain = {(id(module), name): p for module in root.modules() for name, p in registered_parameters(module).items()}
        names = {module: name for name, module in root.named_modules()}
        before = {module: _attachments(module) for module in root.modules()}
        for unit in (*units, root):
            kind = type(unit)
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=_policy(unit, whole, low), ignored_params=set(whole))
            unit.__class__ = kind
        self._states = [fully_shard.state(unit) for unit in (*units, root)]  # type: ignore[attr-defined]
        fsdp.initialize(self._states[-1])  # makes this state the root, whichever unit is called first
        for state in self._states:
            fsdp.forget_state(state)
        for unit, state in zip((*units, root), self._states, strict=True):
            self._watch(unit, f"{type(unit).__name__} {names[unit]}".rstrip(), state)
        for module in root.modules():
            if low and type(module) in CAST_ANYWAY:
                module.register_forward_pre_hook(self._widen, prepend=True)
            module.register_state_dict_post_hook(functools.partial(self._save_whole))  # torch sets an attribute on it
            for name, copied in (("__deepcopy__", self._copied), ("__reduce_ex__", self._reduced)):  # copy and pickle ask for these
                module.__dict__.setdefault(name, functools.partial(copied, module))
        self._added = [(module, _added(before[module], _attachments(module))) for module in root.modules()]
        self.parameters: list[tuple[nn.Parameter, Any]] = []
        for state in self._states:
            for group in fsdp.param_groups(state):
                for param in group.fsdp_params:
                    info = fsdp.module_info(param)
                    p = plain[id(info.module), info.param_name]
                    Sharded.replace(p, param.sharded_param)
                    fsdp.register_as(param, p)
                    self.parameters.append((p, param))
        self._parameter_of = {param: p for p, param in self.parameters}
        for state, unit in zip(self._states, (*units, root), strict=True):
            for group in fsdp.param_groups(state):
                self._choose_low(f"{type(unit).__name__} {names[unit]}".rstrip(), group)

    def gather_once(self) -> None:
        """Gather all units once, before a first forward in inference mode.

        Call it outside of that mode: torch keeps the tensors, and training needs normal ones.
        """
        for state in self._states:
            for group in fsdp.param_groups(state):
                group.unshard()
                group.wait_for_unshard()
                group.reshard()

    def leaves(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each sharded parameter that torch has gathered before, with the gathered parameter that autograd graphs reach."""
        return ((p, leaf) for p, param in self.parameters if (leaf := fsdp.unsharded_parameter(param)) is not None)

    def is_leaf(self, p: torch.Tensor) -> bool:
        """Whether torch gathers a sharded parameter into ``p``. It makes each such tensor once, as it first gathers a unit."""
        if len(self._leaves) < len(self.parameters):
            self._leaves = {id(leaf) for _, leaf in self.leaves()}
        return id(p) in self._leaves

    def outdated(self) -> list[torch.Tensor]:
        """Gathered tensors that a graph may still reach, although their parameters have been gathered in full since."""
        self._outdated = [ref for ref in self._outdated if ref() is not None]
        return [leaf for ref in self._outdated if (leaf := ref()) is not None]

    def shards(self) -> Iterator[tuple[nn.Parameter, DTensor]]:
        """Each sharded parameter of the script, with its ``DTensor``, which autograd graphs reach outside of forwards."""
        return ((p, param.sharded_param) for p, param in self.parameters)

    def is_reached(self, number: int, param: Any) -> bool:
        """Whether backwards have reached a parameter since ``reached`` was cleared; ``number`` is its id, ``param`` its ``FSDPParam``."""
        leaf = fsdp.unsharded_parameter(param)
        return number in self.reached or (leaf is not None and leaf.grad is not None)

    def reset(self) -> None:
        """Reset torch's states, and drop gradients that were not reduced, after a forward or backward that failed halfway."""
        fsdp.reset_iteration(self._states[-1])
        for _, leaf in self.leaves():
            leaf.grad = None

    def left_over(self) -> bool:
        """Whether a backward has left gradients that were not reduced."""
        return any(leaf.grad is not None for _, leaf in self.leaves())

    def put_back(self, for_good: bool) -> None:
        """Remove torch's hooks and states from the modules. If ``for_good``, all ranks gather the parameters; else these stay sharded."""
        self._take_off()
        for p, param in self.parameters if for_good else ():
            Sharded.put_back(p, self._gather)
            fsdp.replace_on_modules(param, p)
        for state in self._states:
            fsdp.release_groups(state)
        for held in (self._states, self.parameters, self._parameter_of, self._leaves, self._low, self._added):
            held.clear()

    # copies and states

    def _copied(self, module: nn.Module, memo: dict) -> nn.Module:
        """A plain copy of a sharded module, whole on every rank."""
        with self._hidden():
            return copy.deepcopy(module, memo)

    def _reduced(self, module: nn.Module, protocol: Any) -> Any:
        """What pickle keeps of a sharded module: a plain one with the script's parameters, which an optimizer beside it shares."""
        with self._hidden():
            reduced = module.__reduce_ex__(protocol)
            if not (isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict)):
                return reduced
            kept = next(added for each, added in self._added if each is module)
            state = {name: copy.copy(value) if name in kept else value for name, value in reduced[2].items()}
            return (*reduced[:2], state, *reduced[3:])

    def _save_whole(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, p in registered_parameters(module).items():
            if type(p) is Sharded and isinstance(value := state.get(prefix + name), DTensor):
                state[prefix + name] = self._gather(value)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Remove torch's hooks and states from the modules inside the block, so that they can be copied as plain modules."""
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

    def _take_off(self) -> None:
        for module, added in self._added:
            for attribute, keys in added.items():
                if keys is None:
                    module.__dict__.pop(attribute, None)
                else:
                    for key in keys:
                        module.__dict__[attribute].pop(key, None)

    # passes

    def _watch(self, unit: nn.Module, name: str, state: Any) -> None:
        unit.register_forward_pre_hook(functools.partial(self._before, name, state), prepend=True)
        fsdp.set_pre_backward_registration(state, functools.partial(_gather_before_backward, state))
        for group in fsdp.param_groups(state):
            group.post_backward = functools.partial(self._reduce, group.post_backward, name, group)

    def _before(self, name: str, state: Any, module: nn.Module, args: Any) -> None:
        if in_backward():  # a checkpoint recomputes it
            return
        for group in fsdp.param_groups(state):
            for param in group.fsdp_params if group.is_sharded else ():
                info = fsdp.module_info(param)
                if type(getattr(info.module, info.param_name, None)) is not Sharded:
                    _refuse_exchanged(info)
        if fsdp.param_groups(state):
            self._sends(f"the forward of {name}")

    def _reduce(self, post_backward: Callable, name: str, group: Any, *unused: Any) -> None:
        """Reduce the gradients of a unit. A rank that has reached only some parameters of the unit sends zeros for the others."""
        gathered = [(self._parameter_of[param], fsdp.unsharded_parameter(param)) for param in group.fsdp_params]
        own = [(p, leaf) for p, leaf in gathered if leaf is not None and leaf.requires_grad]
        if any(leaf.grad is not None for _, leaf in own):
            self._sends(f"the gradients of {name}")
            for p, leaf in own:
                if leaf.grad is not None:
                    self.reached.add(id(p))
                else:
                    leaf.grad = torch.zeros_like(leaf, dtype=getattr(leaf, "grad_dtype", None))
                    if p.grad is None:
                        self.zeros.append(p)
            fsdp.same_dtype([param for param in group.fsdp_params if fsdp.unsharded_parameter(param) is not None])
        post_backward(*unused)

    # autocast

    def _choose_low(self, name: str, group: Any) -> None:
        for param in group.fsdp_params:
            info = fsdp.module_info(param)
            if all(type(module) in CAST_ANYWAY for module in (info.module, *info.shared_modules)):
                for module in (info.module, *info.shared_modules):
                    self._low.setdefault(module, (name, group, []))[2].append(param)
            else:
                fsdp.gather_in_full(param)

    def _widen(self, module: nn.Module, args: Any) -> None:
        """Gather the weights of a layer that computes with autocast off in full, now and from now on. All ranks do so."""
        if module not in self._low or torch.is_autocast_enabled(self.parameters[0][0].device.type):
            return
        name, group, params = self._low.pop(module)
        self._sends(f"the weights of {name} in full")
        self._outdated += [weakref.ref(leaf) for param in params if (leaf := fsdp.unsharded_parameter(param)) is not None]
        self._leaves.clear()
        group.reshard()
        for param in params:
            fsdp.gather_in_full(param)
        group.unshard()
        group.wait_for_unshard()


def _policy(unit: nn.Module, whole: Sequence[nn.Parameter], low: bool) -> MixedPrecisionPolicy:
    """If ``low``, a float32 unit sends weights in bfloat16 and reduces gradients in float32. Autocast casts inputs."""
    left = {id(p) for p in whole}
    if not low or any(p.dtype != torch.float32 for p in unit.parameters() if id(p) not in left and type(p) is nn.Parameter):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _gather_before_backward(state: Any, outputs: Any) -> Any:
    """Make a backward gather the weights of a unit when it reaches the unit's ``outputs``.

    Torch's own hook is lost if the output is a view and the script changes it in place, as ``h += x`` does.
    """
    for tensor in fsdp.collect_grad_tensors(outputs) if torch.is_grad_enabled() else ():
        base = view_base(tensor)
        if base is None or base.grad_fn is None:
            tensor.register_hook(fsdp.pre_backward(state))
        else:
            base.grad_fn.register_prehook(lambda grads: fsdp.pre_backward(state)(None))
    return outputs


def _refuse_exchanged(info: Any) -> None:
    raise UsageError(
        f"the parameter {info.param_name!r} of a {type(info.module).__name__} was replaced before its forward at {script_place()}, but "
        "strategy='fsdp' has sharded the original one. Replace parameters before the first forward, or copy values: p.data.copy_(values), "
        "or load_state_dict without assign=True. torch.func.functional_call replaces parameters too: compute gradients with backward() "
        "instead."
    )


def _attachments(module: nn.Module) -> dict[str, set[Any] | None]:
    """Map the name of each attribute of a module to the attribute's keys if it is a dict, else to ``None``."""
    return {name: set(value) if isinstance(value, dict) else None for name, value in module.__dict__.items()}


def _added(before: dict[str, set[Any] | None], after: dict[str, set[Any] | None]) -> dict[str, set[Any] | None]:
    """Map the name of each new attribute to ``None``, and that of each older dict with new keys to these keys."""
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
