"""``@hogwild``: runs a plain training function on forked workers, which train one model in shared memory.

Checks the options, lets ``launching.py`` start the workers, and opens ``distributed`` in each of them; ``strategies/hogwild/`` trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from parwrap.api import distributed
from parwrap.decorator import ScopeDecorator
from parwrap.errors import UsageError
from parwrap.group.device import cores
from parwrap.inline.forking import import_for_optimizers, refuse_unforkable
from parwrap.inline.launching import run_on_ranks
from parwrap.options import Options

__all__ = ["hogwild"]

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

_running: list[hogwild] = []
"""The options of this worker's launch, and the calls inside it, the innermost last."""


class hogwild(ScopeDecorator):
    """Train one model with several processes at once, each on its own part of the data, without locks (Recht et al., 2011).

    Write ``@hogwild`` or ``@hogwild(workers=4)``, on a plain training function in a plain process. Each call forks the workers, on CPUs and
    with a thread each, and returns worker 0's result when all have finished. The caller's models, optimizers and schedulers then have the
    trained state, and are the same objects as before. Changes to other objects are lost, so return what you need. If a worker raises an
    exception, it is raised here, and the other workers are ended.

    Inside the function, everything works as in ``distributed(strategy="hogwild")``. A nested ``hogwild`` has no effect.

    Args:
        workers: the number of workers; by default the number of cores.
        lock: one worker at a time takes a step. This is slower, and meant for comparison.
        timeout: seconds that a worker waits for another one at an evaluation or at the end, while no worker takes a step; by default 30
            minutes.
        seed: the seed of torch, numpy and python in all workers; by default each call draws one from torch's generator.

    Raises:
        UsageError: an unknown option or value; or workers cannot be forked where it is called.
        RankMismatchError: a worker ended without a result.

    >>> from torch import nn
    >>> weights = nn.Embedding(4, 2, sparse=True)
    >>> @hogwild(workers=2)
    ... def train(model):
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ...     for rows in torch.utils.data.DataLoader(torch.arange(4), batch_size=1):
    ...         optimizer.zero_grad()
    ...         model(rows).sum().backward()
    ...         optimizer.step()
    >>> before = weights.weight.detach().clone()
    >>> train(weights)
    >>> torch.allclose(before - 1, weights.weight)
    True
    """

    layer = -10

    def __init__(
        self, *, workers: int | None = None, lock: bool = False, timeout: float | timedelta | None = None, seed: int | None = None
    ) -> None:
        super().__init__()
        workers = cores() if workers is None else workers
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UsageError(f"workers={workers!r} is not a positive integer.")
        self._workers = workers
        self._options = Options(strategy="hogwild", lock=lock, timeout=timeout, seed=seed)

    def scope(self, function: Callable[..., Any] | None) -> AbstractContextManager[Any]:
        if function is None:
            raise UsageError("`with parwrap.hogwild():` has no function that other processes could run: decorate the training function.")
        options = (_running or [self])[0]._options
        given = {name: getattr(options, name) for name in ("strategy", "lock", "timeout", "seed")}
        return distributed.distributed(**given).scope(function)

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def on_workers(*args: Any, **kwargs: Any) -> Any:
            if _running:
                self._check_within(_running[0])
                return self._run(call, args, kwargs)
            if distributed.loaders_read() is not None:
                raise UsageError(
                    "@parwrap.hogwild starts its own workers, which is not possible inside parwrap.distributed and parwrap.run: remove "
                    "it and use strategy='hogwild' there, or run the script with plain python."
                )
            refuse_unforkable("@parwrap.hogwild")
            if self._workers == 1:
                return call(*args, **kwargs)
            import_for_optimizers()
            here = self._seeded()
            return run_on_ranks(lambda: here._run(call, args, kwargs), self._workers, self._options.patience, environ=NO_GPU)

        return on_workers

    def _seeded(self) -> hogwild:
        """These options, with a seed for one call."""
        seed = int(torch.randint(2**31, ())) if self._options.seed is None else self._options.seed
        return hogwild(workers=self._workers, lock=self._options.lock, timeout=self._options.timeout, seed=seed)

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the scope in a worker."""
        _running.append(self)
        try:
            return call(*args, **kwargs)
        finally:
            _running.pop()

    def _check_within(self, around: hogwild) -> None:
        mine, theirs = ((each._workers, each._options.lock) for each in (self, around))
        if mine != theirs:
            raise UsageError(
                f"parwrap.hogwild(workers={mine[0]}, lock={mine[1]}) cannot be called inside hogwild(workers={theirs[0]}, "
                f"lock={theirs[1]}), whose workers are running: use the same options for both, or remove one of them."
            )
