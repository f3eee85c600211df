"""``@distributed``: runs a plain training function or script on every rank of the launch.

Opens the process group, and in it a session (``session.py``), which builds the interceptors and installs their patches. When the function
returns or raises, every patch is removed. ``self_launch.py`` launches ranks for a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import torch.distributed as dist

from parwrap.api.self_launch import Launch, gathered, on_ranks, there_are_ranks
from parwrap.data.loaders import Loaders
from parwrap.data.sharing_options import TrainingData
from parwrap.decorator import EarlyExit, ScopeDecorator, module_of, reporting_result
from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.options import Options
from parwrap.session.session import Parts, Session
from parwrap.session.start_line import stand_aside
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.named import strategy_of
from parwrap.world.world import detect, launch_variables

__all__ = ["distributed"]

LAUNCH_OPTIONS = tuple(field.name for field in fields(Launch))

NOT_HERE = {
    **dict.fromkeys(("amp", "mixed_precision", "precision", "fp16", "bf16"), "add @parwrap.amp"),
    **dict.fromkeys(("sync_bn", "sync_batchnorm", "sync_batch_norm"), "add @parwrap.sync_bn"),
    **dict.fromkeys(
        ("accumulate", "accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"),
        "add @parwrap.accumulate(steps)",
    ),
    **dict.fromkeys(
        ("devices", "gpus", "nproc_per_node", "nproc", "num_processes", "world_size"),
        "pass the number of ranks to parwrap.run as --nproc-per-node, or pass nprocs= to start them from Python",
    ),
    **dict.fromkeys(("find_unused_parameters", "static_graph"), "remove it: unused parameters are found without it"),
    "uniform_length": "add @parwrap.uniform_length",
    "evaluate": "decorate the function that evaluates with @parwrap.evaluate",
    "data_parallel": "use @parwrap.data_parallel instead of it",
    "epochs": "it is an argument of your function",
}
"""Options of other tools that users may pass to ``distributed``, each with advice."""


def signature_of(*options: type) -> Signature:
    """The signature of a decorator that takes the fields of the dataclasses in ``options`` as keyword arguments."""
    given = [field for each in options for field in fields(each)]
    return Signature([Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type) for each in given])


class distributed(ScopeDecorator):
    """Run a plain single-GPU training function on every rank of the launch, unchanged.

    Write ``@distributed``, ``@distributed(seed=1)`` or ``with distributed():``. Without a launcher it runs on one rank, with no process
    group. Inside another ``distributed``, it joins that one, and its options apply to its own function. ``timeout``, ``hang_after`` and the
    parameter-server options come from the outermost scope. An unchanged seed is not applied again.

    Args:
        backend: the backend of the process group; by default nccl for GPUs and gloo for the CPU.
        seed: the seed of torch, numpy and python on all ranks; by default they continue from rank 0's state.
        batch: ``"per_rank"``: each rank takes batches of the loader's ``batch_size``; ``"global"``: each rank takes its part of every
            batch, so that the results equal those of a single process.
        uneven: if samples do not divide evenly, ``"pad"``: some are repeated, like in ``DistributedSampler``; ``"drop"``: some are skipped;
            ``"join"``: each is used once, and ranks are weighted by their number of samples in a step, which may be 0.
        lr: ``"linear"`` or ``"sqrt"``: multiplies the learning rate of each step by the number of ranks, or its square root, because the
            global batch is that much larger. ``param_groups`` and schedules are unchanged.
        loss: ``"mean"`` or ``"sum"``: how the loss combines the samples of a batch. It weights parts of different sizes. With
            ``batch="global"``, a sum is summed over the ranks.
        strategy: how ranks train together: ``"ddp"`` averages gradients in every backward; docs/strategies.rst describes ``"zero1"``,
            ``"fsdp"``, ``"local_sgd"``, ``"parameter_server"``, ``"hogwild"`` and ``"none"``, and the options that only they have.
        compress: ``"bf16"`` or ``"fp16"`` halves the bytes of the gradients that DDP sends; ``"powersgd"`` reduces them much further.
        bucket_cap_mb: size of DDP's gradient buckets in megabytes.
        timeout: seconds (or a ``timedelta``) that a rank waits for another one; by default 30 minutes.
        hang_after: if a rank has waited this many seconds, rank 0 reports once where every rank is.
        wrap: with ``"fsdp"``, the modules to gather and shard one by one: a class, its name, a tuple of these, or the minimum number of
            parameters of such a module; by default the repeated blocks of 100,000 parameters or more in a ``ModuleList`` or ``Sequential``.
        gradient_as_bucket_view: as in ``DistributedDataParallel``: saves memory, but gradients kept across steps change.
        nprocs, returns, start_method: a call that is not on launched ranks launches them, like :func:`parwrap.launch`.

    Raises:
        UsageError: an unknown option or value.

    >>> @distributed(batch="global")
    ... def train(epochs):
    ...     return epochs * 2
    >>> train(3)
    6
    """

    not_here = NOT_HERE
    __signature__ = signature_of(Options, Launch)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._launch = Launch(**{name: options.pop(name) for name in LAUNCH_OPTIONS if name in options})
        self._given, self._options = options, Options(**options)
        strategy_of(self._options)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return (*(field.name for field in fields(Options)), *LAUNCH_OPTIONS)

    def scope(self, function: Callable[..., Any] | None) -> AbstractContextManager[Any]:
        if _session is not None:
            return _session.joined(self._given)
        if function is None and self._launch.nprocs not in (None, 1) and not there_are_ranks():
            raise UsageError(
                f"`with parwrap.distributed(nprocs={self._launch.nprocs!r}):` has no function that other processes could run: decorate "
                "the training function, or call it with parwrap.launch."
            )
        return _opened(self._options, module_of(function), function)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def report(result: Any) -> None:
            if now := strategy():
                now.returned(result)

        return gathered(reporting_result(function, report) if strategy_of(self._options).hands_over else function)

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._launch == Launch():
            return call

        def launching(*args: Any, **kwargs: Any) -> Any:
            return on_ranks(self._launch, self._options, partial(call, *args, **kwargs), joins=_session is not None)

        return launching

    @classmethod
    def script_scope(cls, **options: Any) -> AbstractContextManager[Any]:
        """The scope for a whole plain script; see :class:`distributed` for the options.

        The launch variables are hidden from the script. Otherwise, its own distributed code would start.
        """
        return _opened(cls(**options)._options, "__main__", None, hidden=launch_variables(), returns=False)


_session: Session | None = None


def parts() -> Parts | None:
    """The group of the running function; ``None`` on one rank, and if the script distributes itself."""
    return None if _session is None else _session.parts


def strategy() -> Strategy | None:
    """The strategy of the running function; ``None`` on one rank, and if the script distributes itself."""
    return None if _session is None else _session.strategy


def trains_apart() -> bool:
    """Whether every rank trains a separate model in the running function."""
    return (now := strategy()) is not None and now.together is None


def steps_apart() -> bool:
    """Whether every rank steps separately in the running function, using only the gradients of its own batches."""
    return (now := strategy()) is not None and not now.steps_together


def loaders_read() -> Loaders | None:
    """The loaders of the running function; ``None`` outside of one, and if the script distributes itself."""
    return None if _session is None else _session.loaders


@contextmanager
def errors_noted() -> Iterator[None]:
    """Add notes about its likely cause to an exception that leaves the block."""
    try:
        yield
    except Exception as error:
        if _session is not None:
            _session.note(error)
        raise


def shared_out(samples: int | None) -> None:
    """Record that the user splits data outside of loaders, for the line at the start of training. The length is ``None`` if unknown."""
    if _session is not None:
        _session.began(TrainingData(samples, None, None))


@contextmanager
def _opened(
    options: Options, module: str | None, function: Callable[..., Any] | None, hidden: Iterable[str] = (), returns: bool = True
) -> Iterator[None]:
    """Open a session inside the block, in the open process group or in a new one."""
    global _session
    outer = groups.current()
    if outer is None and dist.is_initialized():
        stand_aside("init_process_group")
        yield
        return
    with ExitStack() as grouped:
        group = outer or grouped.enter_context(groups.opened(detect(os.environ), options.backend, options.patience))
        chosen = strategy_of(options)
        joined = grouped.enter_context(chosen.joining(group, options))
        outside_loop = partial(chosen.outside_loop, group, options) if group is not None and joined is None else None
        _session = Session(joined, options, leave_group=grouped.close, returns=returns, outside_loop=outside_loop)
        try:
            with _session.patched(module, hidden), _session.leaving_together():
                yield
        except EarlyExit as left:
            if function is not None or not returns:
                left.function = function if left.returns else None
                raise
        finally:
            _session = None
