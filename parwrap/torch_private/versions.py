"""The versions of torch that parwrap is tested with, and which private names another version has changed.

This file does not import torch, because the launcher uses this room.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from parwrap.messages import tell

__all__ = ["OF_GPUS", "OF_LAUNCHER", "OF_RANKS", "missing_names", "private", "warn_of_newer_torch"]

NEWEST = (2, 15)
"""The newest minor release of torch that the tests pass with."""

TESTED = "2.9 to 2.15"
"""All minor releases of torch that the tests pass with."""

OF_RANKS = (
    "torch.Tensor._backward_hooks",
    "torch.Tensor._base",
    "torch.Tensor._make_wrapper_subclass",
    "torch.Tensor._values",
    "torch.Tensor._version",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._EnableTorchFunction",
    "torch._C._current_graph_task_id",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._get_tracing_state",
    "torch._C._nn",
    "torch._dynamo.trace_rules._disallowed_callable_ids",
    "torch._dynamo.trace_rules._recompile_re",
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._foreach_add_",
    "torch._functorch.apis.vmap_impl",
    "torch._functorch.eager_transforms._jvp_with_argnums",
    "torch._functorch.eager_transforms._vjp_with_argnums",
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack",
    "torch.amp.GradScaler._scale",
    "torch.autocast._enabled",
    "torch.autograd.graph.Node._input_metadata",
    "torch.Tensor._is_view",
    "torch.compiler._is_exporting_flag",
    "torch.cuda._is_in_bad_fork",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.Reducer._check_reducer_finalized",
    "torch.distributed._composable_state._module_state_mapping",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh|_dim_group_names",
    "torch.distributed.device_mesh.DeviceMesh._pg_registry|_dim_group_names",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._update_default_pg",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._post_load_hook_handle",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._setattr_on_modules",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._comm_ctx",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups|_fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._modules",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._pre_backward",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._register_pre_backward_hook",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._reset_iter_state|_modules_to_run_forward",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._reset_iter_state|_state_ctx",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._reset_iter_state|_training_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._reset_iter_state|_to_sharded",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.jit._builtins._get_builtin_table",
    "torch.nn.Module._apply",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._backward_pre_hooks",
    "torch.nn.Module._buffers",
    "torch.nn.Module._call_impl",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._modules",
    "torch.nn.Module._parameters",
    "torch.nn.Module._replicate_for_data_parallel",
    "torch.nn.RNNBase._flat_weights",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.lazy.LazyModuleMixin._infer_parameters",
    "torch.nn.modules.loss._Loss",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
    "torch.nn.parallel.DistributedDataParallel._has_rebuilt_buckets",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.ops.aten._unsafe_view",
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.Optimizer.profile_hook_step",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._pytree.tree_leaves",
    "torch.utils.data.DataLoader._iterator",
    "torch.utils.data._utils.signal_handling._remove_worker_pids",
)
"""The private names that ranks use, each after its module or class. ``|`` separates the names that a thing has in different versions."""

OF_GPUS = (
    "torch._C._cuda_getDeviceCount",
    "torch.cuda._device_count_amdsmi",
    "torch.cuda._device_count_nvml",
    "torch.distributed.ProcessGroupNCCL._group_end",
    "torch.distributed.ProcessGroupNCCL._group_start",
)
"""The private names that ranks use and that builds of torch for CPUs do not have."""

OF_LAUNCHER = (
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._remaining_restarts",
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._rendezvous",
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._store",
    "torch.distributed.elastic.multiprocessing.api.MultiprocessContext._close",
    "torch.distributed.elastic.multiprocessing.api.MultiprocessContext._pc",
    "torch.distributed.elastic.multiprocessing.api.MultiprocessContext._poll",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler._state_holder",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler._this_node",
)
"""What ``elastic.py`` uses in the launcher."""


def warn_of_newer_torch(names: Iterable[str]) -> None:
    """Print one line if this torch is newer than those that parwrap is tested with, and has changed one of ``names``.

    >>> warn_of_newer_torch(OF_RANKS)
    """
    version = sys.modules["torch"].__version__
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > NEWEST and (missing := missing_names(names)):
        tell(
            f"torch {version} is newer than those that parwrap is tested with ({TESTED}), and has changed private names that "
            f"parwrap uses: {', '.join(missing)}. What needs them fails. Install one of these versions, or a newer parwrap."
        )


def missing_names(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that this torch does not have.

    A name counts as present if its module is not imported, because nothing uses it then, or if its class is missing. Of several names
    joined by ``|``, one is enough.

    >>> missing_names(["torch.Tensor._base", "torch.Tensor._basis", "torch.Tensor._basis|_base"])
    ['torch.Tensor._basis']
    """
    return [each for each in names if not _exists(each)]


def private(path: str) -> Any:
    """The object with the dotted name ``path``; if torch does not have it, a function that raises an error that says so when it is called.

    So a torch that has changed one private name can still do whatever does not need it.

    >>> private("torch.optim._newest_hook")(1)
    Traceback (most recent call last):
    RuntimeError: torch 2... has no torch.optim._newest_hook, which parwrap needs here: install torch 2.9 to 2.15, or a newer parwrap.
    """
    owner, name = _owner(path)
    return getattr(owner, name) if hasattr(owner, name) else _Missing(path)


class _Missing:
    """Stands for a private name that torch does not have."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch {sys.modules['torch'].__version__} has no {self._path}, which parwrap needs here: install torch {TESTED}, or a newer "
            "parwrap."
        )


def _exists(path: str) -> bool:
    """Whether torch has the name. An attribute that only instances have is found by its use in a method of their class."""
    owner, names = _owner(path)
    methods = [each for base in getattr(owner, "__mro__", ()) for each in vars(base).values() if isinstance(each, FunctionType)]
    used = {name for method in methods for name in method.__code__.co_names}
    return owner is None or any(hasattr(owner, name) or name in used for name in names.split("|"))


def _owner(path: str) -> tuple[Any, str]:
    """The module or class that a dotted name belongs to, ``None`` if there is none, and the last part of the name."""
    *parts, name = path.split(".")
    found: Any = None
    for number, part in enumerate(parts, 1):
        found = sys.modules.get(".".join(parts[:number])) or getattr(found, part, None)  # not all modules are attributes of their packages
    return found, name
