"""``@distributed``: run a plain training function on every rank of the launch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from inspect import Parameter, Signature
from io import IOBase
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from parwrap.decorators.inventory import found, named
from parwrap.decorators.opened_scope import Script, current_scope, explained, open_loop, open_strategy, opened
from parwrap.decorators.scope import Call, ScopeDecorator
from parwrap.errors import UsageError, counted
from parwrap.inline.launching import number_of_ranks, run_on_ranks
from parwrap.inline.rank_process import Task
from parwrap.inline.remote_exception import RemoteTraceback
from parwrap.inline.returned import KINDS, STATES
from parwrap.loop.one_pass import Pass
from parwrap.loop.passes import Passes
from parwrap.loop.random_streams import get_states, set_states
from parwrap.options import Options
from parwrap.places import begin_here, script_place, warn
from parwrap.ranks import group as groups
from parwrap.ranks.environment import attribute
from parwrap.ranks.world import detect, launch_variables
from parwrap.rows.tensors import whole_is_open, whole_result

__all__ = [
    "average_gradients",
    "distributed",
    "draws_put_back",
    "evaluating",
    "explained",
    "no_sync",
    "open_loop",
    "open_passes",
    "same_draws",
    "script_scope",
    "trains_apart",
]

NOT_HERE = {
    **dict.fromkeys(
        ("devices", "gpus", "nproc_per_node", "nproc", "num_processes", "world_size"),
        "pass the number of ranks to parwrap run as --nproc-per-node, or here as nprocs= to start ranks from a plain process",
    ),
    **dict.fromkeys(("find_unused_parameters", "static_graph"), "remove it: unused parameters are found without it"),
    "epochs": "make it an argument of your function",
    **{
        name: f"write @parwrap.{name} below @parwrap.distributed, or --{name.replace('_', '-')}"
        for name in ("accumulate", "amp", "data_parallel", "evaluate", "explain", "progress", "sync_bn", "uniform_length")
    },
}
"""Options of other tools that users may pass to ``distributed``, each with advice."""


class distributed(ScopeDecorator):
    """Run a plain single-GPU training function on every rank of the launch, unchanged.

    Write ``@distributed``, ``@distributed(seed=1)`` or ``with distributed():``. Without a launcher or ``nprocs`` it runs on one rank, with
    no process group. Inside another ``distributed``, also that of ``parwrap run``, the options given here replace those of the outer one
    while the inner function runs. ``backend``, ``strategy`` and ``timeout`` are always those of the outermost one.

    Args:
        backend: the backend of the process group; by default nccl for GPUs and gloo for the CPU.
        seed: the seed of torch, numpy and python on all ranks; by default all ranks continue from rank 0's random state.
        batch: ``"per_rank"``: each rank takes batches of the loader's ``batch_size``; ``"global"``: each rank takes its part of every
            batch, so that a model without random layers or batch norms trains as in a single process, up to rounding.
        uneven: if samples do not divide evenly, ``"pad"``: some are repeated, like in ``DistributedSampler``; ``"drop"``: some are skipped;
            ``"join"``: each is used once, and ranks are weighted by their number of samples in a step, which may be 0.
        lr: ``"linear"`` or ``"sqrt"``: multiplies the learning rate of each step by the number of ranks, or its square root, because the
            global batch is that much larger. ``param_groups`` and schedules are unchanged.
        loss: ``"mean"`` or ``"sum"``: how the loss combines the samples of a batch. It decides the weights of ranks whose parts differ
            in size. With ``batch="global"``, a sum is summed over ranks that read shares.
        draws: ``"by_pass"``: all ranks draw the same random numbers outside of training passes, and each its own inside; ``"per_rank"``:
            each draws its own from the first backward on, for loops that draw their batches by hand.
        strategy: how ranks train together: ``"ddp"`` averages gradients in every backward; ``"zero1"`` also deals the optimizer's state out
            to the ranks, and ``"fsdp"`` parameters and gradients too; ``"local_sgd"`` averages weights every few steps; ``"hogwild"`` lets
            each rank step on weights in shared memory; ``"parameter_server"`` lets some ranks hold the weights and step; ``"none"`` trains
            a model on each rank.
        bucket_cap_mb: the size of DDP's gradient buckets in megabytes; by default torch's.
        gradient_as_bucket_view: as in ``DistributedDataParallel``: saves memory, but a gradient that the script keeps across steps changes.
        compress: ``"bf16"``, ``"fp16"`` or ``"powersgd"``: sends gradients in fewer bytes.
        powersgd_rank: the rank of the matrices that PowerSGD sends.
        wrap: with ``"fsdp"``, which modules to gather separately: a class, a class name or a tuple of these; or a number n, for modules
            with n parameters or more, not counting those of modules inside that are gathered separately. By default, modules of an
            ``nn.ModuleList`` or ``nn.Sequential`` that have 100,000 parameters or more and share their class with another one there.
        shard_within_node: with ``"fsdp"``, each node holds a whole model, in shards of its ranks: between nodes only gradients travel.
        every: with ``"local_sgd"``, the number of steps from one average of the weights to the next.
        warmup: with ``"local_sgd"``, the number of steps at the beginning in which gradients are averaged instead of weights.
        outer: with ``"local_sgd"``, ``"nesterov"``: SGD with Nesterov momentum steps on the averaged change of the weights, as in DiLoCo.
            By default the weights become their average.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the momentum of the outer optimizer.
        lock: with ``"hogwild"``, whether only one rank at a time takes a step.
        servers: with ``"parameter_server"``, the number of servers, which are the last ranks; the others are workers.
        staleness: with ``"parameter_server"``, how many steps a worker may be ahead of the slowest; with 0 they step together, by default
            each goes at its own pace.
        timeout: seconds (or a ``timedelta``) that a rank waits for another one; by default 30 minutes.
        nprocs: in a process that no launcher has started, a call starts this many ranks for itself: a number, ``"gpu"``, ``"cpu"`` or
            ``"auto"``; see :func:`parwrap.launch`.
        start_method: with ``nprocs``, ``"fork"`` or ``"spawn"``: how ranks are started; see :func:`parwrap.launch`.

    Raises:
        UsageError: an unknown option or value.

    >>> @distributed(batch="global")
    ... def train(epochs):
    ...     return epochs * 2
    >>> train(3)
    6
    """

    not_here = NOT_HERE
    __signature__ = Signature(
        [Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type) for each in fields(Options)]
    )

    def __init__(self, **options: Any) -> None:
        self.given, self._options = options, Options(**options)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(Options))

    def elsewhere(self, call: Call) -> Callable[[Callable[[], Any]], Any] | None:
        nprocs = self._options.nprocs
        if nprocs is None:
            return None
        if _there_are_ranks():
            size = groups.world_size()
            if nprocs not in ("gpu", "cpu", "auto", size):
                warn(
                    f"parwrap: nprocs={nprocs} has no effect here, because the function already runs on {counted(size, 'rank')}. Remove "
                    "nprocs=, or pass it where the ranks are started."
                )
            return None
        size = number_of_ranks(nprocs, self._options.backend)
        return None if size == 1 else functools.partial(_on_new_ranks, call, size, self._options)

    def scope(self, call: Call) -> AbstractContextManager[Any]:
        if call.function is None and (nprocs := self._options.nprocs) not in (None, 1) and not _there_are_ranks():
            raise UsageError(
                f"`with parwrap.distributed(nprocs={nprocs!r}):` has no function that other processes could run: decorate the training "
                "function, or call parwrap.launch(train, nprocs=...)."
            )
        outer = current_scope()
        return opened(self._options, call) if outer is None else outer.joined(self.given)

    def returned(self, result: Any) -> Any:
        return whole_result(result) if whole_is_open() is not None else result


def _there_are_ranks() -> bool:
    """Whether this process was started as one of several, or has a scope or process group."""
    return current_scope() is not None or dist.is_initialized() or detect(os.environ).size > 1


def _on_new_ranks(call: Call, size: int, options: Options, run: Callable[[], Any]) -> Any:
    """Start ``size`` ranks that make ``call`` by ``run()``, and return rank 0's result.

    The ranks continue from this process's random state. Afterwards, this process continues from rank 0's.
    """
    names = functools.partial(named, call)
    there = names().values()
    function = functools.partial(_continued, run, get_states())
    loaders = found(DataLoader, there)
    draw = [part for each in loaders for part in (each, each.batch_sampler, getattr(each.batch_sampler, "sampler", each.sampler))]
    objects: list[Any] = [*found(KINDS, there), *found(tuple(STATES), draw)]
    task = Task(function, objects, names, [*found(IOBase, there), *loaders])
    who = f"parwrap.distributed with nprocs={options.nprocs!r}"
    try:
        result, states = run_on_ranks(task, size, options.backend, options.start_method, who)
    except BaseException as error:
        if isinstance(error.__cause__, RemoteTraceback):
            raise error.with_traceback(None) from error.__cause__  # the rank's is enough; a notebook would show pages of our own frames
        raise
    set_states(states)
    return result


def _continued(run: Callable[[], Any], states: tuple[Any, ...]) -> Any:
    """Make a call on a rank, from the random ``states`` of its caller. Returns its result and the random states after it."""
    set_states(states)
    return run(), get_states()


@contextmanager
def script_scope(*, log: str | None = None, heard: bool = False, quiet: bool = True, **options: Any) -> Iterator[None]:
    """The scope for a whole plain script.

    The launch variables and the process group are hidden from the script. Otherwise, its own distributed code would start.

    Args:
        log: the file for the output of this rank if it is above 0 and not ``heard``; ``None`` drops the output.
        heard: whether ranks above 0 print too, because the launcher shows all ranks.
        quiet: whether no line about numbers of a share is printed, and no summary at the end.
        options: see :class:`distributed`.
    """
    begin_here()
    with opened(Options(**options), Call(), Script(tuple(launch_variables()), log, heard, quiet)):
        yield


def no_sync() -> AbstractContextManager[None]:
    """Inside the ``with`` block, backwards add up gradients on this rank; the first backward after it averages the sums.

    Use it where a loop accumulates by hand, to send gradients once. It does nothing outside of ``distributed``, on one rank, and with a
    strategy that averages no gradients. With fsdp, each backward still sends gradients.

    >>> with no_sync():
    ...     pass
    """
    return nullcontext() if (strategy := open_strategy()) is None else strategy.no_sync()


def average_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Average the gradients of ``parameters`` over the ranks now. On one rank and outside of ``distributed`` it does nothing."""
    if (strategy := open_strategy()) is not None:
        strategy.average(parameters)


def open_passes() -> Passes | None:
    """The open passes; ``None`` outside of ``distributed``, on one rank, on a parameter server, and if the script distributes itself."""
    loop = open_loop()
    return None if loop is None else loop.passes


@contextmanager
def same_draws() -> Iterator[None]:
    """Inside the ``with`` block, all ranks draw the same random numbers, also in a training pass: for decisions drawn from torch or numpy.

    >>> with same_draws():
    ...     skips = torch.rand(()) < 0.5
    """
    passes = open_passes()
    if passes is None:
        yield
        return
    passes.same_draws(True)
    try:
        yield
    finally:
        passes.same_draws(False)


@contextmanager
def evaluating(divides: bool) -> Iterator[Callable[[Any], None]]:
    """Inside the block, ranks evaluate: all draw the same, and nothing trains.

    Args:
        divides: whether each rank reads a part of the data; otherwise it reads all.

    Yields:
        a function that every rank calls with the loader when a pass of the evaluation begins.
    """
    if (strategy := open_strategy()) is None:
        yield lambda loader: None
        return
    passes, totals = strategy.loop.passes, strategy.loop.totals
    opened = Pass(trains=False, shared=divides, place=script_place())
    passes.begin(opened)

    def begins(loader: Any) -> None:
        strategy.begins_pass(False)
        totals.evaluates(loader, script_place())

    try:
        with attribute(totals, "evaluating", True), same_draws():
            yield begins
    finally:
        passes.end(opened)


def trains_apart() -> bool:
    """Whether each rank trains a model of its own, with ``strategy="none"``."""
    loop = open_loop()
    return loop is not None and not loop.options().traits.one_model


def draws_put_back() -> AbstractContextManager[None]:
    """Restore the random streams after the block, which only this rank runs. Do nothing where :func:`open_passes` returns ``None``."""
    passes = open_passes()
    return nullcontext() if passes is None else passes.streams.put_back()
