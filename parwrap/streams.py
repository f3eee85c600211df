"""Two sets of random streams: one that all ranks share and one of this rank's own.

Models, splits and permutations are made on the shared streams, so that they are the same on every rank; augmentation and
dropout draw from the rank's, so that they are not. A set holds torch (CPU and GPU), numpy and python. Which set runs when
is decided by the caller.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["Streams", "get_state", "seed_all", "set_state"]


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
    """The states of all streams that are running, to hand to :func:`set_state`."""
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: dict[str, Any]) -> None:
    """Go on where ``state`` was taken; a GPU that started later keeps its stream."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


class Streams:
    """Switches this process between the shared streams, which run at first, and the rank's own.

    The rank's streams are seeded with ``seed + rank``, where ``seed`` is torch's at the time of the first switch; a script
    that seeds anew while the shared ones run gets new ones of its own too.

    >>> seed_all(0); streams = Streams(rank=1)
    >>> with streams.own(): noise = torch.rand(1)
    >>> seed_all(1); torch.equal(noise, torch.rand(1))
    True
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own = False
        self._waiting: dict[str, Any] | None = None
        self._seeded_from: int | None = None

    def use(self, own: bool) -> None:
        """Let the rank's own streams run, or the shared ones."""
        if own == self._own:
            return
        running = get_state()
        seed = torch.initial_seed()
        if own and seed != self._seeded_from:
            self._seeded_from = seed
            seed_all((seed + self._rank) % 2**63)
        elif self._waiting is not None:
            set_state(self._waiting)
        self._waiting, self._own = running, own

    def seed(self) -> int:
        """What the shared streams were last seeded with."""
        with self.shared():
            return torch.initial_seed()

    @contextmanager
    def own(self) -> Iterator[None]:
        """The rank's own streams for the length of the block."""
        yield from self._during(True)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The shared streams for the length of the block."""
        yield from self._during(False)

    def _during(self, own: bool) -> Iterator[None]:
        before = self._own
        self.use(own)
        try:
            yield
        finally:
            self.use(before)
