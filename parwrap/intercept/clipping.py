"""``clip_grad_norm_``, ``clip_grad_value_`` and ``clip_grads_with_norm_``: forward them to ``Interceptor.clip``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import utils

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["Clip", "patches"]

PLACES = (
    (utils, "clip_grad_norm_"),
    (utils.clip_grad, "clip_grad_norm_"),
    (utils, "clip_grad_value_"),
    (utils.clip_grad, "clip_grad_value_"),
    (utils, "clip_grads_with_norm_"),
)


class Clip(NamedTuple):
    """A call that clips gradients.

    Attributes:
        name: the name of the function.
        parameters: the parameters whose gradients are clipped.
        args: the arguments after ``parameters``.
        kwargs: the keyword arguments.
        original: torch's own function, or the next interceptor's.
    """

    name: str
    parameters: list[torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]
    original: Callable

    def run(self) -> Any:
        """Run torch's function, or the next interceptor's."""
        return self.original(self.parameters, *self.args, **self.kwargs)

    def replayed(self, parameters: list[torch.Tensor]) -> None:
        """Clip other gradients than those of the call; a given norm is computed again."""
        if self.name == "clip_grads_with_norm_":
            by_name = {key: value for key, value in self.kwargs.items() if key != "total_norm"}
            utils.clip_grad_norm_(parameters, *self.args[:1], **by_name)
        else:
            self.original(parameters, *self.args, **self.kwargs)

    def norm(self) -> torch.Tensor | None:
        """The result of the call without clipping."""
        if self.name != "clip_grad_norm_":
            return None
        return self._norm(*self.args, **self.kwargs)

    def _norm(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)


def patches(interceptor: Interceptor) -> list[Patch]:
    def patch(owner: Any, name: str) -> Patch:
        def clip(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            return interceptor.clip(_bound(name, wrapped, *args, **kwargs))

        return Patch(owner, name, clip)

    return [patch(owner, name) for owner, name in PLACES]


def _bound(name: str, original: Callable, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Clip:
    # a generator must survive several iterations
    return Clip(name, [parameters] if isinstance(parameters, torch.Tensor) else list(parameters), args, kwargs, original)
