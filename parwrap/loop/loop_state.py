"""What the user's training loop has done so far: facts that several interceptors use.

The facts are: optimizers that were built, backward passes that ran, the train or eval mode of modules, and open passes over loaders.
Nothing here changes what the loop does.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from parwrap.group.group import is_alone
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.batch_weights import BatchWeights
from parwrap.torch_private.tensors import version_of

__all__ = ["Loop", "group_options", "parameters_of"]


class Loop(Interceptor):
    """The facts of one running loop.

    Attributes:
        backwards: the number of backward passes.
        steps: the number of optimizer steps.
        trained: whether a step has run since the last optimizer was built.
        batches: the number of batches that passes over loaders have yielded.
        samples: the number of samples in this rank's part of the last batch; 0 if unknown.
        passes: the number of open training passes over loaders.
        passes_in_for: how many of those a ``for`` statement reads; others may stay open after their loop.
        by_hand: whether the last backward was outside any ``for`` statement over a loader.
        evaluations: the number of open passes that read data without training, the same on all ranks.
        parts: whether the data of these passes is already split, so that each rank has its own part.
        begun: the number of passes, open or not, that may train, so that ranks get different samples.
        weights: the weights of this rank's parts of batches in an average over ranks.
        generation: how often an optimizer received new parameters, or a module was moved or cast.
        looking: called without arguments when a pass begins that reads data without training.
        drew: a function, called without arguments when a pass has yielded a batch.
        changed: a function, called with no arguments when training or a pass begins, or an optimizer is built.
        ran_by_hand: a function, called with no arguments after each backward that is :attr:`by_hand`.
    """

    def __init__(self) -> None:
        self.backwards = self.steps = 0
        self.trained = False
        self.batches = self.samples = 0
        self.passes = 0
        self.passes_in_for = 0
        self.by_hand = False
        self.evaluations = 0
        self.parts = False
        self._whole = False
        self.begun = 0
        self.weights = BatchWeights()
        self.generation = 0
        self.looking: Callable[[], None] = lambda: None
        self.changed: Callable[[], None] = lambda: None
        self.drew: Callable[[], None] = lambda: None
        self.ran_by_hand: Callable[[], None] = lambda: None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._parameters: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._sizes: dict[int, int] = {}
        self._of_one_batch: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._training: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._known = 0

    def find_optimizers(self) -> None:
        """Record the optimizers that were built before the interceptors were installed, in the order in which they were built."""
        if not any(getattr(kind.step, "hooked", False) for kind in _kinds(torch.optim.Optimizer)):
            return  # building the first optimizer of a class leaves this mark; the list of all live objects takes megabytes
        if not any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects()):
            return  # going through the list takes a fraction of the time of the collection
        gc.collect()  # leaves all live objects in one list, the oldest first
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.optim.Optimizer) and hasattr(thing, "param_groups"):
                self.own_parameters(thing)

    @intercepts
    def own_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``optimizer`` has new parameters: it is being built, or a group was added.

        An optimizer that only this rank builds is not registered. Neither is one that each rank builds for its own batch: see
        :meth:`are_of_one_batch`.
        """
        if is_alone():
            return
        if self.number(optimizer) is None and self.are_of_one_batch(parameters_of(optimizer)):
            self._of_one_batch[optimizer] = self.batches
            return
        self.register(optimizer)

    def are_of_one_batch(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether an optimizer of ``parameters`` that is built now trains them on the current batch only, which differs between ranks.

        This holds while a ``for`` statement reads a training pass, for two kinds of parameters: latents and perturbations, which are bare
        tensors or have a row for each sample; and a copy of a model that another optimizer trains, like the copies for each task in
        meta-learning.
        """
        if not self.passes_in_for:
            return False
        rest = [p for p in parameters if isinstance(p, nn.Parameter) and not self.has_row_for_each_sample(p)]
        return not rest or self._are_copies(rest)

    def _are_copies(self, parameters: list[nn.Parameter]) -> bool:
        """Whether most of ``parameters`` have the same values as another optimizer's parameters, but none is one of these."""
        owned = list(self.once_owned().values())
        if not {id(p) for p in owned}.isdisjoint(id(p) for p in parameters):
            return False
        kinds = defaultdict(list)
        for p in owned:
            kinds[p.shape, p.dtype, p.device].append(p)
        copied = [p.numel() for p in parameters if any(torch.equal(p, other) for other in kinds[p.shape, p.dtype, p.device])]
        return 2 * sum(copied) > sum(p.numel() for p in parameters)

    def has_row_for_each_sample(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is as long as this rank's part of the current batch."""
        return self.samples > 1 and tensor.ndim > 0 and tensor.shape[0] == self.samples

    def is_of_one_batch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether each rank has its own tensors in ``optimizer``.

        Once it steps in a later batch, it gets a number like other optimizers.
        """
        if (batch := self._of_one_batch.get(optimizer)) is None:  # this is the usual case
            return False
        if batch == self.batches:
            return True
        self.register(optimizer)
        return False

    def tensors_of_one_batch(self) -> set[int]:
        """The ids of the tensors of optimizers that train on the current batch only."""
        return {id(p) for optimizer in self._of_one_batch for p in parameters_of(optimizer)}

    def register(self, optimizer: torch.optim.Optimizer) -> int:
        """Give ``optimizer`` a number, if it has none, and know its parameters; returns the number."""
        self._of_one_batch.pop(optimizer, None)
        number = self.number(optimizer)
        if number is None:
            number = len(self._optimizers)
            self._optimizers.append(weakref.ref(optimizer))
        self._remember_parameters()
        self._sizes = {number: len(parameters_of(each)) for number, each in self.numbered_optimizers()}
        self.trained = False
        self.generation += 1
        self.changed()
        return number

    def number(self, optimizer: torch.optim.Optimizer) -> int | None:
        """The number of ``optimizer``, the same on all ranks, if it has one."""
        return next((number for number, known in enumerate(self._optimizers) if known() is optimizer), None)

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """The live optimizers in the order in which they were built."""
        return (optimizer for _, optimizer in self.numbered_optimizers())

    def numbered_optimizers(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """The live optimizers with their numbers, in order of construction, the same on all ranks."""
        return ((number, optimizer) for number, known in enumerate(self._optimizers) if (optimizer := known()) is not None)

    def owned(self) -> dict[tuple[int, int], torch.Tensor]:
        """The parameters of all optimizers, with the same numbers on every rank: the optimizer's number, and the position in it.

        An optimizer that no longer exists on one rank may still exist on another, until garbage is collected there.
        """
        return {(number, place): p for number, optimizer in self.numbered_optimizers() for place, p in enumerate(parameters_of(optimizer))}

    def once_owned(self) -> dict[tuple[int, int], torch.Tensor]:
        """Like :meth:`owned`, including parameters that outlive their optimizer, for example because its function has returned."""
        return {number: p for number, known in self._parameters.items() if (p := known()) is not None} | self.owned()

    def sharing(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The numbers of all optimizers that share a parameter with ``optimizer``, or did, including itself."""
        mine = {id(p) for p in parameters_of(optimizer)}
        return {number for (number, _), p in self.once_owned().items() if id(p) in mine}

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Record that ``module.train(training)`` was called."""
        self._training.pop(module, None)
        self._training[module] = training
        self.know(module)

    def know(self, module: nn.Module) -> None:
        """Give ``module`` a number, the same on all ranks, for :meth:`strangers`."""
        if module not in self._numbers and not is_alone():
            self._known += 1
            self._numbers[module] = self._known

    def look_for_parameters(self) -> None:
        """Find parameters that the script put into an optimizer's groups directly."""
        sizes: dict[int, int] = {}
        for number, known in enumerate(self._optimizers):
            if (optimizer := known()) is not None:
                size = 0
                for group in optimizer.param_groups:
                    size += len(group["params"])
                sizes[number] = size
        if sizes == self._sizes:  # usually true, at every step
            return
        grown = any(size > self._sizes.get(number, 0) for number, size in sizes.items())
        self._sizes = sizes
        if grown:
            self._remember_parameters()
            self.generation += 1

    def _remember_parameters(self) -> None:
        self._parameters |= {number: weakref.ref(p) for number, p in self.owned().items()}

    def moved(self) -> None:
        """Record that parameters have changed dtype or device."""
        self.generation += 1

    def ran_backward(self) -> None:
        self.backwards += 1
        self.by_hand = not (self.passes_in_for or self.evaluations)
        if not self.trained:
            self.trained = True
            self.changed()
        if self.by_hand:
            self.ran_by_hand()

    def count_step(self) -> None:
        """Count a step of an optimizer. The session calls this, because a single rank needs no hook for it."""
        self.steps += 1

    def opened_pass(self) -> None:
        self.passes += 1
        self.begun += 1
        self.changed()

    def closed_pass(self) -> None:
        self.passes -= 1
        self.changed()

    def reads_in_for(self, begins: bool) -> None:
        """Record that a ``for`` statement begins to read a training pass, or stops."""
        self.passes_in_for += 1 if begins else -1
        self.changed()

    def drew_batch(self, whole: bool = False, samples: int = 0) -> None:
        """Record that a pass has yielded a batch of ``samples`` samples; ``whole`` if all ranks have the same batch."""
        self.batches += 1
        self.samples = samples
        self._whole = whole
        self.drew()

    @property
    def weight(self) -> float:
        """The weight of this rank's part of the current batch in an average over ranks."""
        return self.weights.current.weight

    @property
    def loss_factor(self) -> float:
        """The factor of the current batch's loss in addition to its weight."""
        return self.weights.current.loss_factor

    def opened_evaluation(self) -> None:
        self.looking()
        self.evaluations += 1
        self.changed()

    def closed_evaluation(self) -> None:
        self.evaluations -= 1
        self.changed()

    @property
    def phase(self) -> int:
        """The number of optimizers that were built. A new one may begin a phase with other loaders."""
        return len(self._optimizers)

    def a_gradient(self) -> torch.Tensor | None:
        """The gradient of the first parameter that has one."""
        return next((p.grad for optimizer in self.optimizers() for p in parameters_of(optimizer) if p.grad is not None), None)

    def versions(self) -> int:
        """A number that changes whenever an optimizer's parameter changes, even in a step without a backward."""
        return sum(version_of(p) for optimizer in self.optimizers() for p in parameters_of(optimizer))

    def can_train(self) -> bool:
        """Whether training can begin yet."""
        return bool(self.backwards) or any(self.optimizers())

    def evaluating(self) -> bool:
        """Whether a pass that begins now cannot train: in eval mode, or before there is anything to train."""
        return self.in_eval_mode() or not self.can_train()

    def in_eval_mode(self) -> bool:
        """Whether gradients are disabled, or the root module that was last set to train or eval is in eval mode."""
        if not torch.is_grad_enabled():
            return True
        held: dict[bool, list[nn.Module]] = {True: [], False: []}
        for module, training in reversed(list(self._training.items())):
            held[training].append(module)
            if self.is_root(*held[training]):
                return not training
        return False

    def is_root(self, *modules: nn.Module) -> bool:
        """Whether ``modules`` together hold every parameter of some optimizer; without optimizers, any module counts.

        A frozen backbone is not a root, so its ``eval()`` does not count.
        """
        held = {id(p) for module in modules for p in module.parameters()}
        owned = self._owned_by_each()
        return not owned or any(parameters <= held for parameters in owned)

    def evaluated_with(self, module: nn.Module) -> list[nn.Module]:
        """The root that ``module`` completes when it is set to eval, or the modules that form a root together; none if some still train."""
        if self.is_root(module):
            return [module]
        in_eval = [(each, {id(p) for p in each.parameters()}) for each, training in self._training.items() if not training]
        for parameters in self._owned_by_each():
            parts = [each for each, held in in_eval if held & parameters]
            if any(each is module for each in parts) and self.is_root(*parts):
                return parts
        return []

    def strangers(self) -> dict[int, nn.Module]:
        """Modules in eval mode with parameters in no optimizer, such as weight averages of a model, by number."""
        owned = {id(p) for p in self.once_owned().values()}
        in_eval = ((number, module) for module, number in self._numbers.items() if not module.training)
        return {number: module for number, module in in_eval if not any(id(p) in owned for p in module.parameters())}

    def _owned_by_each(self) -> list[set[int]]:
        """The ids of the parameters of each optimizer."""
        return [{id(p) for p in parameters_of(optimizer)} for optimizer in self.optimizers()]

    def reads_whole(self) -> bool:
        """Whether the script is in a pass over batches that are the same on all ranks."""
        return self._whole and self.evaluations > 0

    def drawing(self) -> bool:
        """Whether random numbers are now drawn for data and dropout, rather than for building things that must be the same on all ranks.

        In a loop without a ``for`` statement over a loader, ``step_draws.py`` decides for each draw.
        """
        return self.trained and not self.evaluations and self.passes_in_for > 0


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in all its groups; an optimizer under construction has none."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Everything in its groups except the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in getattr(optimizer, "param_groups", ())]


def _kinds(kind: Any) -> Iterator[Any]:
    """``kind`` and all its subclasses."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)
