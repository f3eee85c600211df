"""What a strategy is: an interceptor that decides how ranks train together.

Callers tell a strategy to act, and never ask which strategy it is: ``Options.traits`` has what they need to know. Each strategy has its own
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from parwrap.checks.same_data import NO_DATA, compare_data
from parwrap.checks.same_step import SameStep
from parwrap.data.totals import Totals
from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.divisors import Divisors
from parwrap.loop.losses import Losses, is_part_of_mean, is_sum, leading_sizes
from parwrap.loop.modules import Modules
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes
from parwrap.options import CurrentOptions
from parwrap.places import Place, script_place, warn
from parwrap.ranks.agreement import agree_on, first_difference
from parwrap.ranks.group import Group, is_alone, is_on_one_rank
from parwrap.strategies.buffers import Buffers

__all__ = ["Loop", "OneModel", "Strategy", "differing_parameter", "refuse_one_vector"]


@dataclass(frozen=True)
class Loop:
    """What strategies use of the running loop: its process group, its state and its checks.

    Attributes:
        group: the process group.
        options: a function that returns the options of the innermost running function.
        passes: the open passes.
        optimizers: the optimizers of the script.
        modules: the modules of the script.
        losses: the scalars that backwards are called on.
        divisors: weighs the cross entropies of a global batch.
        same_step: checks that all ranks are at the same step.
        totals: what the numbers that the script computes from passes cover.
        say: prints a line on rank 0, unless the script is to be quiet.
    """

    group: Group
    options: CurrentOptions
    passes: Passes
    optimizers: Optimizers
    modules: Modules
    losses: Losses
    divisors: Divisors
    same_step: SameStep
    totals: Totals
    say: Callable[[str], None]


def differing_parameter(all_ranks: Sequence[Sequence[Any]]) -> str:
    """Describe the first parameter that is not the same on rank 0 and another rank. ``all_ranks`` has the shapes and dtypes of each.

    >>> differing_parameter([[((2,), "torch.float32")], []])
    'parameter 0 of their optimizers differs: rank 0 has one of shape (2,) and torch.float32, and rank 1 has none'
    """
    at, mine, rank, theirs = first_difference(all_ranks, lambda each: f"one of shape {tuple(each[0])} and {each[1]}")
    return f"parameter {at} of their optimizers differs: rank 0 has {mine}, and rank {rank} has {theirs}"


def refuse_one_vector(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that keeps one state for all parameters together, which ``strategy`` cannot shard.

    Raises:
        UsageError: ``optimizer`` is an LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            f"{script_place()} uses an LBFGS, which steps all parameters as one vector, so its state cannot be sharded: choose a strategy "
            f"other than {strategy!r}, or another optimizer."
        )


class Strategy(Interceptor):
    """How the ranks of a loop train together.

    Args:
        loop: the state of the running loop.

    Attributes:
        loop: the state of the running loop.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def no_sync(self) -> AbstractContextManager[None]:
        """The context of :func:`parwrap.no_sync`. Here it does nothing; with ddp, backwards inside the block average nothing."""
        return nullcontext()

    def begins_pass(self, trains: bool) -> None:
        """Called when a pass over a loader begins; ``trains`` says whether it is a training pass."""

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients of ``parameters`` over the ranks, outside of a backward.

        ``loop/accumulation.py`` calls it for accumulated gradients that no backward has averaged.
        """

    def end(self) -> None:
        """Do what ranks do together at the end, such as a last comparison.

        Called when the function has ended on this rank without an error.
        """

    def make_whole(self) -> None:
        """Gather what ranks hold in shards; called before the function returns, because its caller may use the trained model."""

    def close(self) -> None:
        """Undo what the strategy has put on the script's modules and parameters. Called when the scope closes, also after an error."""

    def data_parallel(self, module: nn.Module, build: Callable[[Any], None]) -> None:
        """Build the script's ``nn.DataParallel`` by ``build``, with the device of this rank alone."""
        device = self.loop.group.device
        build([device.index or 0] if device.type == "cuda" else None)


FIRST = 8
"""In so many backwards on shares parwrap looks for losses that are sums."""


class OneModel(Strategy):
    """The base of strategies whose ranks train one model: its buffers, and the metrics that ``ReduceLROnPlateau`` gets, are rank 0's.

    Attributes:
        buffers: sends the model's buffers.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.buffers = Buffers(loop.group, loop.modules.first)
        self._named: set[Place] = set()
        self._looks_for_sums = FIRST if loop.options().batch == "global" and loop.options().loss == "mean" else 0

    def _refuse_alone(self) -> NoReturn:
        """Refuse a backward that only one rank runs."""
        raise UsageError(
            f"{script_place()} runs a backward inside @parwrap.rank_zero_only or rank_zero_first, where the other ranks do not take "
            "part in averaging its gradients. Train outside of that code."
        )

    def _name_whole(self) -> None:
        """Warn, once for its line, of a step in a pass that every worker reads whole, where workers step by themselves."""
        innermost = self.loop.passes.innermost
        if innermost is None or not innermost.why_whole or innermost.place in self._named or is_alone():
            return
        self._named.add(innermost.place)
        size = self.loop.group.world.size
        warn(
            f"parwrap: every worker reads everything in the pass at {innermost.place}: {innermost.why_whole}. Workers step by themselves, "
            f"so {size} workers take {size} times as many steps in it as one process. Write parwrap.shard(loader) before the loop."
        )

    def _weight(self, call: Backward) -> float:
        """The weight of this rank's part of the batch that ``call`` trains on.

        Raises:
            UsageError: only this rank runs ``call``; or the collate function has left samples out or packed them, so the weight depends on
                what it did on other ranks.
        """
        if is_alone():
            self._refuse_alone()
        loop = self.loop
        batch = loop.passes.batch(lambda: leading_sizes(call.tensors))
        if batch.left_out and loop.group.world.size > 1 and loop.options().loss == "mean" and not is_part_of_mean(call.roots):
            option = 'batch="global"' if loop.options().batch == "global" else 'uneven="join"'
            raise UsageError(
                f"{script_place()} trains on a batch of {batch.samples}, for which the loader has drawn {batch.samples + batch.left_out} "
                f"samples on this rank: its collate_fn leaves samples out, or packs several into one. With {option} the loss of a rank "
                "counts by its number of samples, and parwrap does not know those of the other ranks. Give the sum of the losses and their "
                "number to parwrap.mean_over_ranks(loss_sum, count). Or leave samples out of the dataset: "
                "DataLoader(Subset(dataset, good), ...)."
            )
        if self._looks_for_sums and loop.passes.training is not None and loop.passes.training.shared:
            self._look_for_sum(call)
        return batch.weight

    def _look_for_sum(self, call: Backward) -> None:
        """Warn once of a loss that is a sum over this rank's part of a batch: the average over ranks is not the sum of one process."""
        self._looks_for_sums -= 1
        size = self.loop.group.world.size
        if size > 1 and not any(isinstance(grad, torch.Tensor) for grad in call.grad_tensors) and is_sum(call.tensors):
            self._looks_for_sums = 0
            warn(
                f'parwrap: {script_place()} trains on a loss with reduction="sum". With batch="global" it adds up this rank\'s part of a '
                f'batch, so its mean over {size} ranks and the gradients are 1/{size} of those of one process. Write loss="sum" '
                "(--loss sum): then ranks add up."
            )

    def _agree(self, kind: str, about: object, different: Callable[[Sequence[Any]], Exception]) -> None:
        """Return once all ranks are about to do the same, and have read the same data.

        Args:
            kind: what they do, such as ``"an average of weights"``.
            about: what must be equal on all ranks.
            different: makes an error from what all ranks have passed as ``about``.
        """
        passes = self.loop.passes
        place = passes.training.place if passes.training else script_place()

        def error(all_ranks: list[Any]) -> Exception | None:
            abouts, data = zip(*all_ranks, strict=True)
            if any(each != abouts[0] for each in abouts):
                return different(abouts)
            compare_data(data, place)
            return None

        agree_on(self.loop.group, kind, (about, passes.data_to_send() or NO_DATA), error)
        passes.data_sent()

    def set_mode(self, module: nn.Module, training: bool) -> None:
        if not training and not is_on_one_rank():
            self.buffers.put_in_eval(module)

    def metric(self, metric: Any) -> Any:
        """Return rank 0's ``metric``, so that ``ReduceLROnPlateau`` decides alike: on GPUs, metrics differ in the last bits."""
        if is_alone():
            return metric
        sent = torch.tensor(float(metric), dtype=torch.float64)
        with self.loop.group.control_message("ReduceLROnPlateau.step"):
            dist.broadcast(sent, 0, group=self.loop.group.control)
        return sent.item()
