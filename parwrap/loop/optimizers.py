"""The optimizers at work, what they own, and whether their models are in train mode (contract, rules 2 and 6).

Optimizers are noted when they are built, copied or unpickled. Those built before the scope opened are found once, at its entry; any other
at its first step. An optimizer is at work until the script builds another after a step, as it does for the next fold of a search; if it is
used again, it is at work again. Until then its parameters count, even if the script has dropped it: the garbage collector may find it
earlier on one rank. A copy is at work once it is used, because it may be a snapshot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.modules import Modules
from parwrap.loop.one_pass import Pass
from parwrap.loop.passes import Passes
from parwrap.places import Place, script_place
from parwrap.ranks.group import alone_now, is_alone, is_on_one_rank
from parwrap.rows.tensors import Rows

__all__ = ["Optimizers", "parameters_of"]

PARAMETERS = itemgetter("params")


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of ``optimizer``, group by group. Rows of a whole batch, such as latents, are no parameters: ranks hold others."""
    return (p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, Rows))


@dataclass(eq=False)
class _Work:
    """The work of an optimizer.

    Attributes:
        optimizer: returns the optimizer, or ``None`` once the script has dropped it.
        number: how many optimizers were built before it.
        parameters: those that it had when they were last looked at. They are kept, so that no other tensor gets the id of one.
        seen: their ids and the addresses of their values, which show cheaply that nothing has changed; ``None`` if one has no address.
        kinds: their ids, shapes, dtypes and devices; a lazy one has no shape yet.
        version: how often they have changed.
        built_at: how many batches had been drawn when it was built; -1 if it was built before the scope opened.
    """

    optimizer: weakref.ref[Optimizer]
    number: int
    built_at: int = -1
    parameters: list[torch.Tensor] = field(default_factory=list)
    seen: list[int] | None = None
    kinds: list[tuple[int, torch.Size | None, torch.dtype, torch.device]] = field(default_factory=list)
    version: int = 0


class _Made(NamedTuple):
    """What a batch of a training pass has made: the number of the batch, the line, and the pass."""

    batch: int
    place: Place
    training: Pass


class Optimizers(Interceptor):
    """The optimizers of the script.

    Args:
        passes: the passes over loaders.
        modules: the modules of the script.

    Attributes:
        were_built: whether the script has built an optimizer, even if none is left.
        trained_since_built: whether an optimizer has stepped since the newest one was built.
        steps: the number of steps of all optimizers, except those of one batch.
        active: the number of the optimizer that ran ``zero_grad`` or ``step`` last; -1 before the first.
    """

    def __init__(self, passes: Passes, modules: Modules) -> None:
        self._passes, self._modules = passes, modules
        self._works: weakref.WeakKeyDictionary[Optimizer, _Work] = weakref.WeakKeyDictionary()
        self._at_work: list[_Work] = []
        self._stepped: list[_Work] = []
        self._stepped_after = self._looked_after = 0
        self.trained_since_built = False
        self._had: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._made_in: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._hooks_on_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._batch_optimizers: weakref.WeakKeyDictionary[Optimizer, _Made] = weakref.WeakKeyDictionary()
        self.were_built = False
        self._generation = self._count = self.steps = 0
        self.active = -1

    # what exists

    def all(self) -> list[Optimizer]:
        """The optimizers at work that the script has not dropped, in the order in which they were built, without those of one batch."""
        return [optimizer for work in self._at_work if (optimizer := work.optimizer()) is not None]

    def sets(self) -> dict[int, list[torch.Tensor]]:
        """The parameters of each optimizer at work, also of one that the script has dropped, by its number in the order of building."""
        self.look()
        return {work.number: work.parameters for work in self._at_work}

    def owners(self) -> dict[int, int]:
        """For the id of each parameter, the number of its owner: the optimizer built last of those at work that have it."""
        return {id(p): number for number, parameters in self.sets().items() for p in parameters}

    def idle_sets(self) -> dict[int, list[torch.Tensor]]:
        """Like :meth:`sets`, for optimizers that are not at work, such as copies that the script has not used yet."""
        return {work.number: list(parameters_of(each)) for each, work in self._works.items() if work not in self._at_work}

    def use(self, numbers: Iterable[int]) -> None:
        """Put the optimizers with these ``numbers`` to work."""
        for work in [work for work in self._works.values() if work.number in numbers]:
            self._use(work)

    def _use(self, work: _Work) -> None:
        if work not in self._at_work:
            self._at_work = sorted([*self._at_work, work], key=lambda each: each.number)
            self._generation += 1

    def zero_grad(self, optimizer: Optimizer) -> None:
        work = self._works.get(optimizer)
        if work is None or (alone_now and is_alone()):  # ranks must not differ by what one does by itself
            return
        if work not in self._at_work:
            self._use(work)
        self._look_at(work, optimizer)
        self.active = work.number
        if self._passes.steps.ended:
            self._passes.steps.zeroed()

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        if optimizer in self._batch_optimizers or is_alone():
            return closure
        work = self._works.get(optimizer)

        def compute() -> Any:
            with self._passes.steps.computing(-1 if work is None else work.built_at):
                return closure()

        return compute

    @property
    def generation(self) -> int:
        """A number that changes whenever the optimizers at work or their parameters may have changed.

        Scripts write into ``param_groups``, which no intercepted call shows. What they write into ``.data`` is seen at the first backward
        of a pass and when gradients are cleared: a look at all values in each backward would take as long as the rest of it.
        """
        if self._looked_after != self._passes.begun:
            self._looked_after = self._passes.begun
            self.look()
        for work in self._at_work:
            optimizer = work.optimizer()
            if optimizer is not None:
                lists = [*map(PARAMETERS, optimizer.param_groups)]
                known = work.parameters
                if sum(map(len, lists)) != len(known) or not all(map(is_, chain(*lists), known)):
                    self._look_at(work, optimizer)
        return self._generation

    def version(self, optimizer: Optimizer) -> int:
        """A number that changes whenever ``optimizer`` gets other parameters, or one of them another shape, dtype or device.

        Scripts write into ``param_groups`` and ``.data``, which no intercepted call shows.
        """
        if optimizer not in self._works:
            self.built(optimizer)
        work = self._works[optimizer]
        self._look_at(work, optimizer)
        return work.version

    def look(self) -> None:
        """Look at the parameters of each optimizer at work that the script has not dropped."""
        for work in self._at_work:
            optimizer = work.optimizer()
            if optimizer is not None:
                self._look_at(work, optimizer)

    def _look_at(self, work: _Work, optimizer: Optimizer) -> None:
        parameters = [*chain(*map(PARAMETERS, optimizer.param_groups))]
        if Rows in map(type, parameters):
            parameters = [*parameters_of(optimizer)]
        try:
            seen = [*map(id, parameters), *map(torch.Tensor.data_ptr, parameters)]
        except Exception:  # one is lazy, or of a class without an address
            seen = None
        if seen is not None and seen == work.seen:
            return
        work.seen = seen
        kinds = [(id(p), None if is_lazy(p) else p.shape, p.dtype, p.device) for p in parameters]
        if work.kinds != kinds:
            self._generation += 1
            work.parameters, work.kinds, work.version = parameters, kinds, work.version + 1
            for p in work.parameters:
                self._had.setdefault(p)

    def has_had(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` is or was a parameter of any optimizer, at work or not, except those of one batch."""
        return leaf in self._had

    @property
    def trained(self) -> int:
        """The number of backwards and steps so far: a step on gradients that were made by hand trains too."""
        return self._passes.backwards + self.steps

    def note(self, optimizers: Iterable[Optimizer]) -> None:
        """Note ``optimizers`` that were built before the scope opened."""
        for each in optimizers:
            self.built(each)

    def copied(self, optimizer: Optimizer) -> None:
        if optimizer not in self._works:
            self.built(optimizer, is_copy=bool(self._at_work))

    def built(self, optimizer: Optimizer, is_copy: bool = False) -> None:
        if is_on_one_rank() or optimizer in self._batch_optimizers:  # ranks must not differ by what one builds by itself
            return
        known = optimizer in self._works
        if not known and (training := self._passes.training) and self._trains_batch(optimizer):
            self._batch_optimizers[optimizer] = _Made(self._passes.batches, script_place(), training)
            return
        self.were_built = True
        self._generation += 1
        if not known:
            self._works[optimizer] = work = _Work(weakref.ref(optimizer), self._count, self._passes.draws)
            self._count += 1
            if not is_copy:
                if self.trained_since_built:  # another training begins
                    self._at_work, self._stepped = [], []
                self.trained_since_built = False
                self._at_work.append(work)
        self.version(optimizer)

    def _trains_batch(self, optimizer: Optimizer) -> bool:
        """Whether every ``nn.Parameter`` of ``optimizer`` was made inside the training pass. False for an optimizer of older parameters."""
        return all(p in self._made_in or not isinstance(p, nn.Parameter) for p in parameters_of(optimizer))

    # what belongs to a batch (rule 6)

    def made(self, parameter: nn.Parameter) -> None:
        if training := self._passes.training:
            self._made_in[parameter] = _Made(self._passes.batches, script_place(), training)
            if parameter.requires_grad:  # a backward at a known line looks at no graph
                self._hooks_on_made[parameter] = parameter.register_post_accumulate_grad_hook(self._got_gradient)

    def of_batch(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` is an ``nn.Parameter`` that was made inside a training pass, so that it is not averaged.

        Raises:
            UsageError: ``leaf`` was made in an earlier batch, and is trained now.
        """
        made = self._made_in.get(leaf)
        if made is not None:
            self._refuse_older(made, f"a parameter of shape {tuple(leaf.shape)}")
        return made is not None

    def _got_gradient(self, leaf: torch.Tensor) -> None:
        made = self._made_in.get(leaf)
        if made is not None and made.batch != self._passes.batches and id(leaf) not in self.owners():
            self.of_batch(leaf)

    def _refuse_older(self, made: _Made, what: str) -> None:
        if made.batch != self._passes.batches:
            line = made.training.place
            because = (
                f"{line} begins a pass for every batch, and its last one is open until another begins. " if made.training.repeats else ""
            )
            raise UsageError(
                f"{script_place()} trains {what}, which {made.place} created in an earlier batch of the training pass at {line}. {because}"
                "A parameter created inside a training pass belongs to one batch: each rank has its own, and its gradient is not averaged. "
                f"To train it in several batches, create it before the first pass at {line}; there, all ranks create the same one."
            )

    # steps and modes

    def stepped(self, optimizer: Optimizer) -> None:
        work = self._works.get(optimizer)
        if work is None and (made := self._batch_optimizers.get(optimizer)) is not None:
            self._refuse_older(made, f"the parameters of a {type(optimizer).__name__}")
            return
        if alone_now and is_alone():
            return
        if work is None:
            self.built(optimizer)
            work = self._works[optimizer]
            work.built_at = -1  # it is older than the scope
        if work not in self._at_work:
            self._use(work)
        self.active = work.number
        self.steps += 1
        self.trained_since_built = True
        if self._stepped_after != self._passes.begun or work not in self._stepped:
            self._note_stepped(work)
        self._passes.stepped(work.built_at)

    def left_out(self, optimizer: Optimizer) -> None:
        """A step that is left out because of a loss scale has trained all the same."""
        work = self._works.get(optimizer)
        if work is not None and not is_alone():
            self._note_stepped(work)
            self._passes.stepped(work.built_at)

    def _note_stepped(self, work: _Work) -> None:
        """Note that the optimizer of ``work`` steps in the last pass."""
        if self._stepped_after != self._passes.begun:
            self._stepped, self._stepped_after = [], self._passes.begun
        if work not in self._stepped:
            self._stepped.append(work)

    def trains_in_batch(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` belongs to an optimizer for which :meth:`is_of_batch` is true."""
        return any(leaf is each for optimizer in self._batch_optimizers for each in parameters_of(optimizer))

    def is_of_batch(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` was built inside a training pass, for what was made there."""
        return optimizer in self._batch_optimizers

    def evaluate(self, since: int = -1) -> bool:
        """Whether the models of the optimizers that stepped in the last pass are in eval mode; before the first step, those of all at work.

        With ``since``, an earlier value of ``Passes.evals``: whether, besides, the script has put one of them in eval mode after that.
        """
        return self._passes.evals > since and self._modules.evaluates(self._judged(), since)

    def eval_place(self) -> Place | None:
        """The line that put the models of :meth:`evaluate` in eval mode last; ``None`` if none did."""
        return self._modules.eval_place(self._judged())

    def _judged(self) -> Iterator[torch.Tensor]:
        self.look()
        return (p for each in self._stepped or self._at_work for p in each.parameters)

    def moved(self, module: nn.Module) -> None:
        self._generation += 1

    def close(self) -> None:
        """Remove the hooks on parameters."""
        for hook in self._hooks_on_made.values():
            hook.remove()
