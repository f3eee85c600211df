"""Fully sharded data parallelism: each rank keeps a part of the parameters, their gradients and the optimizer's state.

``FSDP`` shards models when an optimizer takes their parameters, and lets ranks communicate only when all are at the same point. Torch's
``fully_shard`` does the sharding. ``sharded_model.py`` applies it to a model, ``sharded_tensors.py`` handles a script's
operations on parts, ``sharded_state.py`` handles states.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import utils
from torch.optim import Optimizer

from parwrap.coordination.call_site import location
from parwrap.coordination.status_board import SyncPoint
from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.collectives import sums_of
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.options import Options
from parwrap.strategies.common.agreement import checksums
from parwrap.strategies.common.equal_state import EqualState
from parwrap.strategies.common.parameter_broadcast import take_values, warn_of_different
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.ddp.unaveraged import Unaveraged
from parwrap.strategies.fsdp.replicated import Replicated
from parwrap.strategies.fsdp.sharded_model import ShardedModel
from parwrap.strategies.fsdp.sharded_state import adopt, holds_sharded, release, shard_state, whole_state
from parwrap.strategies.fsdp.sharded_tensors import Moved, ShardedTensors, is_sharded, refuse_hook
from parwrap.strategies.fsdp.wrap_policy import roots, units, unsharded
from parwrap.torch_private.autograd import tensor_hooks
from parwrap.torch_private.distributed import forget_process_groups
from parwrap.torch_private.fsdp import clip_grads_with_norm_

__all__ = ["FSDP"]

SHARDING = "sharding of what an optimizer takes"
BACKWARD = "backward"
CLIPPING, USE = "clip_grad_norm_", "use of a sharded tensor"
AVERAGING = "average of parameters that are not sharded"
AT_ONCE = ("forward", BACKWARD, "gradients", AVERAGING, CLIPPING, USE)
"""Calls that ranks begin without waiting: each sends something and relies on all other ranks to do the same."""

FREED = "storage of size 0"

ADVICE = (
    "With strategy='fsdp', all ranks must run each forward and backward pass and each state_dict() together: use the same number of "
    "steps on all ranks (uneven='pad' or 'drop') and the same path through the model, call state_dict() on all of them (rank 0 alone "
    "writes what is saved), or use strategy='ddp', where they may differ."
)


class FSDP(Strategy):
    """Shards trained models over the ranks of ``group``."""

    OPTIONS = ("wrap",)

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._coordinator = group.coordinator
        self._models: list[weakref.ref[ShardedModel]] = []
        self._tensors = ShardedTensors(lambda: self._enter(USE, location()), self._coordinator.past)
        self._replicated = Replicated(group, loop, self._sharded_ids, lambda size: self._enter(AVERAGING, location(), size))
        self._unaveraged = Unaveraged(group, loop, leaves_out=is_sharded)
        self._equal_state = EqualState(group, loop)
        self._stepped: weakref.WeakKeyDictionary[Optimizer, tuple[int, weakref.ref[torch.Tensor]]] = weakref.WeakKeyDictionary()
        self._mesh: DeviceMesh | None = None
        self._running = False
        for kind in AT_ONCE:
            self._coordinator.answer(kind, lambda detail, present: self._refuse_to_answer())

    def interceptors(self) -> list[Interceptor]:
        self._adopt_all()
        self._loop.looking = self._equal_state.evaluation_begins
        return [self, self._tensors, self._unaveraged, self._equal_state]

    def described(self) -> str:
        return "strategy fsdp: parameters, gradients and optimizer states are sharded"

    def check_feature(self, name: str) -> None:
        super().check_feature(name)
        if name.startswith("amp(level="):
            raise UsageError(
                f"{name} makes a half precision copy of a model, but with strategy='fsdp' no rank has the whole model: use "
                "amp(dtype='bf16') or amp(dtype='fp16'), or strategy='ddp'."
            )

    @intercepts
    def take_parameters(self, parameters: Any) -> Any:
        """Shard the models that hold ``parameters``, and return the parameters for the optimizer."""
        if is_alone() or not isinstance(parameters, (list, tuple)):
            return parameters
        named = [each if isinstance(each, tuple) else (None, each) for each in parameters]
        if not all(len(each) == 2 and isinstance(each[1], torch.Tensor) for each in named):
            return parameters
        if not self._loop.are_of_one_batch(p for _, p in named):
            self._shard([p for _, p in named])
        sharded = [(name, p.__dict__["sharded"] if isinstance(p, Moved) else p) for name, p in named]
        return [p if name is None else (name, p) for name, p in sharded]

    @intercepts
    def optimizer_state(self, optimizer: Optimizer, save: Callable[[], Any]) -> Any:
        """The whole state of an optimizer."""
        return self._whole(save(), "optimizer.state_dict()")

    @intercepts
    def load_optimizer_state(self, optimizer: Optimizer, load: Callable[[Any], None], state: Any) -> None:
        """Load ``state``, and keep this rank's part of it."""
        load(state)
        shard_state(optimizer)

    @intercepts
    def module_state(self, module: nn.Module, state: Any) -> Any:
        """The whole weights of a module, under plain keys."""
        if not any(is_sharded(value) and not isinstance(value, nn.Parameter) for value in state.values()):
            return state  # the module is not sharded, or keep_vars=True
        for name, value in self._whole(state, f"{type(module).__name__}.state_dict()").items():
            state[name] = value
        return state

    @intercepts
    def load_module_state(self, module: nn.Module, assign: bool) -> None:
        if assign and any(is_sharded(p) for p in module.parameters()):
            raise UsageError(
                f"load_state_dict(assign=True) at {location()} would put unsharded parameters into a model that strategy='fsdp' has "
                "sharded: remove assign=True, or load the state before you build the optimizer."
            )

    @intercepts
    def move(self, module: nn.Module, apply: Callable[[], nn.Module]) -> nn.Module:
        """Move or cast the parameters of ``module``, which are whole while ``apply`` runs."""
        if is_alone() or not any(is_sharded(p) for p in module.parameters()):
            return apply()
        self._group.synchronize("a cast or move of the model")
        self._put_back()
        moved = apply()
        self._loop.moved()
        self._adopt_all()
        return moved

    @intercepts
    def saved(self, thing: Any) -> Any:
        """``thing`` as ``torch.save`` writes it: with whole tensors and the user's own classes."""
        models = [module for model in self._alive() if (module := model.root()) is not None]
        return copy.deepcopy(thing) if holds_sharded(thing, models) else thing

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Run ``clip_grad_norm_`` with the norm over all ranks, and return the norm as a plain tensor."""
        if clip.name != CLIPPING or not any(is_sharded(p.grad) for p in clip.parameters) or is_alone():
            return clip.run()
        self._enter(CLIPPING, location())
        norm = _clip_by_norm(clip, self._group.device, *clip.args, **clip.kwargs)
        self._coordinator.past()
        return norm

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call``; torch reduces the gradients of sharded parameters."""
        if self._running or is_alone():
            call.run()
            return
        if "inputs" in call.options:
            in_graphs = {number: p for model in self._alive() for number, p in model.in_graphs()}
            call.options["inputs"] = tuple(in_graphs.get(id(each), each) for each in call.options["inputs"])
        self._replicated.look(call)
        self._enter(BACKWARD, location())
        self._running = True
        try:
            self._weighted(call).run()
        except BaseException as error:
            for model in self._alive():
                model.reset()
            if isinstance(error, RuntimeError) and FREED in str(error):
                _refuse_hidden(error)
            raise
        finally:
            self._running = False
        if any(model.left_over() for model in self._alive()):
            _refuse_hidden(None)
        self._unaveraged.note(self._replicated.average())
        self._coordinator.past()
        self._loop.ran_backward()

    @intercepts
    def takes_step(self, optimizer: Optimizer) -> None:
        """Check the gradients that ``optimizer`` is about to use.

        Raises:
            UsageError: the gradients do not come from a backward: each rank has computed them from its own data, for a different part.
        """
        grad = next((p.grad for p in parameters_of(optimizer) if is_sharded(p) and p.grad is not None), None)
        if grad is None or is_alone():
            return
        backwards, used = self._stepped.get(optimizer, (0, lambda: None))
        if backwards == self._loop.backwards and used() is not grad:
            raise UsageError(
                f"the gradients that {location()} uses were not computed by backward(). With strategy='fsdp' each rank has a different "
                "part of them, so they cannot be averaged: call loss.backward(), or use strategy='ddp'."
            )
        self._stepped[optimizer] = self._loop.backwards, weakref.ref(grad)

    def summed(self, sums: list[torch.Tensor], weight: float) -> tuple[list[torch.Tensor], float]:
        """Multiply ``sums`` by the number of ranks, because gradients are means already, and add up the weights."""
        weights = self._sum_of(weight)
        return [total * self._group.world.size for total in sums], weights

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Unshard all models inside the block, so that ranks may call them independently."""
        with ExitStack() as whole:
            for model in self._alive():
                if (root := model.root()) is not None:
                    self._equal_state.set_mode(root, training=False)  # not later: the optimizer's parameters do not identify a whole model
                whole.enter_context(model.whole())
            yield

    def leave(self, returns: bool) -> None:
        if returns:
            self._put_back()

    def _adopt_all(self) -> None:
        """Shard the models of optimizers that were built before."""
        for optimizer in self._loop.optimizers():
            self._shard(parameters_of(optimizer))
            adopt(optimizer, {id(old): p for model in self._alive() for p, old in model.sharded()})

    def _put_back(self) -> None:
        """Make models and optimizers plain again; all ranks call this at the same point."""
        gc.collect()  # other ranks may collect garbage at other times
        models = {number: model for number, known in enumerate(self._models) if (model := known()) and model.root() is not None}
        optimizers = dict(self._loop.numbered_optimizers())
        gathered = self._group.share("models at the end", (set(models), set(optimizers)), range(self._group.world.size)).values()
        plain: dict[int, nn.Parameter] = {}
        for number in sorted(set.intersection(*(each for each, _ in gathered))):
            plain |= {id(p): old for p, old in models[number].sharded()}
            models[number].put_back(self._tensors.whole)
        for number in sorted(set.intersection(*(each for _, each in gathered))):
            release(optimizers[number], plain, self._tensors.whole)
        self._models.clear()
        self._replicated.forget()
        self._unaveraged.forget()

    def close(self) -> None:
        """Remove the hooks from the modules; after an error their parameters stay this rank's parts."""
        for model in self._alive():
            model.put_back(None)
        self._models.clear()
        gc.collect()
        if self._mesh is not None:  # torch's caches keep it forever, and other ranks would wait for a referenced process group
            forget_process_groups(self._mesh)

    def _weighted(self, call: Backward) -> Backward:
        """``call`` with its loss scaled by this rank's weight: torch averages over ranks with equal weights."""
        if not call.averaged:  # an interceptor adds up several, each a mean, and passes the weight with the last
            return call
        batch = self._loop.weights.find(call.tensors) if call.weight is None else self._loop.weights.current
        weight = batch.weight if call.weight is None else call.weight
        weights = self._sum_of(weight)
        factor = self._group.world.size / weights if weights else 0.0
        if call.weight is None:
            factor *= weight * batch.loss_factor
        else:
            for p in call.existing_grads if factor != 1.0 else ():
                p.grad = None if p.grad is None else p.grad * factor
        return call if factor == 1.0 else call.scaled(factor)

    def _sum_of(self, weight: float) -> float:
        """The sum of the ranks' weights, exchanged only if they can differ."""
        options = self._options()
        if options.batch == "per_rank" and options.uneven != "join":
            return weight * self._group.world.size
        return sums_of([weight], self._group)[0]

    def _whole(self, state: Any, what: str) -> dict[str, Any]:
        if is_alone():
            _refuse_alone(what)
        self._group.synchronize(what)
        return whole_state(state, self._tensors.whole)

    def _sharded_ids(self) -> set[int]:
        """The ids of all parameters whose gradients torch reduces, and of their stand-ins in graphs."""
        known = {number for model in self._alive() for number, _ in model.in_graphs()}
        return known | {id(p) for model in self._alive() for p, _ in model.sharded()}

    def _alive(self) -> list[ShardedModel]:
        return [model for known in self._models if (model := known()) is not None]

    def _shard(self, parameters: list[torch.Tensor]) -> None:
        """Shard the models that hold the unsharded ones of ``parameters``; on all ranks together."""
        within = {id(module) for model in self._alive() if (root := model.root()) is not None for module in root.modules()}
        new = [p for p in parameters if not (is_sharded(p) or isinstance(p, Moved) or self._replicated.has(p))]
        if not new:
            return
        found = [root for root in roots(new) if not any(id(module) in within for module in root.modules())]
        held = {id(p) for root in found for p in root.parameters()}
        named = [(f"{type(root).__name__}.{name}", p) for root in found for name, p in root.named_parameters()]
        self._make_alike([*named, *(("a parameter outside of all modules", p) for p in new if id(p) not in held)])
        self._replicated.add(p for p in new if id(p) not in held)
        for root in found:
            for name, p in root.named_parameters():
                if tensor_hooks(p):
                    refuse_hook(f"on {type(root).__name__}.{name}")
            inside = units(root, self._options().wrap)
            left = unsharded(root, inside, self._group.device)
            if self._mesh is None:
                if self._group.device.type == "cuda":  # else the mesh takes the GPU number LOCAL_RANK, but this rank sees only one
                    torch.cuda.set_device(self._group.device)
                self._mesh = init_device_mesh(self._group.device.type, (self._group.world.size,))
            model = ShardedModel(root, inside, left, self._mesh, self._enter_unit, self._coordinator.past)
            self._models.append(weakref.ref(model))
            self._replicated.add(left)

    def _make_alike(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Check that all ranks are about to shard the same parameters, and make their values equal."""
        mine = [(name, tuple(p.shape), p.dtype) for name, p in named], checksums(p for _, p in named)
        gathered = self._group.exchange(SHARDING, mine)
        for rank, (kinds, _) in gathered.items():
            if kinds != gathered[0][0]:
                apart = next(
                    (pair for pair in zip(gathered[0][0], kinds, strict=False) if pair[0] != pair[1]), (len(gathered[0][0]), len(kinds))
                )
                raise RankMismatchError(
                    f"the ranks pass different parameters to an optimizer at {location()}: {apart[0]} on rank 0 and {apart[1]} on rank "
                    f"{rank}. Build the same model on all ranks."
                )
        sums = [set(each) for each in zip(*(checksums for _, checksums in gathered.values()), strict=True)]
        different = [p for (_, p), each in zip(named, sums, strict=True) if len(each) > 1]
        if different and take_values(different, 0, self._group):
            warn_of_different(len(different), len(named), 0)

    def _enter_unit(self, what: str, unit: str, number: int) -> None:
        self._enter(what, f"{unit}, {location()}", zlib.crc32(f"{unit}/{number}".encode()) & 0x7FFFFFFF)

    def _enter(self, what: str, place: str, detail: int = 0) -> None:
        """Announce that this rank begins to send something, for which it relies on all other ranks."""
        if is_alone():
            _refuse_alone(what)
        try:
            self._coordinator.go_ahead(SyncPoint(what, place, detail))
        except RankMismatchError:
            raise RankMismatchError(
                f"the ranks are at different points at the same time: {self._coordinator.rank_positions.described()} {ADVICE}"
            ) from None
        self._coordinator.through(over=False)

    def _refuse_to_answer(self) -> NoReturn:
        rank = self._group.world.rank
        raise RankMismatchError(
            f"rank {rank} waits at {self._coordinator.waits_for}, but other ranks are not there: "
            f"{self._coordinator.rank_positions.described(but=rank)} {ADVICE}"
        )


def _refuse_alone(what: str) -> NoReturn:
    raise UsageError(
        f"{what} at {location()} needs the other ranks, because with strategy='fsdp' each rank has only a part of the model. But only "
        "this rank runs a function decorated with @parwrap.rank_zero_only: call it outside of that function."
    )


def _refuse_hidden(error: BaseException | None) -> NoReturn:
    raise UsageError(
        f"backward() at {location()} reaches a part of a sharded model without going through its outputs: through a loss that forward() "
        "keeps in an attribute, gradients of gradients (create_graph=True), or a unit in a re-entrant checkpoint. With strategy='fsdp', "
        "weights are available only while a backward pass goes through outputs: return that loss from forward(), or use strategy='ddp'."
    ) from error


def _clip_by_norm(
    clip: Clip, device: torch.device, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Clip gradients of which each rank has a part, and return the norm over all ranks. All ranks call it; they reduce one number.

    Args:
        clip: the intercepted call.
        device: the device for the reduction.
        max_norm: as in torch, like the arguments after it.
    """
    grads: list[Any] = [p.grad for p in clip.parameters if p.grad is not None]
    parts = [grad.to_local() for grad in grads if hasattr(grad, "to_local")]
    whole = [grad for grad in grads if not hasattr(grad, "to_local")]
    largest, norm_type = norm_type == math.inf, float(norm_type)
    local = utils.get_total_norm([part for part in parts if part.numel()], norm_type, foreach=foreach).to(device, torch.float64)
    reduced = local if largest else local**norm_type
    dist.all_reduce(reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norms = [reduced if largest else reduced ** (1 / norm_type)]
    if whole:
        norms.append(utils.get_total_norm(whole, norm_type, foreach=foreach).to(norms[0]))
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(parts[0])
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    clip_grads_with_norm_(clip.parameters, max_norm, norm, foreach)
    return norm
