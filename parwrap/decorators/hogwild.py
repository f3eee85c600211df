"""``@hogwild``: a call of a plain training function starts workers, which train one model in shared memory by ``strategies/hogwild.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from parwrap.decorators.distributed import distributed
from parwrap.decorators.scope import Call, ScopeDecorator
from parwrap.errors import UsageError
from parwrap.options import check_positive
from parwrap.ranks.device import cores
from parwrap.ranks.environment import environment
from parwrap.ranks.platform import FORKS

__all__ = ["hogwild"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


class hogwild(ScopeDecorator):
    """Train one model with several processes at once, each on its own part of the data, without locks (Recht et al., 2011).

    Write ``@hogwild`` or ``@hogwild(workers=4)`` on a plain training function. In a plain process, each call starts the workers on CPUs,
    and returns the result of worker 0 when all have ended. On Linux workers are forked, with one thread each; on macOS they are spawned.
    After the call, the caller's models, optimizers, schedulers and tensors have the trained state, in the same objects; see
    :func:`parwrap.launch`. An error of a worker is raised in the caller. With ``workers=1`` no process is started. ``@hogwild`` is short
    for ``distributed(strategy="hogwild", nprocs=workers)``: where ranks have been started already, the function runs on these.

    Args:
        workers: the number of workers; by default the number of cores.
        lock: whether only one worker at a time takes a step. This is slower, and meant for comparison.
        timeout: seconds (or a ``timedelta``) that a worker waits for another one; by default 30 minutes.
        seed: the seed of torch, numpy and python in all workers; by default they continue from the caller's state.

    Raises:
        UsageError: an unknown option or value; or workers cannot be started where it is called, such as on Windows.
        RankMismatchError: a worker ended without a result.

    >>> import torch
    >>> weights = torch.nn.Embedding(4, 2, sparse=True)
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
        workers = cores() if workers is None else workers
        check_positive(workers=workers)
        given = {"lock": lock, "timeout": timeout, "seed": seed}
        self._ranks = distributed(strategy="hogwild", backend="gloo", nprocs=workers, start_method="fork" if FORKS else None, **given)

    def elsewhere(self, call: Call) -> Callable[[Callable[[], Any]], Any] | None:
        start = self._ranks.elsewhere(call)
        return None if start is None else functools.partial(_on_cpus, start)

    def scope(self, call: Call) -> AbstractContextManager[Any]:
        if call.function is None:
            raise UsageError("`with parwrap.hogwild():` has no function that other processes could run: decorate the training function.")
        return self._ranks.scope(call)


def _on_cpus(start: Callable[[Callable[[], Any]], Any], run: Callable[[], Any]) -> Any:
    """Call ``start(run)`` with ``CUDA_VISIBLE_DEVICES`` empty, so that the ranks see no GPU."""
    with environment({VISIBLE: ""}):
        return start(run)
