"""One optimizer on a parameter server, with the parameters that the server holds: takes steps with the workers' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from parwrap.strategies.parameter_server.optimizer_transfer import set_options, set_state, state_of
from parwrap.strategies.parameter_server.transport import Layout
from parwrap.torch_private.optimizer import global_post_hooks, global_pre_hooks

__all__ = ["HeldOptimizer", "Pushed", "unobserved"]


class Pushed(NamedTuple):
    """What a worker pushes for one server's parameters, besides the buffer of gradients.

    Attributes:
        present: the positions in the server's layout of parameters with a dense gradient.
        sparse: indices, values and size of the sparse gradients, by position.
        options: the options of the optimizer's groups; ``None`` if unchanged.
    """

    present: tuple[int, ...]
    sparse: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Size]]
    options: list[dict[str, Any]] | None


class HeldOptimizer:
    """The part of an optimizer that a server holds.

    Args:
        optimizer: the user's optimizer, in which the parameters of other servers have no values.
        places: the positions of the parameters that this server holds.
        parameters: the parameters at these positions.
    """

    def __init__(self, optimizer: Optimizer, places: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer, self._places, self.parameters = optimizer, places, parameters
        self.layout = Layout(parameters)
        self._last: dict[int, Pushed] = {}
        set_state(optimizer, state_of(optimizer, places))
        for p, state in list(optimizer.state.items()):
            if all(p is not mine for mine in parameters):
                state.clear()

    def values(self) -> torch.Tensor:
        """The parameters, in a new buffer."""
        buffer = torch.empty(self.layout.size, dtype=torch.uint8)
        for view, p in zip(self.layout.views(buffer), self.parameters, strict=True):
            view.copy_(p.detach())
        return buffer

    def set(self, places: Sequence[int], buffer: torch.Tensor) -> None:
        """Copy values to the parameters at ``places`` in the layout."""
        views = self.layout.views(buffer)
        for place in places:
            self.parameters[place].data.copy_(views[place])

    def step(self, pushes: Sequence[tuple[int, Pushed | None, torch.Tensor | None, float]]) -> None:
        """Take one step with the average of several workers' gradients.

        Args:
            pushes: for each worker, its rank, its push if that has changed, the buffer of gradients, and the weight.
        """
        total = sum(weight for *_, weight in pushes)
        sums: dict[int, torch.Tensor] = {}
        for worker, received, buffer, _ in pushes:
            pushed = self._last[worker] = received or self._last[worker]
            if pushed.options is not None:
                set_options(self._optimizer, pushed.options)
                self._last[worker] = pushed._replace(options=None)
            views = self.layout.views(buffer) if buffer is not None else []
            found = {place: views[place] for place in pushed.present}
            found |= {place: torch.sparse_coo_tensor(*parts, check_invariants=False) for place, parts in pushed.sparse.items()}
            for place, gradient in found.items():
                sums[place] = sums[place] + gradient if place in sums else gradient
        if not total:
            return
        for place, p in enumerate(self.parameters):
            p.grad = (sums[place] / total).to(p.device) if place in sums else None
        with torch.enable_grad(), unobserved():
            self._optimizer.step()

    def state(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state for the parameters on this server, by their position in the optimizer."""
        return state_of(self._optimizer, self._places)

    def load(self, state: dict[int, dict[str, Any]], options: list[dict[str, Any]]) -> None:
        """Continue from the result of :meth:`state`."""
        set_options(self._optimizer, options)
        set_state(self._optimizer, state, self._places)


@contextmanager
def unobserved():
    """Turn off global optimizer hooks inside the block, where the server steps."""
    hooks = (global_pre_hooks, global_post_hooks)
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, kept in zip(hooks, before, strict=True):
            each.update(kept)
