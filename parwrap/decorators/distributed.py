"""``@distributed``: run a plain training function on every rank of the launch; and what is open while it runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from importlib import import_module
from inspect import Parameter, Signature
from io import IOBase
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from parwrap.checks.same_step import SameStep
from parwrap.checks.same_work import WHOLE_WORK, SameWork
from parwrap.checks.watchdog import watched
from parwrap.data.dali import Pipelines
from parwrap.data.loaders import Loaders
from parwrap.data.loops import Loops
from parwrap.data.metrics import Metrics
from parwrap.data.sources import PassIterators
from parwrap.data.totals import Totals
from parwrap.decorators.inventory import found, named, reachable
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError, counted, explain
from parwrap.inline.launching import number_of_ranks, run_on_ranks
from parwrap.inline.rank_process import Task, forks_of_started_rank_end_here, report_failure
from parwrap.inline.remote_exception import RemoteTraceback
from parwrap.inline.returned import KINDS, STATES
from parwrap.intercept.dali import intercepting_pipelines
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import intercepting
from parwrap.intercept.warned import parwraps_warnings
from parwrap.loop import random_streams
from parwrap.loop.checkpoints import is_checkpoint
from parwrap.loop.clock import summary
from parwrap.loop.divisors import Divisors
from parwrap.loop.interrupts import Interrupts
from parwrap.loop.learning_rate import learning_rates_times
from parwrap.loop.losses import Losses
from parwrap.loop.modules import Modules
from parwrap.loop.one_pass import Pass
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes
from parwrap.loop.random_streams import RandomStreams, get_states, seed_all, set_states
from parwrap.options import CurrentOptions, Options
from parwrap.places import begin_here, from_script, is_ours, module_name, script_place, warn
from parwrap.rank_zero.commands import refusing_exec
from parwrap.rank_zero.files import Files, current, intercepting_files
from parwrap.rank_zero.output import Output, output_of
from parwrap.rank_zero.whole_files import saved_whole
from parwrap.ranks import group as groups
from parwrap.ranks.agreement import agree
from parwrap.ranks.environment import without
from parwrap.ranks.group import Group, is_failure, say
from parwrap.ranks.platform import run_after_fork
from parwrap.ranks.world import detect, launch_variables
from parwrap.strategies.strategy import Loop, Strategy
from parwrap.torch_private.versions import OF_GPUS, OF_RANKS, warn_of_newer_torch

if TYPE_CHECKING:
    from parwrap.strategies.ps_server import Server

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
        "pass the number of ranks to parwrap.run as --nproc-per-node, or here as nprocs= to start ranks from a plain process",
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
    no process group. Inside another ``distributed``, also that of ``parwrap.run``, the options given here replace those of the outer one
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
        if _scope is not None:
            return _scope.joined(self.given)
        return _opened(self._options, call)


def _there_are_ranks() -> bool:
    """Whether this process was started as one of several, or has a scope or process group."""
    return _scope is not None or dist.is_initialized() or detect(os.environ).size > 1


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
    with _opened(Options(**options), Call(), _Script(tuple(launch_variables()), log, heard, quiet)):
        yield


def no_sync() -> AbstractContextManager[None]:
    """Inside the ``with`` block, backwards add up gradients on this rank; the first backward after it averages the sums.

    Use it where a loop accumulates by hand, to send gradients once. It does nothing outside of ``distributed``, on one rank, and with a
    strategy that averages no gradients. With fsdp, each backward still sends gradients.

    >>> with no_sync():
    ...     pass
    """
    return nullcontext() if _scope is None or _scope.strategy is None else _scope.strategy.no_sync()


def average_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Average the gradients of ``parameters`` over the ranks now. On one rank and outside of ``distributed`` it does nothing."""
    if _scope is not None and _scope.strategy is not None:
        _scope.strategy.average(parameters)


def open_passes() -> Passes | None:
    """The open passes; ``None`` outside of ``distributed``, on one rank, on a parameter server, and if the script distributes itself."""
    loop = open_loop()
    return None if loop is None else loop.passes


def open_loop() -> Loop | None:
    """What the running loop has done so far; ``None`` in the same cases as :func:`open_passes`."""
    return None if _scope is None else _scope.loop


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
    if _scope is None or (strategy := _scope.strategy) is None:
        yield lambda loader: None
        return
    passes, totals = strategy.loop.passes, strategy.loop.totals
    opened = Pass(trains=False, shared=divides, place=script_place())
    passes.begin(opened)
    before, totals.evaluating = totals.evaluating, True

    def begins(loader: Any) -> None:
        strategy.begins_pass(False)
        totals.evaluates(loader, script_place())

    try:
        with same_draws():
            yield begins
    finally:
        totals.evaluating = before
        passes.end(opened)


def trains_apart() -> bool:
    """Whether each rank trains a model of its own, with ``strategy="none"``."""
    return _scope is not None and _scope.strategy is not None and not _scope.strategy.loop.options().traits.one_model


class _Script(NamedTuple):
    """How a whole script runs in a scope, as in :func:`script_scope`.

    Attributes:
        hidden: the environment variables that it does not see.
        log: the file for the output of a rank above 0 that is not ``heard``; ``None`` drops it.
        heard: whether ranks above 0 print too.
        quiet: whether no line about numbers of a share is printed, and no summary at the end.
    """

    hidden: tuple[str, ...] = ()
    log: str | None = None
    heard: bool = False
    quiet: bool = True


QUIET = "PARWRAP_QUIET"
"""The variable that turns off the lines that ``--quiet`` turns off, also for decorated functions."""

_scope: _Scope | None = None
"""The scope that is open in this process, if any."""


@contextmanager
def _opened(options: Options, call: Call, script: _Script | None = None) -> Iterator[None]:
    """Open a scope inside the block, in parwrap's open process group or in a new one.

    If the script has started a process group itself, nothing is opened, and a message says so.
    """
    global _scope
    outer = groups.current()
    if outer is None and dist.is_initialized():
        _stand_aside("init_process_group")
        yield
        return
    with ExitStack() as opened:
        whole = group = outer or opened.enter_context(groups.opened(detect(os.environ), options.backend, options.patience))
        server = None
        if whole is not None and options.traits.has_servers:
            from parwrap.strategies.parameter_server import divided

            _share_streams(whole)
            trained: list[Any] = [*reachable(nn.Module, call), *reachable(torch.optim.Optimizer, call)]
            group, server = opened.enter_context(divided(whole, options, trained, call))
        _scope = _Scope(group, options, opened.close, whole, server)
        try:
            with _scope.entered(call, script):
                yield
        finally:
            _scope = None


class _Scope(Interceptor):
    """What is open while a distributed function runs.

    Args:
        group: the process group of the ranks that train; ``None`` on one rank and on a parameter server.
        options: the options of the innermost running function.
        leave_group: stops the process group, if it was started for this scope.
        whole: the process group of all ranks; ``None`` on one rank.
        server: on a parameter server, the object that serves the workers; ``None`` on other ranks.

    Attributes:
        strategy: how the ranks train together; ``None`` on one rank and if the script distributes itself.
    """

    def __init__(
        self, group: Group | None, options: Options, leave_group: Callable[[], None], whole: Group | None, server: Server | None
    ) -> None:
        self._group, self._leave_group, self._whole, self._server = group, leave_group, whole, server
        self._options = CurrentOptions(options)
        self._undo, self._training = ExitStack(), ExitStack()
        self._reading: list[Interceptor] = []
        self.strategy: Strategy | None = None
        self._interrupts: Interrupts | None = None
        self._warnings: list[str] = []
        self._silent = False  # whether parwrap prints nothing about numbers of a share

    @property
    def loop(self) -> Loop | None:
        """What the running loop has done so far; ``None`` in the same cases as ``strategy``."""
        return None if self.strategy is None else self.strategy.loop

    @contextmanager
    def entered(self, call: Call, script: _Script | None) -> Iterator[None]:
        """Install all interceptors, run the block, and end together with the other ranks.

        Args:
            call: the call of the user's function, or of a whole script.
            script: how a whole script runs; ``None`` for a function or block.
        """
        hidden, log, heard, quiet = script or _Script()
        asked = os.environ.get(QUIET, "0") not in ("", "0")
        self._silent, quiet = asked or (script is not None and quiet), quiet or asked
        module = "__main__" if script else module_of(call.function)
        with self._undo:
            self._undo.enter_context(without(hidden))
            interceptors = self._begin(call)
            if self._whole is not None:
                output = self._undo.enter_context(output_of(self._whole.world.rank, log, heard))
                check_wait = None
                if self.loop is not None and self._interrupts is not None:
                    report, positions = functools.partial(_report, self._whole.world.rank, output), self.loop.same_step.positions
                    self._undo.enter_context(watched(self.loop.group, positions, self._interrupts, report))
                    check_wait = positions.check_wait
                self._undo.enter_context(refusing_exec(self._whole.world.size))
                handled = intercepting_files(self._whole, module, check_wait, self._is_checkpoint)
                self._undo.enter_context(_files_of_rank_zero(self._whole, self._group or self._whole, handled))
                self._reading.append(HiddenGroup(script=bool(hidden)))
            elif script:
                self._undo.enter_context(saved_whole(module))
            if not quiet:
                self._warnings = self._undo.enter_context(parwraps_warnings())
            self._undo.enter_context(self._training)
            self._training.enter_context(intercepting(interceptors, module))
            self._undo.enter_context(intercepting(self._reading, module))
            self._undo.push(self._leave)
            try:
                with explained(), forks_of_started_rank_end_here():
                    yield
            except BaseException as error:
                report_failure(error)
                if not is_failure(error):
                    self._end(False, quiet)
                raise
            self._end(not hidden, quiet)

    def _is_checkpoint(self, thing: Any) -> bool:
        """Whether ``thing``, which the script saves, is a checkpoint of this job."""
        return (loop := self.loop) is not None and is_checkpoint(thing, [*loop.modules.all(), *loop.optimizers.all()])

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Tell the other ranks of the node about an error that leaves the scope."""
        if error is not None and is_failure(error) and self.loop is not None:
            self.loop.same_step.positions.raised(error)

    def part(self) -> int | None:
        """The number of samples in this rank's part of a batch; ``None`` if batches are not divided."""
        return self.loop.passes.samples if self.loop is not None and self._options.now.batch == "global" else None

    def short(self) -> tuple[int, int] | None:
        """The sizes of this rank's short last batch and of all batches of one process; ``None`` if one process has a short one too."""
        return self.loop.passes.short if self.loop is not None else None

    def _end(self, returns: bool, quiet: bool) -> None:
        """End together with the other ranks, and print the summary. After an interrupt do neither: some ranks may have caught it.

        Args:
            returns: whether this process goes on, so that sharded models must become whole; a script's process ends.
            quiet: whether no summary is printed.
        """
        if self._server is not None:
            self._server.serve()
        if (strategy := self.strategy) is None:
            return
        if self._interrupts is None or not self._interrupts.raised:
            loop = strategy.loop
            group, passes = loop.group, loop.passes
            loop.same_step.end()
            strategy.end()
            line = None
            loop.totals.tell()
            one_model = loop.options().traits.one_model
            if one_model and self._whole is group and not quiet:
                steps = loop.optimizers.steps
                line = summary(group, passes.clock, steps, len(self._warnings)) or _whole_work(passes, group)
            if returns:  # a script's process ends
                strategy.make_whole()
            if one_model:
                loop.same_step.positions.end(group.timeout.total_seconds())
            if line is not None:
                say(line)

    def _begin(self, call: Call) -> list[Interceptor]:
        """Give all ranks the same random streams, and make the interceptors."""
        group, options = self._group, self._options.now
        if options.seed is not None:
            seed_all(options.seed)
        if self._server is not None:
            self._undo.enter_context(Interrupts().installed())
            return [self._server]
        if group is None:
            return []
        streams = RandomStreams(group.world.rank)
        self._undo.callback(streams.close)
        passes = Passes(streams, options.draws)
        there = reachable((nn.Module, torch.optim.Optimizer), call)
        modules = Modules(passes, [each for each in there if isinstance(each, nn.Module)])
        optimizers, losses = Optimizers(passes, modules), Losses()
        self._undo.callback(modules.close)
        self._undo.callback(optimizers.close)
        self._interrupts = interrupts = Interrupts()
        self._undo.enter_context(interrupts.installed())
        same_step = SameStep(group, passes, SameWork(passes, optimizers, say), interrupts)
        self._undo.callback(same_step.close)
        _share_streams(group)  # from here on, the pages of all ranks are there
        streams.begin(options.seed is not None)
        self._undo.callback(setattr, group, "control_message", group.control_message)
        group.control_message = same_step.control
        divisors = Divisors(group, passes, self._options)
        totals = Totals(group.world.size, passes, (lambda text: None) if self._silent else say)
        self._undo.callback(setattr, group, "summed", group.summed)
        group.summed = totals.summed
        loop = Loop(group, self._options, passes, optimizers, modules, losses, divisors, same_step, totals)
        optimizers.note(each for each in there if isinstance(each, torch.optim.Optimizer))
        self.strategy = getattr(import_module(f"parwrap.strategies.{options.strategy}"), options.traits.kind)(loop)
        if group.world.rank == 0:
            warn_of_newer_torch(OF_RANKS + OF_GPUS * torch.backends.cuda.is_built())
        self._undo.callback(self.strategy.close)
        iterators = PassIterators(passes, Loops(passes, optimizers), totals, self.strategy.begins_pass, group.world.size)
        self._undo.callback(iterators.close)
        loaders = Loaders(group, self._options, optimizers, iterators)
        self._undo.enter_context(loaders.forwarding_states())
        if options.traits.one_model:
            pipelines = Pipelines(group, self._options, iterators)
            self._undo.enter_context(intercepting_pipelines(pipelines))
        if options.lr != "keep":
            self._undo.enter_context(learning_rates_times(self._lr_factor))
        shared = [loaders, Metrics(passes)] if options.traits.one_model else []
        self._reading += [streams, HiddenWhileRead()]
        return [optimizers, modules, losses, *shared, divisors, self.strategy, self]

    def forked(self) -> None:
        """Remove what belongs to the ranks, in a process that this rank has forked: the process is no rank, and trains by itself."""
        groups.leave()
        self._training.close()
        if self._interrupts is not None:
            self._interrupts.put_back()
        self.strategy = self._server = None

    @contextmanager
    def joined(self, given: dict[str, Any]) -> Iterator[None]:
        """Apply the options ``given`` to an inner function while it runs."""
        before, after = self._options.now, replace(self._options.now, **given)
        if self._group is not None:
            now = {"backend": self._group.backend, "strategy": before.strategy}
            for name in now.keys() & given.keys():
                if given[name] != now[name]:
                    raise UsageError(
                        f"{name}={given[name]!r} is not possible inside of another @distributed, which runs with {now[name]!r}. Pass it to "
                        "the outermost @distributed or to parwrap.run."
                    )
        if given.get("seed") is not None:
            with self.loop.passes.streams.used(random_streams.NONE) if self.loop else nullcontext():
                seed_all(given["seed"])
        adjusts = self._group is not None and before.lr == "keep" != after.lr
        drawing = self.loop.passes.drawing(given["draws"]) if self.loop and "draws" in given else nullcontext()
        self._options.now = after
        try:
            with drawing, learning_rates_times(self._lr_factor) if adjusts else nullcontext():
                yield
        finally:
            self._options.now = before

    def _lr_factor(self) -> float:
        return self._options.now.lr_factor(self._group.world.size if self._group else 1)

    def distributes_itself(self, what: str) -> None:
        """Remove all interceptors, because the script distributes itself by a call of ``what``."""
        self.strategy = None
        self._undo.close()
        if what == "init_process_group":
            self._leave_group()
        _stand_aside(what)


def _forked() -> None:
    if _scope is not None:
        _scope.forked()


run_after_fork(_forked)


class HiddenWhileRead(Interceptor):
    """Hides the process group from an ``IterableDataset`` while it is read. Otherwise the dataset might divide itself once more."""

    def hides_group(self, frame: FrameType) -> bool:
        return groups.is_reading_stream() and not is_ours(frame.f_code.co_filename)


ACT_ALONE = {
    "transformers": "save_pretrained() writes nothing on ranks above 0, which then cannot read it back",
    "ignite": "handlers save and log on rank 0 only; metrics add up over ranks what every rank has read whole",
    **dict.fromkeys(
        ("lightning", "lightning_fabric", "pytorch_lightning"),
        "Trainer takes the group for that of its own strategy, whose processes then wait for another one",
    ),
}
"""Libraries that would act on the process group by themselves, each with what goes wrong (docs/libraries.rst). torchmetrics needs it."""


class HiddenGroup(Interceptor):
    """Hides the process group from libraries that would act on it alone, and from the script's own code.

    Args:
        script: whether the group is hidden from the script: from a plain one, but not from a function that parwrap decorates.
    """

    def __init__(self, script: bool = True) -> None:
        self._script = script

    def hides_group(self, frame: FrameType) -> bool:
        return module_name(frame).partition(".")[0] in ACT_ALONE or (self._script and from_script(frame))


def _share_streams(group: Group) -> None:
    """Give every rank the random state of rank 0."""
    agree(group, "the start of a distributed function")
    states = [get_states()]
    dist.broadcast_object_list(states, 0, group=group.control)
    set_states(states[0])


@contextmanager
def explained() -> Iterator[None]:
    """Add advice to an error that leaves the block."""
    try:
        yield
    except BaseException as error:
        group = groups.current()
        opened = current()
        explain(
            error,
            1 if group is None else group.world.size,
            None if _scope is None else _scope.part(),
            None if _scope is None else _scope.short(),
            opened.written() if opened else (),
            opened.last_read.changed if opened else lambda: None,
        )
        raise


def draws_put_back() -> AbstractContextManager[None]:
    """Restore the random streams after the block, which only this rank runs. Do nothing where :func:`open_passes` returns ``None``."""
    passes = open_passes()
    return nullcontext() if passes is None else passes.streams.put_back()


def _report(rank: int, output: Output, text: str) -> None:
    print(f"parwrap: rank {rank}: LockstepError: {text}", file=output.errors, flush=True)


@contextmanager
def _files_of_rank_zero(whole: Group, group: Group, handled: AbstractContextManager[Files]) -> Iterator[None]:
    """Inside the block, only rank 0 writes files. After a barrier of ``group``, the other ranks see them."""
    if whole.folder is None:
        yield
        return
    with handled as files:
        before, group.after_barrier = group.after_barrier, files.crossed
        try:
            yield
        finally:
            group.after_barrier = before


def _whole_work(passes: Passes, group: Group) -> str | None:
    """The line at the end of a run in which no rank had less to do than one process: all data was read whole, and nothing averaged.

    ``None`` otherwise. If gradients were averaged, ``checks/same_work.py`` has compared the losses.
    """
    if passes.whole_at is None or passes.backwards:
        return None
    return (
        f"{passes.whole_at} read everything on each of {group.world.size} ranks, nothing was read in shares, and no backward averaged "
        f"gradients: {WHOLE_WORK}, which is right but no faster than one process. parwrap.shard(loader) gives each rank a share of a "
        "loader, and @parwrap.evaluate a part of an evaluation"
    )


def _stand_aside(what: str) -> None:
    """Print that parwrap does nothing in the scope, because the script calls ``what`` itself."""
    say(
        f"this script calls {what} itself, so parwrap leaves it alone: parwrap shards no loader and averages no gradient. To let parwrap "
        "do both, remove the script's own distributed code. To run the script as torchrun does, with its variables, add --plain to parwrap "
        "run."
    )
