"""Updates that bypass ``backward`` and would use each rank's own gradients: reported at their first use.

These are ``torch.autograd.grad`` with manual updates, and an optimizer that steps while a backward still runs. ``nn.DataParallel``, which
would take the devices of other ranks, becomes a wrapper without effect. Nothing here averages anything.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parwrap.coordination.call_site import call_site, location, worth_a_look
from parwrap.errors import UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.agreement import checksums
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["Bypasses"]

GRAD = "torch.autograd.grad"

MOST_SITES = 64
"""Limit of call sites, so that a script with a new one for every step does not fill the memory."""

_TORCH = str(torch.__file__).removesuffix("__init__.py")


MOST_REPLACED = 8
"""A place where so many leaf tensors in a row were seen only once asks for gradients of inputs."""


@dataclass
class _Site:
    """One place in the script that calls ``torch.autograd.grad`` for leaf tensors.

    Attributes:
        leaves: the leaf tensors when they were first seen.
        before: their checksums then.
        batch: the number of the batch then.
        visits: the number of visits since then.
        replaced: the number of leaves in a row that were not seen again.
        known: whether the site needs no more checks.
    """

    leaves: tuple[weakref.ref[torch.Tensor], ...] = ()
    before: tuple[int, ...] = ()
    batch: int = 0
    visits: int = 0
    replaced: int = 0
    known: bool = False

    def begin(self, leaves: list[torch.Tensor], batch: int) -> None:
        """Start over with other leaves, or with the same ones after all of them have changed."""
        self.replaced = self.replaced + 1 if self.visits == 1 else 0
        self.known = self.replaced > MOST_REPLACED
        self.leaves, self.before = tuple(map(weakref.ref, leaves)), _checksums(leaves)
        self.batch, self.visits = batch, 1


class Bypasses(Interceptor):
    """Raises an error where an update would use gradients that are not averaged.

    Args:
        group: the ranks.
        loop: what the training loop has done so far.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        self._sites: dict[tuple, _Site] = {}
        group.coordinator.answer(GRAD, lambda detail, present: None)

    @intercepts
    def grad(self, leaves: list[torch.Tensor]) -> None:
        """Check a call of ``torch.autograd.grad`` for the gradients of ``leaves``.

        Raises:
            UsageError: the leaves were changed since the last call, differently on each rank.
        """
        if is_alone() or _called_by_torch():
            return
        key = call_site()
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MOST_SITES:
                del self._sites[next(iter(self._sites))]
            site = self._sites[key] = _Site()
        if not site.known:
            self._look(site, leaves)

    def _look(self, site: _Site, leaves: list[torch.Tensor]) -> None:
        if self._loop.evaluations and self._loop.backwards:
            site.leaves = ()  # all ranks read the same data, so that their changes prove nothing
            return
        if len(leaves) != len(site.leaves) or any(known() is not leaf for known, leaf in zip(site.leaves, leaves, strict=True)):
            site.begin(leaves, self._loop.batches)
            return
        site.visits += 1
        # a parameter exists from batch to batch; an input, an attack, a latent or a copy of a model may be changed by hand within a batch
        outlasts, by_hand = self._loop.batches > site.batch, not self._loop.passes_in_for
        lasting = [outlasts or (by_hand and isinstance(leaf, nn.Parameter)) for leaf in leaves]
        # all ranks come here alike; if nothing was changed yet, as while gradients are accumulated, ever more rarely
        if not any(lasting) or not worth_a_look(site.visits):
            return
        views = self._group.exchange(GRAD, (site.before, _checksums(leaves))).values()
        before, now = ([[each for each, looked in zip(view[when], lasting, strict=True) if looked] for view in views] for when in (0, 1))
        if any(each != now[0] for each in now):
            self._refuse(before)
        if now != before:
            site.known = True
            if self._loop.evaluations and not self._loop.backwards:
                # manual updates in a pass that every rank reads whole; the next pass is split, and will show them
                self._loop.ran_backward()
                site.known = False

    def _refuse(self, before: list[list[int]]) -> None:
        if any(each != before[0] for each in before):
            raise UsageError(
                f"torch.autograd.grad at {location()} asks for gradients of parameters that had different values on different ranks from "
                "the start. Set the seed before you build them, or build them inside the decorated function."
            )
        raise UsageError(
            f"the parameters that torch.autograd.grad at {location()} asks gradients for were changed to different values on different "
            "ranks: torch.autograd.grad returns gradients of this rank's own loss, because only backward() averages. Average before the "
            "update: grads = parwrap.reduce_mean(grads), or call loss.backward() and use .grad."
        )

    @intercepts
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse ``optimizer.step()`` inside a backward pass.

        Raises:
            UsageError: a backward is running, so gradients are not averaged yet.
        """
        if current_graph_task_id() != NO_GRAPH_TASK and not is_alone():
            raise UsageError(
                f"{type(optimizer).__name__}.step() at {location()} runs inside a backward pass, for example in a hook of "
                "register_post_accumulate_grad_hook. Gradients are averaged over the ranks only when the backward pass ends, so this "
                "step would use one rank's own gradients. Call step() after loss.backward()."
            )

    @intercepts
    def data_parallel(self, instance: nn.DataParallel, module: nn.Module, build: Callable[[Any], None]) -> None:
        """``nn.DataParallel`` on this rank's device alone, whichever devices the script names."""
        if self._group.device.type == "cuda":
            build([self._group.device.index])
            return
        # as torch does without a GPU; with some, it would move the module there
        nn.Module.__init__(instance)
        instance.module, instance.device_ids = module, []


def _called_by_torch() -> bool:
    """Whether torch itself asks, as in a compilation or a functional transform; frames 0 to 2 are this function, ``grad`` and the
    patch's."""
    frame = sys._getframe(3)
    while frame.f_back is not None and "wrapt" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)


def _checksums(leaves: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(checksums(leaves))
