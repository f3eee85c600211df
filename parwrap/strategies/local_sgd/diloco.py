"""The outer optimizer of DiLoCo (Douillard et al., 2023): it updates the weights when ranks merge their progress.

The change since the common start is used as a gradient for SGD with Nesterov momentum. ``DiLoCo`` calls torch's ``sgd`` function, because
interceptors would take an optimizer object for one of the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim.sgd import sgd

__all__ = ["DiLoCo"]

Number = tuple[int, int]


class DiLoCo:
    """The outer optimizer; it identifies parameters by numbers that are the same on all ranks."""

    def __init__(self) -> None:
        self._before: dict[Number, torch.Tensor] = {}
        self._momenta: dict[Number, torch.Tensor | None] = {}

    def begin(self, parameters: Mapping[Number, torch.Tensor]) -> None:
        """Record ``parameters``, which are the same on all ranks, before the ranks continue separately."""
        for number, p in parameters.items():
            self._before[number] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)

    def keep(self, numbers: Collection[Number]) -> None:
        """Forget all parameters but ``numbers``."""
        self._before = {number: p for number, p in self._before.items() if number in numbers}
        self._momenta = {number: momentum for number, momentum in self._momenta.items() if number in numbers}

    def step(self, means: Mapping[Number, torch.Tensor], lr: float, momentum: float) -> dict[Number, torch.Tensor]:
        """Compute the new weights from the ``means`` over the ranks.

        Args:
            means: the mean of each parameter; one that was not given to :meth:`begin` becomes its mean.
            lr: the outer learning rate; 1 without momentum gives the means.
            momentum: the outer momentum.
        """
        numbers = [number for number in means if number in self._before]
        new = [self._before.pop(number) for number in numbers]
        momenta = [self._momenta.get(number) for number in numbers]
        gradients = [old - means[number].to(old) for number, old in zip(numbers, new, strict=True)]
        with torch.no_grad():
            sgd(new, gradients, momenta, lr=lr, momentum=momentum, nesterov=momentum > 0, weight_decay=0.0, dampening=0.0, maximize=False)
        self._momenta.update(zip(numbers, momenta, strict=True))
        return {**means, **dict(zip(numbers, new, strict=True))}

    def state(self) -> Any:
        """The state that another rank continues from."""
        return {number: p.cpu() for number, p in self._before.items()}, {
            number: None if momentum is None else momentum.cpu() for number, momentum in self._momenta.items()
        }

    def load(self, state: Any, device: torch.device) -> None:
        """Continue from the :meth:`state` of another rank."""
        before, momenta = state
        self._before = {number: p.to(device) for number, p in before.items()}
        self._momenta = {number: None if momentum is None else momentum.to(device) for number, momentum in momenta.items()}
