"""Data parallelism: every rank holds the model, and each backward leaves the average gradient in ``.grad`` (contract, rule 5).

This file is the regular step: find the site, check that all ranks come to it, run the backward while its gradients are averaged, compare.
``ddp_sites.py`` finds the parameters of a site, ``ddp_averager.py`` averages them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from parwrap.checks.same_step import LOSS, LOSS_LOW
from parwrap.checks.same_weights import SameWeights
from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.loop.passes import loss_factor
from parwrap.places import script_place
from parwrap.ranks.group import is_alone
from parwrap.strategies.ddp_averager import BUCKET_MB, FIRST_BUCKET, GradientAverager, average_now
from parwrap.strategies.ddp_sites import Site, Sites
from parwrap.strategies.micro_batches import MicroBatches
from parwrap.strategies.strategy import Loop, OneModel
from parwrap.torch_private.autograd import in_backward, input_metadata
from parwrap.torch_private.modules import NormBase

__all__ = ["DDP"]

READY_TWICE = "marked as ready twice"
"""What DDP says of a parameter whose gradient arrives again after it has been averaged."""


class DDP(OneModel):
    """Averages gradients over the ranks.

    Args:
        loop: the state of the running loop.
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._sites = Sites(loop, self.buffers.watch)
        self._weights = SameWeights(loop.group, loop.passes, loop.optimizers, loop.modules)
        # until it is known whether the script accumulates by hand
        traits = loop.options().traits
        self._micro_batches = MicroBatches(loop.passes, loop.say) if traits.averages and traits.in_buckets else None
        self._thread: int | None = None
        self._local = self._synced_steps = self._counted_steps = 0
        self._evaluated_at: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        with torch.inference_mode(False), torch.enable_grad():
            # autograd runs nodes of the same age in any order, and signal nodes have age 0: the script's nodes must be newer
            torch.zeros((), requires_grad=True).sum()

    def backward(self, call: Backward) -> None:
        """Run ``call``, and average over the ranks its gradients of parameters that they share.

        Inside ``no_sync``, or inside another backward, only run it.
        """
        if self._thread is not None:
            if not self._in_running_backward():
                raise self._two_threads()
            self.loop.divisors.weigh(call)
            call.run()  # inside of another backward, as re-entrant checkpoints do it
            return
        self._thread = threading.get_ident()
        try:
            self._run(call)
        finally:
            self._thread = None
        self.loop.passes.ran_backward()

    def _run(self, call: Backward) -> None:
        loop, weights = self.loop, self._weights
        # how much does this rank's part of the batch count?
        weight = self._weight(call)
        if weights.due_at is not None:  # all optimizers have stepped now
            weights.check()
        scale, options = weight, loop.options()
        if options.loss != "mean":
            scale *= loss_factor(weight, loop.group.world.size, options, loop.passes.reads_whole)
        if self._local:
            self._sites.runs_locally()
            loop.divisors.weigh(call)
            call.times(scale).run()
            return

        # which parameters?
        site = self._sites.find(call)
        averager = site.averager
        if averager is None:  # nothing that ranks share
            call.run()
            return
        if averager.broken is not None:
            averager.refuse_to_go_on()

        # run the backward, while torch's hooks average the buckets
        root, added = loop.losses.root(call), loop.divisors.weigh(call) if loop.divisors.waiting else None
        loss = None if root is None else root.data if added is None else root.data + added
        weighted = call
        if scale != 1.0:
            weighted, loss = call.times(scale), None if loss is None else loss * scale
        exchange = loop.same_step.begin(averager.number, weight, site.place, site.shown, loss)
        if self._micro_batches is not None:
            self._micro_batches.before(averager)
        try:
            if site.then_average or call.options["create_graph"]:
                averager.run_then_average(weighted, exchange)
            else:
                averager.run(weighted, exchange)
        except BaseException as error:
            self._failed(averager, site, error)
            raise

        # compare, and leave the mean in the loss
        grows = loop.same_step.finish(exchange)
        if root is not None:
            loop.losses.write_mean(root, exchange.means[LOSS] + exchange.means[LOSS_LOW])
        if grows or self._sites.arrived:
            self._sites.grow(site, call)
        if self._micro_batches is not None:
            self._micro_batches.after(averager, site.place)
        self.buffers.after_backward()

    def _failed(self, averager: GradientAverager, site: Site, error: BaseException) -> None:
        """Note that a backward has raised, and raise what says more than ``error``."""
        averager.broken = f"{type(error).__name__}: {error}"  # the error itself would keep its frames alive, with their tensors
        if isinstance(error, RuntimeError):
            if READY_TWICE in str(error):
                raise self._reenters(site.shown) from error
            if (reshaped := next(filter(_is_reshaped, averager.parameters), None)) is not None:
                raise self._other_shape(reshaped, site.shown) from error
            self.loop.same_step.explain(error)

    def _in_running_backward(self) -> bool:
        """Whether this thread runs a part of the running backward, as autograd's own threads do for operations on GPUs."""
        return self._thread is not None and (self._thread == threading.get_ident() or in_backward())

    def _reenters(self, place: str) -> UsageError:
        return UsageError(
            f"the backward at {place} computes the gradient of a parameter in several parts, of which re-entrant checkpoints compute some "
            "in backwards of their own. Earlier backwards at this line ran no such checkpoint, so ranks have begun to average the gradient "
            "before its last part. Write checkpoint(..., use_reentrant=False), or use the checkpoint from the first backward on."
        )

    def _other_shape(self, parameter: torch.Tensor, place: str) -> UsageError:
        return UsageError(
            f"{self.loop.modules.name_of(parameter)} has got another shape through `.data`, {tuple(parameter.shape)}, after an earlier "
            f"backward at {place}; torch computes its gradient in the old one. Write a new parameter into the module and the optimizer: "
            "`module.weight = optimizer.param_groups[0]['params'][0] = nn.Parameter(values)`, or build a new optimizer."
        )

    def _two_threads(self) -> UsageError:
        other = next((each.name for each in threading.enumerate() if each.ident == self._thread), "")
        return UsageError(
            f"{script_place()} runs a backward in thread {threading.current_thread().name!r} while thread {other!r} runs "
            "another one. Ranks average gradients in the order of backwards, which two threads do not keep. Train in one thread."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._local += 1
        try:
            yield
        finally:
            self._local -= 1
            for averager in self._sites.averagers():
                averager.has_local = True

    def graph_bucket(self) -> int | None:
        """The size of buckets, but at least that of DDP's first one: ``torch.compile`` refuses less."""
        return None if is_alone() else max(FIRST_BUCKET, int((self.loop.options().bucket_cap_mb or BUCKET_MB) * 2**20))

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        parameters = self.loop.modules.in_order(list(parameters))
        bits = torch.tensor([float(p.grad is not None) for p in parameters], device=self.loop.group.device)
        with self.loop.group.control_message("the gradients of an accumulated step"):
            average_now(parameters, bits)

    def begins_pass(self, trains: bool) -> None:
        """Compare the weights before some training passes, and before other passes that follow a step.

        Before the latter, send rank 0's buffers too.
        """
        self.loop.same_step.begins_pass()
        if trains:
            self._weights.begins_pass()
        elif self._synced_steps != self.loop.optimizers.steps and not is_alone():
            self._synced_steps = self.loop.optimizers.steps
            self._weights.check("the check of weights as a pass that does not train begins")
            self.buffers.send_for_evaluation()

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Send rank 0's buffers if ``module`` is put in eval mode after a step: a validation set may be tensors that no loader reads.

        Not inside a training pass, where an attack may do so for each batch, and not for a single norm, which is frozen and trains on.
        """
        super().set_mode(module, training)
        steps, passes = self.loop.optimizers.steps, self.loop.passes
        if training or not steps or self._evaluated_at.get(module) == steps or isinstance(module, NormBase):
            return
        if passes.training is None and passes.in_loop() and not is_alone():
            self._evaluated_at[module] = steps
            self.buffers.send_for_evaluation()

    def moved(self, module: nn.Module) -> None:
        """Forget all sets of parameters, because a cast or move gives parameters other tensors. The next backward finds them again."""
        self._sites.moved()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step inside a backward, whose gradients are not averaged yet. Inside ``no_sync`` the step is allowed."""
        if self._thread is not None and self._in_running_backward() and not self._local:
            raise UsageError(
                f"{script_place()} steps inside a backward, before its gradients are averaged, so every rank would step on its own "
                "gradients. Step after backward, not in a hook."
            )

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        steps = self.loop.optimizers.steps
        if steps != self._counted_steps:  # else one rank steps by itself, or it is an optimizer of one batch
            self._counted_steps = steps
            if self._micro_batches is not None and self._micro_batches.stepped(optimizer):
                self._micro_batches = None
            self._weights.after_step(optimizer)

    def end(self) -> None:
        self._weights.end()

    def close(self) -> None:
        self._sites.close()
        self.buffers.close()


def _is_reshaped(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` has another shape than the gradient that autograd computes for it."""
    return parameter.requires_grad and tuple(input_metadata(get_gradient_edge(parameter).node)[0].shape) != tuple(parameter.shape)
