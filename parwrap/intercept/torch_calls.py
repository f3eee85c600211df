"""The calls that can be intercepted, as one table: for each method of ``Interceptor``, the patches that call it.

Where torch has a hook, the hook is used. Nothing is patched on import; ``intercepting`` installs and removes everything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.random.bit_generator as bit_generator
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from parwrap.intercept import step_hooks
from parwrap.intercept.intercepted_calls import Backward, Clip, Criterion, Norm, ScalerCall
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.patch import Patch, caller, installed, when_imported
from parwrap.intercept.skipped_steps import leaving_out, skipping
from parwrap.intercept.step_hooks import hooked, steps_run
from parwrap.places import is_ours, is_standard, outside_of
from parwrap.torch_private.amp import scale_of
from parwrap.torch_private.autograd import is_transformed
from parwrap.torch_private.dataloader import forget_workers
from parwrap.torch_private.distributed import ACTIVE_DDP
from parwrap.torch_private.dynamo import DYNAMO, GRAPH_SPLITTER, has_backward, leave_frames, not_in_graphs
from parwrap.torch_private.modules import APPLY, CALL, INFER

__all__ = ["SERIALIZATION", "intercepting"]

SERIALIZATION = (torch, torch.serialization)
"""The modules with ``save`` and ``load``: a script may call them under either name."""

Patches = list[Patch | AbstractContextManager]

# data


def _iterate(interceptor: Interceptor) -> Patches:
    """Patch the loaders of torch and of torchdata, whose ``StatefulDataLoader`` overrides ``__iter__``.

    A loader first forgets persistent workers of the process that this one was forked from.
    """

    def patch(kind: Any) -> Patch:
        original = kind.__iter__

        def iterate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            forget_workers(instance)
            return interceptor.iterate(instance, original)

        return Patch(kind, "__iter__", iterate)

    def stateful(module: ModuleType) -> list[Patch]:
        return [patch(module.StatefulDataLoader)]

    return [patch(DataLoader), when_imported("torchdata.stateful_dataloader.stateful_dataloader", stateful)]


def _length(interceptor: Interceptor) -> Patches:
    original = DataLoader.__len__
    return [Patch(DataLoader, "__len__", lambda wrapped, instance, args, kwargs: interceptor.length(instance, original))]


# losses and gradients


def _starts_thread(interceptor: Interceptor) -> Patches:
    def start(wrapped: Callable, instance: threading.Thread, args: tuple, kwargs: dict) -> None:
        interceptor.starts_thread(instance)
        wrapped(*args, **kwargs)

    return [Patch(threading.Thread, "start", start)]


def _backward(interceptor: Interceptor) -> Patches:
    """Patch ``torch.autograd.backward``, which ``Tensor.backward`` looks up when it is called: one patch intercepts both."""

    def backward(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.backward(_bound(wrapped, *args, **kwargs))

    return [Patch(torch.autograd, "backward", backward)]


def _bound(
    original: Callable,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
    given: tuple[torch.Tensor | GradientEdge, ...] | None = None,
) -> Backward:
    """The :class:`Backward` for arguments as in torch's signature.

    ``given`` are the tensors that the script passed: an outer interceptor that calls with other tensors passes them on.
    ``grad_variables`` is the old name of ``grad_tensors``.
    """
    one = (torch.Tensor, GradientEdge)
    tensors = (tensors,) if isinstance(tensors, one) else tuple(tensors)
    grad_tensors = grad_variables if grad_tensors is None else grad_tensors
    if not isinstance(grad_tensors, (tuple, list)):
        grad_tensors = (grad_tensors,) * len(tensors)
    options: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph}
    if inputs is not None:
        options["inputs"] = (inputs,) if isinstance(inputs, one) else tuple(inputs.values() if isinstance(inputs, dict) else inputs)
    return Backward(tensors, tuple(grad_tensors), options, original, tensors if given is None else given)


def _criterion(interceptor: Interceptor) -> Patches:
    """Patch ``cross_entropy`` and ``nll_loss``, which the loss modules call too."""

    def patch(name: str) -> Patch:
        signature = inspect.signature(getattr(functional, name))

        def mean(loss: torch.Tensor, args: tuple, kwargs: dict) -> Criterion | None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            named = given.arguments
            a_mean = named["reduction"] == "mean" and named["reduce"] is not False and named["size_average"] is not False
            if not a_mean or named["target"].is_floating_point():
                return None
            return Criterion(loss, named["target"], named["weight"], named["ignore_index"])

        def criterion(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            loss = wrapped(*args, **kwargs)
            if torch.compiler.is_compiling() or not isinstance(loss, torch.Tensor) or is_transformed(loss) or not loss.requires_grad:
                return loss  # inside of torch.func a loss has no graph of its own
            return interceptor.criterion(loss, lambda: mean(loss, args, kwargs))

        return Patch(functional, name, criterion, outside=why)

    names, why = ("cross_entropy", "nll_loss"), WHY if interceptor.weighs_criterions() else ""
    patches: Patches = [patch(name) for name in names]
    if why:
        patches.append(when_imported(DYNAMO, lambda dynamo: [not_in_graphs(dynamo, [getattr(functional, name) for name in names])]))
    return patches


def _scaled(interceptor: Interceptor) -> Patches:
    def scale(wrapped: Callable, instance: torch.amp.GradScaler, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        if instance.is_enabled():
            interceptor.scaled(args[0] if args else kwargs["outputs"], scale_of(instance), result)
        return result

    return [Patch(torch.amp.GradScaler, "scale", scale)]


def _divided(interceptor: Interceptor) -> Patches:
    def divide(wrapped: Callable, instance: torch.Tensor, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        if instance.numel() == 1 and result.requires_grad and type(args[0]) in (int, float) and not torch.compiler.is_compiling():
            interceptor.divided(instance, args[0], result)
        return result

    return [Patch(torch.Tensor, "__truediv__", divide)]


def _use_scaler(interceptor: Interceptor) -> Patches:
    """Patch three methods of ``GradScaler``, for a script with its own scaler. Calls by torch and parwrap run unchanged."""

    def patch(name: str, of_optimizer: bool) -> Patch:
        def call(wrapped: Callable, instance: torch.amp.GradScaler, args: tuple, kwargs: dict) -> Any:
            if is_ours(caller().f_code.co_filename) or not instance.is_enabled():
                return wrapped(*args, **kwargs)
            optimizer = (args[0] if args else kwargs.get("optimizer")) if of_optimizer else None
            return interceptor.use_scaler(ScalerCall(instance, name, optimizer, partial(wrapped, *args, **kwargs)))

        return Patch(torch.amp.GradScaler, name, call)

    return [patch("unscale_", True), patch("step", True), patch("update", False)]


def _graph_bucket(interceptor: Interceptor) -> Patches:
    """Let ``torch.compile`` split graphs as inside DDP's own forward: a graph's gradients arrive together, after all of its backward.

    It asks at each graph that it compiles. One that returns nothing with a gradient has no backward, and stays whole.
    """

    def active(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        found = wrapped(*args, **kwargs)
        size = interceptor.graph_bucket() if found is None else None
        return found if size is None else SimpleNamespace(bucket_bytes_cap=size)

    def compile_fn(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Callable:
        return (wrapped if has_backward(args[0]) else instance.backend_compile_fn)(*args, **kwargs)

    def of_splitter(module: ModuleType) -> Patches:
        return [Patch(module.DDPOptimizer, "compile_fn", compile_fn)]

    return [Patch(DistributedDataParallel, ACTIVE_DDP, active), when_imported(GRAPH_SPLITTER, of_splitter)]


def _retain_grad(interceptor: Interceptor) -> Patches:
    def retain_grad(wrapped: Callable, instance: torch.Tensor, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        if not torch.compiler.is_compiling() and not instance.is_leaf:
            interceptor.retain_grad(instance)

    return [Patch(torch.Tensor, "retain_grad", retain_grad)]


def _enter_autocast(interceptor: Interceptor) -> Patches:
    """Patch ``torch.autocast``. ``torch.cuda.amp.autocast`` is a subclass, and functions under ``@torch.autocast(...)`` enter it too."""
    between = os.path.dirname(torch.amp.__file__) + os.sep, contextlib.__file__

    def enter(wrapped: Callable, instance: torch.autocast, args: tuple, kwargs: dict) -> Any:
        frame: FrameType | None = caller()
        while frame is not None and frame.f_code.co_filename.startswith(between):
            frame = frame.f_back
        # torch enters autocasts itself, for example to recompute a checkpoint
        if frame is not None and not is_ours(frame.f_code.co_filename) and not torch.compiler.is_compiling():
            interceptor.enter_autocast(instance)
        return wrapped(*args, **kwargs)

    return [Patch(torch.autocast, "__enter__", enter)]


def _clip(interceptor: Interceptor) -> Patches:
    def bound(name: str, original: Callable, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Clip:
        # a generator must survive several iterations
        return Clip(name, [parameters] if isinstance(parameters, torch.Tensor) else list(parameters), args, kwargs, original)

    def patch(owner: Any, name: str) -> Patch:
        def clip(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            return interceptor.clip(bound(name, wrapped, *args, **kwargs))

        return Patch(owner, name, clip)

    names = "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"
    return [patch(owner, name) for owner in (nn.utils, nn.utils.clip_grad) for name in names if hasattr(owner, name)]


# layers


def _norm(interceptor: Interceptor) -> Patches:
    """Patch ``batch_norm``, which every BatchNorm module calls, including lazy ones and subclasses. InstanceNorm does not call it."""

    def batch_norm(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        return interceptor.norm(Norm(wrapped, *args, **kwargs))

    return [Patch(functional, "batch_norm", batch_norm, interceptor.traced_norm)]


# modules and parameters


def _by_torch_distributed(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").startswith("torch.distributed.")


def _made(interceptor: Interceptor) -> Patches:
    def new(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> nn.Parameter:
        parameter = wrapped(*args, **kwargs)
        if not torch.compiler.is_compiling() and not _by_torch_distributed(caller()):  # fully_shard makes parameters of parameters
            interceptor.made(parameter)
        return parameter

    return [Patch(nn.Parameter, "__new__", new)]


def _infer_parameters(interceptor: Interceptor) -> Patches:
    """Replace the method by a plain function: modules hold it as a hook, which is copied and pickled with them."""

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        original = getattr(LazyModuleMixin, INFER)

        @functools.wraps(original)
        def infer(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                original(*args, **kwargs)
            else:
                interceptor.infer_parameters(partial(original, *args, **kwargs))

        setattr(LazyModuleMixin, INFER, infer)
        try:
            yield
        finally:
            setattr(LazyModuleMixin, INFER, original)

    return [replaced()]


def _outermost(begin: Callable[[nn.Module], Callable[[], None]]) -> Callable:
    """A wrapper for a method of modules that calls itself for every submodule, such as ``train``: only the script's own call counts.

    ``begin`` runs before that call and returns a function, which runs after it.
    """
    inside = set[int]()  # the threads that run such a call

    def wrapper(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        thread = threading.get_ident()
        if thread in inside:
            return wrapped(*args, **kwargs)
        end = begin(instance)
        inside.add(thread)
        try:
            result = wrapped(*args, **kwargs)
        finally:
            inside.remove(thread)
        end()
        return result

    return wrapper


def _set_mode(interceptor: Interceptor) -> Patches:
    def begin(module: nn.Module) -> Callable[[], None]:
        return lambda: interceptor.set_mode(module, module.training)

    return [Patch(nn.Module, "train", _outermost(begin))]


def _moved(interceptor: Interceptor) -> Patches:
    """Patch ``_apply``, which every cast and move of a module calls."""

    def begin(module: nn.Module) -> Callable[[], None]:
        before = _layouts(module)
        return lambda: interceptor.moved(module) if before != _layouts(module) else None

    return [Patch(nn.Module, APPLY, _outermost(begin))]


def _layouts(module: nn.Module) -> list[tuple[torch.dtype, torch.device, tuple[int, ...]]]:
    return [(p.dtype, p.device, () if is_lazy(p) or p.layout != torch.strided else p.stride()) for p in module.parameters()]


def _kinds(module: nn.Module) -> list[tuple[torch.dtype, torch.device]]:
    return [(p.dtype, p.device) for p in module.parameters()]


def _moves(interceptor: Interceptor) -> Patches:
    def apply(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        function = args[0]
        tried = [(kind, function(torch.empty(0, dtype=kind[0], device=kind[1]))) for kind in {*_kinds(instance)}]
        if any((tensor.dtype, tensor.device) != kind for kind, tensor in tried):
            interceptor.moves(instance)
        return wrapped(*args, **kwargs)

    return [Patch(nn.Module, APPLY, apply)]


def _use_sharded(interceptor: Interceptor) -> Patches:
    from torch.distributed.tensor import DTensor  # which takes long to import

    def torch_function(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        func, _, *rest = args
        return interceptor.use_sharded(func, rest[0] if rest else (), rest[1] if len(rest) > 1 and rest[1] else {})

    def show(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> str:
        return interceptor.use_sharded(torch.Tensor.__repr__, (instance,), {})

    return [Patch(DTensor, "__torch_function__", torch_function), Patch(DTensor, "__repr__", show)]


def _saved(interceptor: Interceptor) -> Patches:
    def save(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        def with_thing(obj: Any, *rest: Any, **options: Any) -> None:
            wrapped(interceptor.saved(obj), *rest, **options)

        with_thing(*args, **kwargs)

    return [Patch(module, "save", save) for module in SERIALIZATION]


def _call(interceptor: Interceptor) -> Patches:
    def call(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():  # torch.compile would trace into the interceptor
            return wrapped(*args, **kwargs)
        return interceptor.call(instance, args, kwargs, wrapped)

    return [Patch(nn.Module, CALL, call)]


def _data_parallel(interceptor: Interceptor) -> Patches:
    def init(wrapped: Callable, instance: nn.DataParallel, args: tuple, kwargs: dict) -> None:
        def with_devices(module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
            interceptor.data_parallel(module, lambda devices: wrapped(module, device_ids=devices, dim=dim))

        with_devices(*args, **kwargs)

    return [Patch(nn.DataParallel, "__init__", init)]


# optimizers


def _built(interceptor: Interceptor) -> Patches:
    """Patch ``Optimizer.add_param_group``, which ``Optimizer.__init__`` calls too, for each group.

    So one patch reports new optimizers, and groups that are added later.
    """

    def add_param_group(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        interceptor.built(instance)

    return [Patch(Optimizer, "add_param_group", add_param_group)]


def _copied(interceptor: Interceptor) -> Patches:
    """Patch ``Optimizer.__setstate__``, which ``copy`` and ``pickle`` call instead of ``__init__``."""

    def setstate(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        if "param_groups" in vars(instance):  # a wrapper around another optimizer may have none of its own
            interceptor.copied(instance)

    return [Patch(Optimizer, "__setstate__", setstate)]


def _copied_module(interceptor: Interceptor) -> Patches:
    def setstate(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        interceptor.copied_module(instance)

    return [Patch(nn.Module, "__setstate__", setstate)]


def _zero_grad(interceptor: Interceptor) -> Patches:
    def zero_grad(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_compiling():
            interceptor.zero_grad(instance)
        wrapped(*args, **kwargs)

    return [Patch(Optimizer, "zero_grad", zero_grad)]


def _step(interceptor: Interceptor) -> Patches:
    return [hooked(step_hooks.before, interceptor.step)]


def _stepped(interceptor: Interceptor) -> Patches:
    return [hooked(step_hooks.after, interceptor.stepped)]


def _closure(interceptor: Interceptor) -> Patches:
    return [hooked(step_hooks.closures, interceptor.closure, first=True)]


def _left_out(interceptor: Interceptor) -> Patches:
    """Report steps that parwrap's loss scale leaves out, and steps that the script asks of a ``GradScaler`` and that it does not run."""

    def step(wrapped: Callable, instance: torch.amp.GradScaler, args: tuple, kwargs: dict) -> Any:
        before = steps_run()
        result = wrapped(*args, **kwargs)
        if steps_run() == before:
            interceptor.left_out(args[0] if args else kwargs["optimizer"])
        return result

    return [hooked(step_hooks.left_out_steps, interceptor.left_out), Patch(torch.amp.GradScaler, "step", step)]


def _optimizer_state(interceptor: Interceptor) -> Patches:
    def state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return interceptor.optimizer_state(instance, lambda: wrapped(*args, **kwargs))

    return [Patch(Optimizer, "state_dict", state_dict)]


def _load_optimizer_state(interceptor: Interceptor) -> Patches:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        def with_state(state_dict: dict[str, Any]) -> None:
            interceptor.load_optimizer_state(instance, wrapped, state_dict)

        with_state(*args, **kwargs)

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]


def _metric(interceptor: Interceptor) -> Patches:
    def step(wrapped: Callable, instance: ReduceLROnPlateau, args: tuple, kwargs: dict) -> None:
        def with_metric(metrics: Any, *rest: Any, **options: Any) -> None:
            wrapped(interceptor.metric(metrics), *rest, **options)

        with_metric(*args, **kwargs)

    return [Patch(ReduceLROnPlateau, "step", step)]


# metrics


def _update_metric(interceptor: Interceptor) -> Patches:
    """Patch the method that makes the ``update`` of each metric and of each of its clones, as of torchmetrics 1.9."""

    def make_update(wrapped: Callable, metric: Any, args: tuple, kwargs: dict) -> Callable:
        update = wrapped(*args, **kwargs)

        @functools.wraps(update)
        def noted(*args: Any, **kwargs: Any) -> Any:
            return interceptor.update_metric(metric, lambda: update(*args, **kwargs))

        return noted

    return [when_imported("torchmetrics.metric", lambda module: [Patch(module.Metric, "_wrap_update", make_update)])]


def _share_states(interceptor: Interceptor) -> Patches:
    def compute(wrapped: Callable, collection: Any, args: tuple, kwargs: dict) -> Any:
        members = dict(collection.items(keep_base=True, copy_state=False))
        for names in collection.compute_groups.values():
            interceptor.share_states([members[name] for name in names])
        return wrapped(*args, **kwargs)

    return [when_imported("torchmetrics.collections", lambda module: [Patch(module.MetricCollection, "compute", compute)])]


def _syncs_metric(interceptor: Interceptor) -> Patches:
    def sync(wrapped: Callable, metric: Any, args: tuple, kwargs: dict) -> None:
        if interceptor.syncs_metric(metric):
            wrapped(*args, **kwargs)
        else:
            wrapped(*args[:3], **{**kwargs, "distributed_available": lambda: False})

    return [when_imported("torchmetrics.metric", lambda module: [Patch(module.Metric, "sync", sync)])]


# random numbers


def _seeded(interceptor: Interceptor) -> Patches:
    """Patch the functions that seed a library's own stream. Without a seed, or with ``None``, they take one that ``fresh_seed`` returns."""

    def patch(owner: Any, name: str, library: str) -> Patch:
        def seed(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            by_torch = _by_torch_distributed(caller())  # PowerSGD seeds a fork of the stream
            fresh, own = None, False
            if library != "torch" and (args[0] if args else kwargs.get("seed", kwargs.get("a"))) is None:
                fresh, own = interceptor.fresh_seed(library, 32), interceptor.draws_own(library)
            result = wrapped(*args, **kwargs) if fresh is None else wrapped(fresh)
            if not by_torch and not own:
                interceptor.seeded(library)
            return result

        return Patch(owner, name, seed)

    def torch_seed(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        own, fresh = interceptor.draws_own("torch"), interceptor.fresh_seed("torch", 62)
        if fresh is None:
            fresh = wrapped()
        else:
            manual_seed(fresh)
        if not own:
            interceptor.seeded("torch")
        return int(fresh)

    manual_seed = torch.manual_seed
    seeds = [patch(torch, "manual_seed", "torch"), patch(np.random, "seed", "numpy"), patch(random, "seed", "python")]
    return [*seeds, *(Patch(owner, "seed", torch_seed) for owner in (torch, torch.random))]


def _restored(interceptor: Interceptor) -> Patches:
    def set_rng_state(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        interceptor.restored()

    return [Patch(owner, "set_rng_state", set_rng_state) for owner in (torch, torch.random)]


def _fresh_seed(interceptor: Interceptor) -> Patches:
    """Replace what numpy's generators and ``random.Random`` seed themselves with; also those of classes derived from them.

    ``random.SystemRandom``, ``secrets`` and ``uuid`` stay the system's, and so do generators that the standard library makes for itself,
    such as for names of temporary files.
    """

    def entropy(bits: int) -> int:
        fresh = interceptor.fresh_seed("numpy", bits)
        return system(bits) if fresh is None else fresh

    def seed(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        fresh = None
        if (args[0] if args else kwargs.get("a")) is None:
            caller = outside_of(sys._getframe(1), "random", "wrapt", "parwrap")
            if caller is None or not is_standard(caller.f_code.co_filename):
                fresh = interceptor.fresh_seed("python", 512)
        if fresh is None:
            wrapped(*args, **kwargs)
        else:
            wrapped(fresh)

    @contextlib.contextmanager  # a patch would also replace the name where a script has imported it from secrets
    def replaced() -> Iterator[None]:
        names["randbits"] = entropy
        try:
            yield
        finally:
            names["randbits"] = system

    names = vars(bit_generator)
    system = names["randbits"]
    return [replaced(), Patch(random.Random, "seed", seed)]


# process groups


def _hides_group(interceptor: Interceptor) -> Patches:
    def is_initialized(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> bool:
        return not interceptor.hides_group(caller()) and wrapped(*args, **kwargs)

    def of_group(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        group = args[0] if args else kwargs.get("group")
        if group is None and interceptor.hides_group(caller()):
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group. "
                "parwrap hides its own from plain scripts, and from streams that it divides: "
                f"use parwrap.rank() and parwrap.world_size() instead of {wrapped.__name__}()."
            )
        return wrapped(*args, **kwargs)

    return [
        Patch(dist, "is_initialized", is_initialized),
        *(Patch(dist, name, of_group) for name in ("get_rank", "get_world_size", "get_backend")),
    ]


def _distributes_itself(interceptor: Interceptor) -> Patches:
    def init_process_group(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.distributes_itself("init_process_group")
        wrapped(*args, **kwargs)

    def init(wrapped: Callable, instance: DistributedDataParallel, args: tuple, kwargs: dict) -> None:
        if type(instance) is DistributedDataParallel:
            interceptor.distributes_itself("DistributedDataParallel")
        wrapped(*args, **kwargs)

    return [Patch(dist, "init_process_group", init_process_group), Patch(DistributedDataParallel, "__init__", init)]


PATCHES: dict[str, Callable[[Interceptor], Patches]] = {
    "iterate": _iterate,
    "length": _length,
    "starts_thread": _starts_thread,
    "backward": _backward,
    "criterion": _criterion,
    "scaled": _scaled,
    "divided": _divided,
    "use_scaler": _use_scaler,
    "graph_bucket": _graph_bucket,
    "retain_grad": _retain_grad,
    "enter_autocast": _enter_autocast,
    "clip": _clip,
    "norm": _norm,
    "made": _made,
    "infer_parameters": _infer_parameters,
    "set_mode": _set_mode,
    "moves": _moves,
    "moved": _moved,
    "use_sharded": _use_sharded,
    "saved": _saved,
    "call": _call,
    "data_parallel": _data_parallel,
    "built": _built,
    "copied": _copied,
    "copied_module": _copied_module,
    "zero_grad": _zero_grad,
    "step": _step,
    "stepped": _stepped,
    "left_out": _left_out,
    "optimizer_state": _optimizer_state,
    "load_optimizer_state": _load_optimizer_state,
    "skips": skipping,
    "leaves_out": leaving_out,
    "closure": _closure,
    "metric": _metric,
    "update_metric": _update_metric,
    "share_states": _share_states,
    "syncs_metric": _syncs_metric,
    "seeded": _seeded,
    "restored": _restored,
    "fresh_seed": _fresh_seed,
    "hides_group": _hides_group,
    "distributes_itself": _distributes_itself,
}
"""The function that makes the patches of each call, by the name of the method of ``Interceptor``."""

IN_GRAPHS = {"criterion", "divided", "retain_grad", "enter_autocast", "norm", "made", "call", "use_sharded"}
"""The calls whose wrappers ``torch.compile`` may put into a graph, where they change nothing. It calls all others outside of graphs."""

WHY = "parwrap does more in this call, which no graph can hold: compile without fullgraph=True, or leave this call out"


def intercepting(interceptors: Iterable[Interceptor], module: str | None = None) -> AbstractContextManager[None]:
    """Install ``interceptors`` inside the block, each around those before it. ``module`` is as in :func:`installed`.

    >>> class Counts(Interceptor):
    ...     backwards = 0
    ...     def backward(self, call):
    ...         self.backwards += 1
    ...         call.run()
    >>> with intercepting([counts := Counts()]):
    ...     torch.ones(1, requires_grad=True).sum().backward()
    >>> counts.backwards
    1
    """
    frames = when_imported(DYNAMO, leave_frames)
    return installed([frames, *(patch for each in interceptors for patch in _patches(each))], module)


def _patches(interceptor: Interceptor) -> Iterator[Patch | AbstractContextManager]:
    """The patches of the calls that the class of ``interceptor`` overrides."""
    for name, make in PATCHES.items():
        if getattr(type(interceptor), name) is not getattr(Interceptor, name):
            for patch in make(interceptor):
                if isinstance(patch, Patch) and name not in IN_GRAPHS:
                    patch = patch._replace(outside=WHY)
                yield patch
