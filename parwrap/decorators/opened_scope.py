"""The scope: what is open on a rank while a distributed function runs, assembled in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from parwrap.checks.same_step import SameStep
from parwrap.checks.same_work import WHOLE_WORK, SameWork
from parwrap.checks.watchdog import watched
from parwrap.data.dali import Pipelines
from parwrap.data.loaders import Loaders
from parwrap.data.loops import Loops
from parwrap.data.metrics import Metrics
from parwrap.data.sources import PassIterators
from parwrap.data.totals import Totals
from parwrap.decorators.inventory import reachable
from parwrap.decorators.scope import Call, module_of
from parwrap.errors import UsageError, explain
from parwrap.inline.rank_process import forks_of_started_rank_end_here, report_failure
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
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes
from parwrap.loop.random_streams import RandomStreams, get_states, next_scope, seed_all, set_states, states_kept
from parwrap.messages import INFO
from parwrap.messages import quiet as quiet_is_asked
from parwrap.norm.compiled_norm import scopes
from parwrap.norm.sync_bn import SyncBN
from parwrap.options import CurrentOptions, Options
from parwrap.places import from_script, is_ours, module_name
from parwrap.rank_zero.commands import refusing_exec
from parwrap.rank_zero.files import Files, intercepting_files
from parwrap.rank_zero.files import current as current_files
from parwrap.rank_zero.output import Output, output_of
from parwrap.rank_zero.path_rules import passing
from parwrap.rank_zero.whole_files import saved_whole
from parwrap.ranks import group as groups
from parwrap.ranks.agreement import agree, home
from parwrap.ranks.environment import attribute, without
from parwrap.ranks.group import Group, Observer, is_failure, say
from parwrap.ranks.platform import run_after_fork
from parwrap.ranks.shared_vectors import Messages, keeps_order_of_writes
from parwrap.ranks.world import detect
from parwrap.rows.collectives import Collectives
from parwrap.rows.tensors import Whole
from parwrap.strategies.strategy import Loop, Strategy
from parwrap.torch_private.versions import OF_GPUS, OF_RANKS, warn_of_newer_torch

if TYPE_CHECKING:
    from parwrap.rows.whole_batch import WholeBatch
    from parwrap.strategies.ps_server import Server

__all__ = ["HiddenGroup", "Scope", "Script", "current_scope", "explained", "open_loop", "open_strategy", "opened"]


class Script(NamedTuple):
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

_scope: Scope | None = None
"""The scope that is open in this process, if any. It is replaced as a whole: what is in it never changes."""


def current_scope() -> Scope | None:
    """The scope that is open in this process, if any."""
    return _scope


def open_strategy() -> Strategy | None:
    """How the ranks train together; ``None`` outside of ``distributed``, on one rank, on a server, and if the script distributes itself."""
    return None if _scope is None else _scope.strategy


def open_loop() -> Loop | None:
    """What the running loop has done so far; ``None`` in the same cases as :func:`open_strategy`."""
    return None if (strategy := open_strategy()) is None else strategy.loop


@contextmanager
def opened(options: Options, call: Call, script: Script | None = None) -> Iterator[None]:
    """Open a scope inside the block, in parwrap's open process group or in a new one, and end together with the other ranks.

    If the script has started a process group itself, nothing is opened, and a message says so.

    Args:
        options: those of the outermost function.
        call: the call of the user's function, or of a whole script.
        script: how a whole script runs; ``None`` for a function or block.
    """
    global _scope
    outer = groups.current()
    if outer is None and dist.is_initialized():
        _stand_aside("init_process_group")
        yield
        return
    with ExitStack() as started:
        whole = group = outer or started.enter_context(groups.opened(detect(os.environ), options.backend, options.patience))
        server = None
        if whole is not None and options.traits.has_servers:
            from parwrap.strategies.parameter_server import divided

            _share_streams(whole)
            trained: list[Any] = [*reachable(nn.Module, call), *reachable(torch.optim.Optimizer, call)]
            group, server = started.enter_context(divided(whole, options, trained, call))
        try:
            with ExitStack() as undo:
                _scope = _assembled(_Ranks(group, whole, server, started.close), options, call, script, undo)
                undo.push(_tell_error)
                try:
                    with explained(), forks_of_started_rank_end_here():
                        yield
                except BaseException as error:
                    report_failure(error)
                    if not is_failure(error):
                        _end(False)
                    raise
                _end(script is None or not script.hidden)
        finally:
            _scope = None


class _Ranks(NamedTuple):
    """Who runs together.

    Attributes:
        group: the process group of the ranks that train; ``None`` on one rank and on a parameter server.
        whole: the process group of all ranks; ``None`` on one rank.
        server: on a parameter server, the object that serves the workers; ``None`` on other ranks.
        leave: stops the process group, if it was started for this scope.
    """

    group: Group | None
    whole: Group | None
    server: Server | None
    leave: Callable[[], None]


@dataclass(frozen=True)
class Scope:
    """What is open while a distributed function runs.

    Attributes:
        options: the options of the innermost running function.
        ranks: who runs together.
        strategy: how the ranks train together; ``None`` on one rank, on a server, and if the script distributes itself.
        interrupts: what holds Ctrl-C; ``None`` on one rank.
        training: closing it removes the interceptors of training.
        warnings: the warnings so far; ``None`` if no summary is printed at the end.
    """

    options: CurrentOptions
    ranks: _Ranks
    strategy: Strategy | None
    interrupts: Interrupts | None
    training: ExitStack
    warnings: Sequence[object] | None

    @contextmanager
    def joined(self, given: dict[str, Any]) -> Iterator[None]:
        """Apply the options ``given`` to an inner function while it runs."""
        group, passes = self.ranks.group, None if self.strategy is None else self.strategy.loop.passes
        before, after = self.options.now, replace(self.options.now, **given)
        if group is not None:
            now = {"backend": group.backend, "strategy": before.strategy}
            if "whole" in (before.batch, after.batch):
                now["batch"] = before.batch
            for name in now.keys() & given.keys():
                if given[name] != now[name]:
                    raise UsageError(
                        f"{name}={given[name]!r} is not possible inside of another @distributed, which runs with {now[name]!r}. Pass it to "
                        "the outermost @distributed or to parwrap run."
                    )
        if given.get("seed") is not None:
            with nullcontext() if passes is None else passes.streams.used(random_streams.NONE):
                seed_all(given["seed"])
        adjusts = group is not None and before.lr == "keep" != after.lr
        drawing = passes.drawing(given["draws"]) if passes is not None and "draws" in given else nullcontext()
        rates = learning_rates_times(partial(_lr_factor, self.options, group)) if adjusts else nullcontext()
        with attribute(self.options, "now", after), drawing, rates:
            yield


def _assembled(ranks: _Ranks, options: Options, call: Call, script: Script | None, undo: ExitStack) -> Scope:
    """Make what is open in a scope, and install it until ``undo`` closes. The order matters: each part uses those above it."""
    enter, current, training = undo.enter_context, CurrentOptions(options), ExitStack()
    asked = quiet_is_asked() or os.environ.get(QUIET, "0") not in ("", "0")
    silent = asked or (script is not None and script.quiet)
    hidden, log, heard, quiet = script or Script()
    module = "__main__" if script else module_of(call.function)
    group, whole = ranks.group, ranks.whole

    # what trains
    enter(without(hidden))
    if options.seed is not None:
        seed_all(options.seed)
    interrupts = None
    if whole is not None:
        interrupts = Interrupts()
        enter(interrupts.installed())
    interceptors: list[Interceptor] = []
    reading: list[Interceptor] = []
    strategy, observer, whole_batch = None, _Observer(), None
    if ranks.server is not None:
        interceptors = [ranks.server]
    elif group is not None and interrupts is not None:
        strategy, observer, interceptors, reading, whole_batch = _prepare_training(group, current, call, silent, interrupts, undo)
        interceptors.append(_OwnDistribution(undo, ranks.leave))

    # output and files
    if whole is not None:
        output = enter(output_of(whole.world.rank, log, heard))
        check_wait = check_save = None
        if strategy is not None and group is not None and interrupts is not None:
            positions = strategy.loop.same_step.positions
            aborted = enter(watched(group, positions, interrupts, partial(_report, whole.world.rank, output)))
            check_wait, check_save = positions.check_wait, aborted.check_save
            if group.backend == "nccl":
                interceptors.append(aborted)
        enter(refusing_exec(whole.world.size))
        if whole.folder is not None:
            files = enter(intercepting_files(whole, module, check_wait, _is_checkpoint, check_save))
            enter((group or whole).observed(replace(observer, files=files)))
        reading.append(HiddenGroup(script=bool(hidden)))
    elif script:
        enter(saved_whole(module))

    # the calls of torch
    warnings = None if quiet or asked else enter(parwraps_warnings())
    enter(training)
    if whole_batch is not None:
        training.enter_context(whole_batch.opened(module))  # around the calls that write files: rows are collected first
    training.enter_context(intercepting(interceptors, module))
    enter(intercepting(reading, module))
    return Scope(current, ranks, strategy, interrupts, training, warnings)


def _prepare_training(
    group: Group, options: CurrentOptions, call: Call, silent: bool, interrupts: Interrupts, undo: ExitStack
) -> tuple[Strategy, _Observer, list[Interceptor], list[Interceptor], WholeBatch | None]:
    """Give all ranks the same random streams, and make what ranks of ``group`` train with.

    Returns:
        the strategy, the observer of the group, the interceptors of training, those that stay in a forked process, and with
        ``batch="whole"`` what shows the script whole batches.
    """
    streams = RandomStreams(group.world.rank)
    undo.callback(streams.close)
    passes = Passes(streams, options.now.draws)
    there = reachable((nn.Module, torch.optim.Optimizer), call)
    modules = Modules(passes, [each for each in there if isinstance(each, nn.Module)])
    optimizers = Optimizers(passes, modules)
    whole = whole_batch = None
    if options.now.batch == "whole":
        from parwrap.rows.whole_batch import WholeBatch  # which fills a table

        whole = Whole(Collectives(messages_of(group), group.world.rank, group.world.size, home(group)), states_kept)
        whole_batch = WholeBatch(whole, partial(streams.used, random_streams.TRAINING))
    losses = Losses(None if whole_batch is None else whole_batch.settled)
    undo.callback(modules.close)
    undo.callback(optimizers.close)
    same_step = SameStep(group, passes, SameWork(passes, optimizers, say), interrupts)
    undo.callback(same_step.close)
    number = _share_streams(group)  # from here on, the pages of all ranks are there
    streams.begin(number if options.now.seed is None else 0)
    divisors = Divisors(group, passes, options)
    unless_quiet: Callable[[str], None] = (lambda text: None) if silent else partial(say, level=INFO)
    totals = Totals(group.world.size, passes, unless_quiet)
    observer = _Observer(same_step, totals, shows_whole=options.now.batch == "whole")
    undo.enter_context(group.observed(observer))
    loop = Loop(group, options, passes, optimizers, modules, losses, divisors, same_step, totals, unless_quiet)
    optimizers.note(each for each in there if isinstance(each, torch.optim.Optimizer))
    traits, name = options.now.traits, options.now.strategy
    made: Strategy = getattr(import_module(f"parwrap.strategies.{name}"), traits.kind)(loop)
    if group.world.rank == 0:
        warn_of_newer_torch(OF_RANKS + OF_GPUS * torch.backends.cuda.is_built())
    undo.callback(made.close)
    iterators = PassIterators(passes, Loops(passes, optimizers), totals, made.begins_pass, group.world.size)
    undo.callback(iterators.close)
    loaders = Loaders(group, options, optimizers, iterators, unless_quiet, whole)
    undo.enter_context(loaders.forwarding_states())
    shared: list[Interceptor] = []
    if traits.one_model:
        shared = [loaders, Metrics(passes, whole is not None)]
        undo.enter_context(intercepting_pipelines(Pipelines(group, options, iterators)))
    if options.now.lr != "keep":
        undo.enter_context(learning_rates_times(partial(_lr_factor, options, group)))
    interceptors = [optimizers, modules, losses, *shared, *([divisors] if whole is None else []), made]
    if whole_batch is not None:
        norms = SyncBN(None, None, lambda: passes)
        undo.enter_context(scopes.opened(norms.exchange, shared=True))
        interceptors += [norms, whole_batch]
    return made, observer, interceptors, [streams, HiddenWhileRead()], whole_batch


def messages_of(group: Group) -> Messages:
    """What sends the rows of a whole batch, apart from gradients."""
    on_cpu = group.backend != "nccl"
    by_memory = group.world.on_one_node and on_cpu and keeps_order_of_writes()
    return Messages(
        group.control if on_cpu else dist.group.WORLD,
        lambda kind: group.control_message(kind),
        group.folder if by_memory else None,
        passing,
    )


def _lr_factor(options: CurrentOptions, group: Group | None) -> float:
    return options.now.lr_factor(group.world.size if group else 1)


@dataclass(frozen=True)
class _Observer(Observer):
    """Checks lockstep before control messages, and tells the parts of a scope what ranks have done together."""

    same_step: SameStep | None = None
    totals: Totals | None = None
    files: Files | None = None
    shows_whole: bool = False

    def whole(self, x: Any) -> bool:
        return self.shows_whole

    def control_message(self, kind: str) -> AbstractContextManager[Callable[[], None]]:
        return super().control_message(kind) if self.same_step is None else self.same_step.control(kind)

    def after_barrier(self) -> None:
        if self.files is not None:
            self.files.crossed()

    def summed(self, equal: Callable[[], bool]) -> None:
        if self.totals is not None:
            self.totals.summed(equal)


class _OwnDistribution(Interceptor):
    """Closes the scope if the script distributes itself.

    Args:
        undo: what is open.
        leave: stops the process group.
    """

    def __init__(self, undo: ExitStack, leave: Callable[[], None]) -> None:
        self._undo, self._leave = undo, leave

    def distributes_itself(self, what: str) -> None:
        _without_strategy()
        self._undo.close()
        if what == "init_process_group":
            self._leave()
        _stand_aside(what)


def _without_strategy() -> None:
    global _scope
    if _scope is not None:
        _scope = replace(_scope, strategy=None, ranks=_scope.ranks._replace(server=None))


def _forked() -> None:
    """Remove what belongs to the ranks, in a process that this rank has forked: the process is no rank, and trains by itself."""
    if _scope is not None:
        groups.leave()
        _scope.training.close()
        if _scope.interrupts is not None:
            _scope.interrupts.put_back()
        _without_strategy()


run_after_fork(_forked)


def _is_checkpoint(thing: Any) -> bool:
    """Whether ``thing``, which the script saves, is a checkpoint of this job."""
    return (loop := open_loop()) is not None and is_checkpoint(thing, [*loop.modules.all(), *loop.optimizers.all()])


def _tell_error(kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
    """Tell the other ranks of the node about an error that leaves the scope."""
    if error is not None and is_failure(error) and (loop := open_loop()) is not None:
        loop.same_step.positions.raised(error)


def _end(returns: bool) -> None:
    """End together with the other ranks, and print the summary. After an interrupt do neither: some ranks may have caught it.

    Args:
        returns: whether this process goes on, so that sharded models must become whole; a script's process ends.
    """
    scope = _scope
    if scope is None:
        return
    if scope.ranks.server is not None:
        scope.ranks.server.serve()
    if scope.strategy is None or (scope.interrupts is not None and scope.interrupts.raised):
        return
    loop = scope.strategy.loop
    group, passes, one_model = loop.group, loop.passes, loop.options().traits.one_model
    loop.same_step.end()
    scope.strategy.end()
    line = None
    loop.totals.tell()
    if one_model and scope.ranks.whole is group and scope.warnings is not None:
        line = summary(group, passes.clock, loop.optimizers.steps, len(scope.warnings)) or _whole_work(passes, group)
    if returns:  # a script's process ends
        scope.strategy.make_whole()
    if one_model:
        loop.same_step.positions.end(group.timeout.total_seconds())
    if line is not None:
        say(line, INFO)


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


def _share_streams(group: Group) -> int:
    """Give every rank the random state of rank 0. Returns rank 0's number of the scope."""
    agree(group, "the start of a distributed function")
    of_rank_zero: list[Any] = [get_states(), next_scope()]
    dist.broadcast_object_list(of_rank_zero, 0, group=group.control)
    set_states(of_rank_zero[0])
    return of_rank_zero[1]


@contextmanager
def explained(hidden: Sequence[str] = ()) -> Iterator[None]:
    """Add advice to an error that leaves the block, in which the environment variables ``hidden`` are not there."""
    try:
        yield
    except BaseException as error:
        group = groups.current()
        files, loop = current_files(), open_loop()
        explain(
            error,
            1 if group is None else group.world.size,
            loop.passes.samples if loop is not None and loop.options().batch == "global" else None,
            None if loop is None else loop.passes.short,
            files.written() if files else (),
            files.last_read.changed if files else lambda: None,
            hidden,
        )
        raise


def _report(rank: int, output: Output, text: str) -> None:
    print(f"parwrap: rank {rank}: LockstepError: {text}", file=output.errors, flush=True)


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
