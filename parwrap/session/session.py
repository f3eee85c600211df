"""What is open while a distributed function runs: the interceptors, their shared state, and how ranks enter and leave together.

``distributed.py`` chooses the session and opens the process group around it. Each interceptor decides what happens in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from parwrap.coordination.hang_report import watched
from parwrap.coordination.sync_points import END
from parwrap.data.dali import Pipelines
from parwrap.data.loaders import Loaders
from parwrap.data.sharing_options import Sharing, TrainingData
from parwrap.errors import UsageError, explain
from parwrap.group import group as groups
from parwrap.group.group import Group
from parwrap.inline.rank_process import failed
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.table import intercepting
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams, get_state, seed_all, set_state
from parwrap.loop.step_draws import StepDraws
from parwrap.options import Options
from parwrap.rank_zero.file_versions import Awaited
from parwrap.rank_zero.output import RankZeroOutput, Voice
from parwrap.rank_zero.replica_files import ReplicaFiles
from parwrap.rank_zero.writer_files import WriterFiles
from parwrap.session.fixed_batch_sizes import note_fixed_size
from parwrap.session.hidden_launch import HiddenGroup, without_variables
from parwrap.session.learning_rate import learning_rates_times
from parwrap.session.start_line import stand_aside, start_line
from parwrap.session.torchmetrics import Metrics
from parwrap.strategies.common.loss_divisors import Counts, WeightedMeans
from parwrap.strategies.common.reducer import Reducer
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.named import strategy_of
from parwrap.strategies.single import Single
from parwrap.system.progress_bars import write_line

__all__ = ["Parts", "Session"]


class Parts(NamedTuple):
    """State of a distributed function on several ranks that other features use."""

    group: Group
    loop: Loop
    strategy: Strategy
    counts: Counts
    loaders: Loaders


class Session(Interceptor):
    """What is open while a distributed function runs: it makes the interceptors and holds their shared state.

    Args:
        group: the process group; ``None`` for a single rank.
        options: the options of the innermost running function.
        leave_group: a function that stops the process group, if it was started for this session.
        returns: whether the process continues after the session.
        outside_loop: a function that returns the role of a rank that does not run the loop.
    """

    def __init__(
        self, group: Group | None, options: Options, leave_group: Callable[[], None], returns: bool, outside_loop: Callable | None = None
    ) -> None:
        self._returns = returns
        self._group, self._options, self._leave_group = group, options, leave_group
        self._loop = Loop()
        self._outside_loop = outside_loop(self._loop) if outside_loop else None
        self.strategy: Strategy | None = None
        self._streams = RandomStreams(group.world.rank if group else 0)
        self._module: str | None = None
        self._step_draws: StepDraws | None = None
        self._hidden_group: HiddenGroup | None = None
        self._data: TrainingData | None = None
        self._announced = self._user_managed = self._weighs = False
        self.parts: Parts | None = None
        self.loaders: Loaders | None = None
        self._undo = ExitStack()

    @contextmanager
    def patched(self, module: str | None, hidden: Iterable[str]) -> Iterator[None]:
        """Install everything for a function of ``module``, and hide the variables ``hidden`` and the process group."""
        with self._undo:
            self._module = module
            if self._group is not None:
                self._undo.enter_context(self._group.coordinator.signals.installed())
            self._undo.enter_context(without_variables(hidden))
            interceptors = self._start()
            if hidden and self._group is not None:
                self._hidden_group = HiddenGroup()
                interceptors.append(self._hidden_group)
            self._undo.enter_context(intercepting(interceptors, module))
            yield

    @contextmanager
    def leaving_together(self) -> Iterator[None]:
        """Let ranks leave together: those that finish first answer the others until all have finished."""
        group = self._group
        if group is None:
            with self._outside_loop or nullcontext():
                yield
            return
        try:
            yield
        except BaseException as error:
            self.note(error)
            explain(error)
            failed(error)  # an inner one would have been caught
            if isinstance(error, SystemExit) and not error.code:
                self._leave(group)
            else:
                group.coordinator.fail(error)
                if self.strategy is not None:
                    self.strategy.failed(error)
            raise
        else:
            self._leave(group)

    def note(self, error: BaseException) -> None:
        """Add likely causes to an ``error`` of the function."""
        if self._group is not None:
            note_fixed_size(error, self._loop.weights.last, self._group.world.size)

    def _leave(self, group: Group) -> None:
        if self.loaders is not None:
            self.loaders.left()
        if groups.current() is group and not self._user_managed:
            group.coordinator.wait(END, place="")
            self.strategy.leave(self._returns)  # type: ignore[union-attr]

    @contextmanager
    def joined(self, given: dict[str, Any]) -> Iterator[None]:
        """Apply the options ``given`` to an inner function while it runs."""
        before = self._options
        if self._group and given.get("backend", self._group.backend) != self._group.backend:
            raise UsageError(
                f"backend={given['backend']!r} is not possible here: the process group is already open with {self._group.backend!r}. "
                "Pass the backend to the outermost parwrap.distributed or to parwrap.run."
            )
        after = replace(before, **given)
        if strategy_of(after) is not strategy_of(before):
            raise UsageError(
                f"strategy={after.strategy!r} is not possible inside strategy={before.strategy!r}: pass it to the outermost "
                "parwrap.distributed or to parwrap.run."
            )
        if given.get("seed") not in (None, before.seed):
            with self._streams.shared():
                seed_all(given["seed"])
        self._options = after
        # while learning rates are unchanged, the step is not intercepted
        adjusts = self._group is not None and before.lr == "keep" != self._options.lr
        weighs, means = self._weighs, self._weighted_means()
        try:
            with (
                learning_rates_times(self._lr_factor) if adjusts else nullcontext(),
                intercepting(means),
                self._hidden_group.shown() if self._hidden_group else nullcontext(),
            ):
                yield
        finally:
            self._options, self._weighs = before, weighs

    @intercepts
    def foreign(self, what: str, instance: Any) -> None:
        """Remove all interceptors, because the script distributes itself."""
        if isinstance(instance, Reducer):
            return
        self._user_managed, self.parts, self.loaders, self.strategy = True, None, None, None
        self._undo.close()
        if instance is None:
            self._leave_group()
        stand_aside(what)

    def _start(self) -> list[Interceptor]:
        """Synchronize the random streams and make the interceptors."""
        group, loop = self._group, self._loop
        if group is not None:
            group.coordinator.begin()
            self._undo.callback(group.coordinator.begin)
            self.strategy = strategy_of(self._options)(group, loop, lambda: self._options)
            group.coordinator.join(self.strategy)
        if self._options.seed is not None:
            seed_all(self._options.seed)
        elif group is not None:
            set_state(group.exchange("random state", get_state() if group.world.rank == 0 else None)[0])
        loop.find_optimizers()
        if group is not None or self._options.batch == "global":
            loop.changed = self._changed
            loop.ran_by_hand = self._ran_by_hand if group is not None else loop.ran_by_hand
            self._undo.callback(self._stop)
        together = self.strategy.together if self.strategy else None
        self.loaders = loaders = Loaders(together, loop, self._streams, self._sharing, self.began)
        self._undo.callback(self.loaders.numbers.close)
        self._undo.callback(loaders.close)
        if self._outside_loop is not None:
            return [loop, self.loaders, *self._undo.enter_context(self._outside_loop.quiet())]
        if group is None or self.strategy is None:
            return [loop, self.loaders, *([Single(loop)] if self._options.batch == "global" else []), Voice()]
        output = RankZeroOutput(group.world.rank)
        self._undo.enter_context(output.silenced())
        self._undo.callback(self.strategy.close)
        self._undo.enter_context(
            watched(group.coordinator.rank_positions, group.world.rank, self._options.hang_after, group.timeout.total_seconds())
        )
        shared = [] if together is None else self._shared(together, self.strategy, self.loaders)
        return [loop, self._streams, self.loaders, *shared, *self.strategy.interceptors(), output, self]

    def _shared(self, group: Group, strategy: Strategy, loaders: Loaders) -> list[Interceptor]:
        """The interceptors that divide the remaining work among ranks that train one model."""
        self.parts = Parts(group, self._loop, strategy, Counts(group, self._loop), loaders)
        files = WriterFiles(group) if group.world.rank == 0 else ReplicaFiles(group.world.rank, Awaited(group, group.key("files")))
        self._undo.callback(files.close)
        if self._options.lr != "keep":
            self._undo.enter_context(learning_rates_times(self._lr_factor))
        pipelines = Pipelines(group, self._loop, self._streams, lambda: self._options.batch == "global", self.began)
        return [pipelines, *self._weighted_means(), Metrics(self._loop), files]

    def _weighted_means(self) -> list[Interceptor]:
        """What has losses count by their divisors where ranks step together on parts of batches; none if a scope around has it."""
        if self._weighs or self._group is None or self.strategy is None or not self.strategy.steps_together:
            return []
        self._weighs = self._options.batch == "global"
        return [WeightedMeans(self._group, self._loop)] if self._weighs else []

    def _sharing(self) -> Sharing:
        return Sharing(self._options.batch, self._options.uneven, self._options.loss)

    def _lr_factor(self) -> float:
        return self._options.lr_factor(self._group.world.size if self._group else 1)

    def _stop(self) -> None:
        """Make passes that outlive the session no longer switch streams."""
        self._loop.changed = self._loop.ran_by_hand = lambda: None
        self._streams.use(own=False)

    def _changed(self) -> None:
        self._streams.use(self._loop.drawing())
        if self._loop.backwards and not self._announced:
            self._announce()

    def _ran_by_hand(self) -> None:
        """Check each draw from now on, because a backward pass ran outside any ``for`` statement over a loader."""
        self._step_draws = draws = StepDraws(self._loop, self._streams)
        self._loop.ran_by_hand = draws.ran_backward
        self._undo.enter_context(intercepting([draws], self._module))

    @intercepts
    def takes_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the patches that check draws while ``optimizer`` steps, because its hooks run."""
        if self._step_draws:
            self._step_draws.begin_step(optimizer)

    @intercepts
    def took_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of ``optimizer``, and install the patches again."""
        self._loop.count_step()
        if self._step_draws:
            self._step_draws.end_step(optimizer)

    def began(self, data: TrainingData) -> None:
        self._data = self._data or data

    def _announce(self) -> None:
        """Print the one line at the start of training."""
        self._announced = True
        group, data = self._group, self._data
        if group is None or self.strategy is None or group.world.rank > 0:
            return
        told = start_line(group, self.strategy, self._options, data, self._lr_factor())
        write_line(f"parwrap: {told}, seed {self._streams.seed()}")
