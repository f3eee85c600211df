"""Two sets of random streams: one that all ranks share, and this rank's own.

Models, splits and permutations use the shared streams, so that they are the same on every rank. Augmentation and dropout use the rank's
own, so that they differ. A set holds torch (CPU and GPU), numpy and python. The caller decides which set runs when.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from parwrap.intercept.interceptor import Interceptor, intercepts

__all__ = ["RandomStreams", "get_state", "seed_all", "set_state"]


def seed_all(seed: int) -> None:
    """Seed torch (CPU and GPU), numpy and python with the same number.

    >>> seed_all(7); first = torch.rand(1), np.random.rand(), random.random()
    >>> seed_all(7); first == (torch.rand(1), np.random.rand(), random.random())
    True
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def get_state() -> dict[str, Any]:
    """The states of all active streams, for :func:`set_state`."""
    return {"numpy": np.random.get_state(), "python": random.getstate(), **_torch_state()}


def set_state(state: dict[str, Any]) -> None:
    """Continue from ``state``. A GPU that was initialized later keeps its stream."""
    _set_torch_state(state)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


class RandomStreams(Interceptor):
    """Switches this process between the shared streams, which are active at first, and the rank's own.

    The rank's streams are seeded with ``seed + rank``, where ``seed`` is torch's at the first switch. When a script seeds again while the
    shared streams run, the rank's own are seeded again too.

    >>> seed_all(0); streams = RandomStreams(rank=1)
    >>> with streams.own(): noise = torch.rand(1)
    >>> seed_all(1); torch.equal(noise, torch.rand(1))
    True
    """

    def __init__(self, rank: int) -> None:
        self._seedings = 0
        self._just_seeded: int | None = None
        self._rank = rank
        self._own = False
        self._kept_shared = 0
        self._own_torch_runs = False
        self._waiting: dict[str, Any] | None = None
        self._seeded_from: int | None = None
        self._renewed: tuple[int, int] | None = None
        self._generators: dict[str, Any] = {}

    def use(self, own: bool) -> None:
        """Let the rank's own streams run, or the shared ones."""
        if own == self._own:
            return
        if own:
            self._count_seeding()
        seed, waiting = self._script_seed(), self._waiting
        self._waiting, self._own = get_state(), own
        if own and seed != self._seeded_from:
            self._seeded_from = seed
            seed_all((seed + self._rank) % 2**63)
        elif waiting is not None:
            set_state(waiting)

    @property
    def seedings(self) -> int:
        """How often the script has seeded the shared streams with ``torch.manual_seed``."""
        if not self._own:
            self._count_seeding()
        return self._seedings

    @intercepts
    def seeded(self) -> None:
        """Remember that the script has seeded torch, so that this rank's own streams start again, even with the same seed as before."""
        if not (self._own or self._own_torch_runs):
            self._just_seeded = torch.initial_seed()

    @intercepts
    def restored(self) -> None:
        """Forget the last seed, because the script has restored an earlier state of torch's stream."""
        if not (self._own or self._own_torch_runs):
            self._just_seeded = None

    def seed(self) -> int:
        """The seed that the script last gave the shared streams."""
        with self.shared():
            return self._script_seed()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Use the rank's own streams inside the block."""
        yield from self._during(True)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Use the shared streams inside the block."""
        self._kept_shared += 1
        try:
            yield from self._during(False)
        finally:
            self._kept_shared -= 1

    @property
    def may_draw_own(self) -> bool:
        """Whether a single draw may use the rank's own streams: the shared ones are active, but not in a block of :meth:`shared`."""
        return not (self._own or self._kept_shared)

    def with_own_torch(self, function: Callable, args: tuple, kwargs: dict) -> tuple[Any, Callable[[], bool]]:
        """Call ``function`` while torch draws from the rank's own streams, which is cheaper than switching all of them.

        Returns:
            Its result, and a function that says whether it has drawn.
        """
        own, shared = self._seeded(), _torch_state()
        before, outer, self._own_torch_runs = dict(own), self._own_torch_runs, True
        _set_torch_state(own)
        if "cuda" in shared and "cuda" not in own:  # the GPU started after the rank's streams
            torch.cuda.manual_seed(((self._seeded_from or 0) + self._rank) % 2**63)
        try:
            result = function(*args, **kwargs)
        finally:
            after = _torch_state()
            own.update(after)
            _set_torch_state(shared)
            self._own_torch_runs = outer
        return result, lambda: any(not torch.equal(before[name], after[name]) for name in after if name in before)

    def own_generator(self, library: str) -> Any:
        """This rank's own generator for ``"torch"``, ``"numpy.random"`` or ``"random"``, with the same methods as their generators."""
        self._seeded()
        return self._generators[library]

    def renew(self, number: int) -> None:
        """Reseed the shared streams from the script's seed and ``number``, so that ranks with different draws agree again."""
        self._count_seeding()
        script_seed = self._script_seed()
        seed = _mixed(script_seed, number)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._renewed = seed, script_seed

    def _count_seeding(self) -> None:
        """Count that the script has seeded the shared streams, which run now, if that is still in effect."""
        if self._just_seeded is None:
            return
        if self._just_seeded == torch.initial_seed():
            self._seedings += 1
            self._seeded_from = None
        self._just_seeded = None

    def _script_seed(self) -> int:
        """The seed of the active streams, without the effect of :meth:`renew`."""
        seed = torch.initial_seed()
        return self._renewed[1] if self._renewed and seed == self._renewed[0] else seed

    def _seeded(self) -> dict[str, Any]:
        """The stored state of the rank's own streams, reseeded if the script has seeded since."""
        if self._own_torch_runs:  # other threads get torch's seed of these streams too
            return self._waiting  # type: ignore[return-value]
        self._count_seeding()
        seed = self._script_seed()
        if self._waiting is None or seed != self._seeded_from:
            self.use(own=True)
            self.use(own=False)
            self._generators.clear()
        if not self._generators:
            own_seed = _mixed(seed, self._rank)
            self._generators = {
                "torch": torch.Generator().manual_seed(own_seed),
                "numpy.random": np.random.RandomState(own_seed % 2**32),
                "random": random.Random(own_seed),
            }
        return self._waiting  # type: ignore[return-value]

    def _during(self, own: bool) -> Iterator[None]:
        before = self._own
        self.use(own)
        try:
            yield
        finally:
            self.use(before)


def _torch_state() -> dict[str, torch.Tensor]:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_torch_state(state: dict[str, Any]) -> None:
    torch.default_generator.set_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _mixed(seed: int, number: int) -> int:
    """A seed derived from ``seed`` and ``number`` that has nothing in common with those of other numbers."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "big") >> 1
