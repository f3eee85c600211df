"""Fully sharded data parallelism: each rank holds a part of the parameters, of their gradients and of the optimizer's state.

A model is sharded by torch's ``fully_shard`` when the script calls it for the first time and an optimizer has its parameters. Torch then
gathers parameters and reduces gradients. Parameters that stay whole, and the numbers of every backward, are averaged as in DDP.
``fsdp_model.py`` shards one model, ``fsdp_tensors.py`` runs the script's operations on sharded parameters. (Zhao et al., 2023,
https://arxiv.org/abs/2304.11277.)
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parwrap.errors import RankMismatchError, UsageError
from parwrap.intercept.intercepted_calls import Backward, Clip
from parwrap.loop.losses import reached
from parwrap.loop.optimizers import parameters_of
from parwrap.places import script_place, warn
from parwrap.ranks.agreement import agree, agree_on, first_difference
from parwrap.ranks.group import is_alone
from parwrap.ranks.structures import mapped
from parwrap.strategies.ddp import DDP
from parwrap.strategies.ddp_sites import Sites, made_equal
from parwrap.strategies.fsdp_model import ShardedModel
from parwrap.strategies.fsdp_tensors import ShardedTensors, clip_by_norm, is_sharded, refuse_alone, refuse_hook
from parwrap.strategies.fsdp_units import can_be_sharded, kinds_in, units, unmatched, unsharded
from parwrap.strategies.strategy import Loop, refuse_one_vector
from parwrap.torch_private.autograd import in_backward, tensor_hooks
from parwrap.torch_private.fsdp import DISABLED_SUBCLASSES_WORK, forget_process_groups

__all__ = ["FSDP"]

FREED = "storage of size 0"
"""A part of torch's error when a backward needs weights that are not gathered."""

_numbers = itertools.count()
"""Make each mesh of nodes another one: torch's caches would give the process groups of an equal one that has ended."""


class FSDP(DDP):
    """DDP whose models are sharded: torch gathers their parameters and reduces their gradients."""

    _sites: _Sites

    def __init__(self, loop: Loop) -> None:
        if not DISABLED_SUBCLASSES_WORK:
            raise UsageError(
                f"strategy='fsdp' needs torch 2.10 or newer, and this is torch {torch.__version__}: install a newer torch, or use "
                "strategy='zero1', which also divides the optimizer's state over the ranks."
            )
        if loop.group.device.type == "cuda" and loop.group.backend == "gloo":
            raise UsageError(
                "strategy='fsdp' does not work with backend='gloo' on GPUs: torch ends with a segmentation fault when it gathers "
                "parameters. Leave backend out, with a GPU for each rank; or use strategy='zero1', or set CUDA_VISIBLE_DEVICES to an empty "
                "value to train on the CPU."
            )
        super().__init__(loop)
        self._models: list[weakref.ref[ShardedModel]] = []  # in the order in which all ranks have met them
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all modules of these models
        self._seen: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._optimizers: list[weakref.ref[Optimizer]] = []  # in the order in which all ranks have met them
        self._tensors = ShardedTensors(loop.group)
        self._sites = _Sites(loop, self.buffers.watch, self._alive)
        self._weights.leaves_out = self._sites.leaves_out = self._is_part
        self._mesh: DeviceMesh | None = None
        self._in_forward = False
        self._wrappable: list[str] = []  # classes in the models sharded before the first step

    # forwards

    def graph_bucket(self) -> int | None:
        """None: torch reduces the gradients of a unit together."""
        return None

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        """Run a call of ``module``. First shard its whole parameters, if the script itself calls it and an optimizer has some of them."""
        if self._in_forward or self._thread is not None or in_backward():  # in backwards, checkpoints recompute
            return original(*args, **kwargs)
        if is_alone():
            if module in self._inner:
                refuse_alone(f"the forward of a {type(module).__name__}")
            return original(*args, **kwargs)
        self._shard(module)
        self._in_forward = True
        try:
            return original(*args, **kwargs)
        except BaseException:
            self._reset()
            raise
        finally:
            self._in_forward = False
            if self._models:
                self.loop.same_step.positions.run()

    def _shard(self, module: nn.Module) -> None:
        """Shard the parameters of ``module``, on all ranks together, if an optimizer has one that can be sharded and is not sharded yet."""
        optimizers = self.loop.optimizers
        if self._seen.get(module) == optimizers.generation:
            return
        self._seen[module] = optimizers.generation
        owners, device, parameters = optimizers.owners(), self.loop.group.device, dict(module.named_parameters())
        if module in self._inner or isinstance(module, torch.jit.ScriptModule) or any(map(is_lazy, parameters.values())):
            return
        if not any(id(p) in owners and can_be_sharded(p, device) for p in parameters.values()):
            return
        infers = torch.is_inference_mode_enabled()
        with torch.inference_mode(False):
            self._sites.close()  # with its hooks on parameters
            self._make_alike(module, {name: p for name, p in parameters.items() if not is_sharded(p)})
            self._wrappable += kinds_in(module)
            inside = [unit for unit in units(module, self.loop.options().wrap) if unit not in self._inner]
            whole = unsharded(module, inside, device)
            # not float16: parwrap.amp divides gradients by the loss scale where they arrive, and they would underflow
            low = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) is torch.bfloat16
            model = ShardedModel(module, inside, whole, self._mesh_of(device), self.loop.same_step.sends, self._tensors.whole, low)
            self._models.append(weakref.ref(model))  # the hooks on its modules hold it
            self._inner.update(module.modules())
            self._sites.in_shards = {
                id(p): partial(each.is_reached, id(p), param) for each in self._alive() for p, param in each.parameters
            }
            if infers:
                model.gather_once()
            for optimizer in optimizers.all():
                self._tensors.shard_state(optimizer)

    def _make_alike(self, module: nn.Module, named: dict[str, nn.Parameter]) -> None:
        """Check that all ranks are about to shard the same parameters, and make their values equal."""
        kind = type(module).__name__
        for name, p in named.items():
            if tensor_hooks(p):
                refuse_hook(f"on {name} of the {kind} that {script_place()} calls")
        place, mine = script_place(), [(name, tuple(p.shape), str(p.dtype)) for name, p in named.items()]

        def error(all_ranks: list[Any]) -> Exception:
            _, first, rank, other = first_difference(all_ranks, str)
            return RankMismatchError(
                f"the ranks shard different parameters of a {kind} at {place}: {first} on rank 0 and {other} on rank {rank}. Build the "
                "same model and optimizer on every rank, outside of training passes or inside `with parwrap.same_draws():`."
            )

        agree_on(self.loop.group, "sharding a model", mine, error)
        made_equal(self.loop.group, list(named.values()), at="forward")

    def _mesh_of(self, device: torch.device) -> DeviceMesh:
        if self._mesh is None:
            if device.type != "cpu":  # else the mesh takes the GPU number LOCAL_RANK, but this rank sees only one
                torch.get_device_module(device).set_device(device)
            nodes = self._nodes() if self.loop.options().shard_within_node else []
            if len(nodes) > 1:
                self._mesh = DeviceMesh(device.type, nodes, mesh_dim_names=("nodes", f"ranks {next(_numbers)}"))
            else:
                self._mesh = DeviceMesh(device.type, list(range(self.loop.group.world.size)))
        return self._mesh

    def _nodes(self) -> list[tuple[int, ...]]:
        """The ranks of each node; empty if all are on one node."""
        group = self.loop.group
        nodes = sorted(set(agree_on(group, "which ranks are on a node", group.world.node_ranks, lambda all_ranks: None) or ()))
        if len({len(ranks) for ranks in nodes}) > 1:
            sizes = ", ".join(str(len(ranks)) for ranks in nodes)
            raise UsageError(
                f"shard_within_node=True needs as many ranks on each node, and these nodes have {sizes} ranks. Start as many on each, or "
                "leave shard_within_node out: shards then span all nodes."
            )
        return nodes

    def _alive(self) -> list[ShardedModel]:
        return [model for ref in self._models if (model := ref()) is not None]

    def _is_part(self, p: torch.Tensor) -> bool:
        """Whether ``p`` is a sharded parameter, or the tensor into which torch gathers one."""
        return is_sharded(p) or any(model.is_leaf(p) for model in self._alive())

    def _reset(self) -> None:
        for model in self._alive():
            model.reset()

    # backwards

    def _run(self, call: Backward) -> None:
        if "inputs" in call.options:
            leaf_of = {id(p): leaf for model in self._alive() for p, leaf in model.leaves()}
            call.options["inputs"] = tuple(leaf_of.get(id(each), each) for each in call.options["inputs"])
        outdated = [leaf for model in self._alive() for leaf in model.outdated()]
        if outdated and any(leaf is each for leaf in reached(call.roots) for each in outdated):
            _refuse_two_precisions()
        try:
            super()._run(call)
        except BaseException as error:
            self._reset()
            if isinstance(error, RuntimeError) and FREED in str(error):
                _refuse_hidden(error)
            raise
        if any(model.left_over() for model in self._alive()):
            _refuse_hidden(None)
        if not self._local:
            self._drop_zeros()

    def _drop_zeros(self) -> None:
        """Set ``.grad`` to ``None`` in parameters that no rank has reached: torch has reduced zeros for them with their unit."""
        for model in self._alive():
            if model.zeros:
                reached = self._sites.reached_elsewhere() | self._tensors.read
                for p in model.zeros:
                    if id(p) not in reached:
                        p.grad = None
                model.zeros.clear()
            model.reached.clear()
        self._tensors.read.clear()

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        super().average([p for p in parameters if not is_sharded(p)])

    def clip(self, clip: Clip) -> Any:
        """If some gradients are sharded, let ``clip_grad_norm_`` clip by the norm over all ranks, and return this norm as a plain tensor.

        Any other clipping runs unchanged.
        """
        if clip.name != "clip_grad_norm_" or not any(is_sharded(p.grad) for p in clip.parameters) or is_alone():
            return clip.run()
        return clip_by_norm(clip, self.loop.group, *clip.args, **clip.kwargs)

    # steps

    def built(self, optimizer: Optimizer) -> None:
        if not is_alone() and not self.loop.optimizers.is_of_batch(optimizer):
            refuse_one_vector(optimizer, "fsdp")

    def copied(self, optimizer: Optimizer) -> None:
        self.built(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        self._meet(optimizer)
        if self._wrappable:
            self._check_wrap()
        self._tensors.begin_step()

    def _check_wrap(self) -> None:
        """At the first step, when all models that it trains are sharded, check that ``wrap`` names modules of theirs."""
        there, self._wrappable = ", ".join(sorted(set(self._wrappable))), []
        wrap = self.loop.options().wrap
        missing = unmatched(wrap, self._inner)
        if not missing:
            return
        names, place = " and ".join(missing), script_place()
        if len(missing) == (len(wrap) if isinstance(wrap, tuple) else 1):
            raise UsageError(
                f"wrap names {names}, but no module of the models that {place} trains is one. There are {there}. Name the classes whose "
                "modules are gathered one by one, or leave wrap out."
            )
        warn(f"parwrap: wrap names {names}, but no module of the models that {place} trains is one. There are {there}.")

    def stepped(self, optimizer: Optimizer) -> None:
        self._tensors.end_step()
        super().stepped(optimizer)

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def in_the_script() -> Any:
            with self._tensors.outside_of_step():
                return closure()

        return in_the_script

    def _meet(self, optimizer: Optimizer) -> None:
        ref = weakref.ref(optimizer)
        if ref not in self._optimizers and not self.loop.optimizers.is_of_batch(optimizer):
            self._optimizers.append(ref)

    # what a script sees

    def use_sharded(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        return self._tensors.call(func, args, kwargs)

    def optimizer_state(self, optimizer: Optimizer, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the whole state on every rank, as one process would have it."""
        return self._tensors.whole_state(original())

    def load_optimizer_state(self, optimizer: Optimizer, original: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Load this rank's part of ``state``, which is a whole state dict."""
        original(state)
        self._meet(optimizer)
        self._tensors.shard_state(optimizer)

    def saved(self, thing: Any) -> Any:
        """Return ``thing`` for ``torch.save``, with whole tensors and plain modules. All ranks call it, because all have parts."""
        memo: dict[int, Any] = {}

        def plain(leaf: Any) -> Any:
            held = leaf.parameters() if isinstance(leaf, nn.Module) else parameters_of(leaf) if isinstance(leaf, Optimizer) else [leaf]
            return copy.deepcopy(leaf, memo) if any(map(is_sharded, held)) else leaf

        return mapped(thing, plain)

    def moves(self, module: nn.Module) -> None:
        """Before a cast or move of a module with sharded parameters, make all models whole. The next forwards shard them again."""
        if any(map(is_sharded, module.parameters())):
            self.make_whole()

    # the end

    def make_whole(self) -> None:
        """Gather on every rank the models and the optimizers' states that all ranks still hold."""
        group = self.loop.group
        models, optimizers = [ref() for ref in self._models], [ref() for ref in self._optimizers]
        held = [each is not None for each in (*models, *optimizers)]
        agree(group, "making models whole", len(held))
        everywhere = group.on_all_ranks("making models whole", held)
        for optimizer, is_held in zip(optimizers, everywhere[len(models) :], strict=True):
            if optimizer is not None and is_held:
                for p, state in optimizer.state.items():
                    optimizer.state[p] = self._tensors.whole_state(state)
        for model, is_held in zip(models, everywhere, strict=False):
            if model is not None:
                model.put_back(for_good=is_held)
        self._forget()
        mesh, self._mesh = self._mesh, None
        if mesh is not None and mesh.ndim > 1:  # else it has the group of all ranks
            own = mesh.get_all_groups()
            forget_process_groups(mesh)
            for each in own:
                dist.destroy_process_group(each)

    def close(self) -> None:
        """Remove the hooks from the modules. Parameters that are still sharded, as after an error, stay sharded."""
        for model in self._alive():
            model.put_back(for_good=False)
        self._forget()
        super().close()
        if self._mesh is not None:  # torch's caches keep it forever, and other ranks would wait for a referenced process group
            forget_process_groups(self._mesh)

    def _forget(self) -> None:
        self._models.clear()
        self._inner.clear()
        self._seen.clear()
        self._sites.in_shards.clear()
        self._sites.moved()


class _Sites(Sites):
    """Sites whose sets contain sharded parameters, whose gradients torch averages.

    Args:
        loop: the state of the running loop.
        new_set: called when a set is averaged for the first time.
        models: a function that returns the sharded models.

    Attributes:
        in_shards: the id of each sharded parameter, with a function that says whether backwards have reached it.
    """

    def __init__(self, loop: Loop, new_set: Callable[[], None], models: Callable[[], list[ShardedModel]]) -> None:
        super().__init__(loop, new_set)
        self._models = models
        self.in_shards: dict[int, Callable[[], bool]] = {}

    def leaves(self, call: Backward) -> list[torch.Tensor]:
        parameter_of = {id(leaf): p for model in self._models() for p, leaf in (*model.leaves(), *model.shards())}
        return [parameter_of.get(id(leaf), leaf) for leaf in super().leaves(call)]

    def elsewhere(self, parameter: torch.Tensor) -> Callable[[], bool] | None:
        return self.in_shards.get(id(parameter))

    def reached_elsewhere(self) -> set[int]:
        """The ids of the sharded parameters that the last backward has reached on any rank."""
        return set() if self._running is None else self._running.reached_others()


def _refuse_hidden(error: BaseException | None) -> NoReturn:
    raise UsageError(
        f"the backward at {script_place()} reaches weights of a sharded model, but not through the outputs of its forward, so "
        "strategy='fsdp' has not gathered these weights. If forward keeps a loss in an attribute, return it. For gradients of gradients "
        "(create_graph=True) and re-entrant checkpoints (use_reentrant=True) use strategy='ddp'."
    ) from error


def _refuse_two_precisions() -> NoReturn:
    raise UsageError(
        f"the backward at {script_place()} reaches a layer that has computed under autocast, and then for the first time with autocast "
        "off. strategy='fsdp' gathers its weights in another dtype since. Run a forward with autocast off before the first one under it, "
        "or compute both under autocast."
    )
