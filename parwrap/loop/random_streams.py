"""The random streams of this rank: a shared set, from which all ranks draw the same, and this rank's own set (contract, rule 4).

Each set has a stream of torch (with that of the current GPU), one of numpy and one of Python's ``random``. ``use`` says which libraries
draw from this rank's own streams now. ``passes.py`` decides when.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from parwrap.intercept.interceptor import Interceptor
from parwrap.places import running_line, script_place
from parwrap.ranks.device import drawing_module
from parwrap.ranks.group import Group

__all__ = ["ALL", "NONE", "TRAINING", "RandomStreams", "get_states", "seed_all", "set_states", "states_kept"]

Libraries = frozenset[str]

NONE: Libraries = frozenset()
TRAINING: Libraries = frozenset({"torch", "numpy"})
"""Libraries that draw from own streams in a training pass, for a rank's noise. Python's ``random`` stays shared, for decisions."""
ALL: Libraries = frozenset({"torch", "numpy", "python"})
"""Libraries that draw from own streams while samples of a training pass are read: augmentation may draw from any library."""


ANOTHER_SCOPE = 1_000_003
"""The factor of the shared stream's checksum in the seed of own streams that begin in a later scope."""

_scopes = itertools.count()
"""Numbers the scopes of this process that were opened without a seed: unseeded generators draw something else in each."""

_begun_at: dict[int, int] = {}
"""For each seed, a checksum of torch's shared stream where own streams first began from that seed, in any scope of this process."""


def _own_seed(seed: int, rank: int) -> int:
    """The seed of this rank's own streams, which begin now: ``seed + rank`` the first time.

    If the shared stream has moved on since then, as in a later scope, its state is mixed in, so that a rank does not draw the same numbers
    again. A script that has seeded again is back at the first state, and gets the first seed.
    """
    state = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
    later = 0 if _begun_at.setdefault(seed, state) == state else state
    return (seed + rank + later * ANOTHER_SCOPE) % 2**63


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python, each with as many bits of ``seed`` as it takes."""
    torch.manual_seed(seed)
    _begun_at.pop(torch.initial_seed(), None)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def next_scope() -> int:
    """The number of the scope that opens now, among those of this process. Servers and ranks that joined later have other numbers."""
    return next(_scopes)


class _Torch:
    """Torch's stream on the CPU, and that of the current GPU or other accelerator once it has started."""

    def get(self) -> Any:
        return torch.default_generator.get_state(), _accelerators_state()

    def set(self, state: Any) -> None:
        torch.default_generator.set_state(state[0])
        if (module := drawing_module()) is not None:
            if state[1] is None:  # it has started since
                module.manual_seed(torch.default_generator.initial_seed())
            else:
                module.set_rng_state(state[1])

    def seeded(self, seed: int) -> Any:
        accelerators = before = _accelerators_state()
        if before is not None:
            module = drawing_module()
            module.manual_seed(seed)
            accelerators = module.get_rng_state()
            module.set_rng_state(before)
        return torch.Generator().manual_seed(seed).get_state(), accelerators


def _accelerators_state() -> torch.Tensor | None:
    return None if (module := drawing_module()) is None else module.get_rng_state()


class _Numpy:
    """numpy's global stream; its state takes 20 us to copy, so the bit generator itself is exchanged."""

    get, set = staticmethod(np.random.get_bit_generator), staticmethod(np.random.set_bit_generator)  # type: ignore[attr-defined]

    def seeded(self, seed: int) -> Any:
        generator: Any = np.random.MT19937(0)
        generator.state = np.random.RandomState(seed % 2**32).get_state(legacy=False)  # as numpy.random.seed does
        return generator


class _Python:
    get, set = staticmethod(random.getstate), staticmethod(random.setstate)

    def seeded(self, seed: int) -> Any:
        return random.Random(seed).getstate()


class RandomStreams(Interceptor):
    """The two sets of streams of one rank. Both are seeded when the script seeds.

    Args:
        rank: this rank; its own streams are seeded with the shared seed plus ``rank``.

    >>> streams = RandomStreams(rank=1)
    >>> seed_all(0)
    >>> with streams.used(TRAINING):
    ...     own = torch.rand(1), random.random()
    >>> torch.equal(own[0], torch.rand(1, generator=torch.Generator().manual_seed(1))), own[1] == random.Random(0).random()
    (True, True)
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._libraries: dict[str, Any] = {"torch": _Torch(), "numpy": _Numpy(), "python": _Python()}
        self._own: Libraries = NONE
        self._kept: dict[str, Any] = {}
        self._shared_seed: int | None = None
        self._entropy = 0
        self._fresh: Counter[str] = Counter()  # how many seeds were made for generators without one, at each line
        self._process = os.getpid()
        self._before_seed: Any = None  # torch's shared stream before the script seeded in a training pass

    def seed(self) -> int:
        """The seed of the shared streams, as ``torch.initial_seed()`` has it."""
        if "torch" in self._own and self._shared_seed is not None:
            return self._shared_seed
        return torch.initial_seed()

    def begin(self, scope: int) -> None:
        """Called when all ranks have the same streams: generators without a seed begin there.

        Args:
            scope: the same number on all ranks, and another one in each scope without a seed; :func:`next_scope`.
        """
        states = repr(get_states()[1:3]), torch.initial_seed(), scope
        self._entropy = zlib.crc32(repr(states).encode()) << 64 | torch.initial_seed()

    def fresh_seed(self, library: str, bits: int) -> int | None:
        """``bits`` random bits for a generator that would seed itself from the system; ``None`` in a process that this rank has forked.

        They are the same on all ranks where ``library`` draws the same, else this rank's own. They are computed and not drawn, so the
        streams are where they would be in one process. Ranks agree on them even if one makes more generators at another line.
        """
        if os.getpid() == self._process:
            source = f"{self._entropy} {self._rank if self.draws_own(library) else 'all'}"
        elif get_worker_info() is not None:
            source = f"{torch.initial_seed()}"  # of this worker of a loader
        else:
            return None
        line = f"{source} {running_line()} {script_place()}"
        self._fresh[line] += 1
        return random.Random(f"{line} {self._fresh[line]}").getrandbits(bits)

    def draws_own(self, library: str) -> bool:
        return library in self._own

    def write_python(self, numbers: list[float], digit: int, square: int) -> None:
        """Write a digit above 0 that says where Python's stream is, if ranks share it: one that has drawn more seldom has the same.

        Args:
            numbers: what this rank sends.
            digit: where the digit goes.
            square: where its square goes.
        """
        if not self.draws_own("python"):
            state = random.getstate()[1]
            numbers[digit] = value = (state[0] + state[-1]) % 61 + 1  # the position among 624 words, and one of these
            numbers[square] = value * value

    def share_python(self, group: Group) -> None:
        """Go on from rank 0's state of Python's shared stream: ranks have drawn different numbers of times, as for each token of a part."""
        states = [random.getstate()]
        with group.control_message("the state of Python's random"):
            dist.broadcast_object_list(states, 0, group=group.control)
        random.setstate(states[0])

    def infer_parameters(self, infer: Callable[[], None]) -> None:
        """Let all ranks draw the same parameters of a lazy module, also in a training pass."""
        with self.used(NONE):
            infer()

    @property
    def own(self) -> Libraries:
        """The libraries that draw from this rank's own streams now."""
        return self._own

    def use(self, own: Libraries) -> Libraries:
        """From now on, the libraries in ``own`` draw from this rank's own streams, and all others from the shared streams.

        Returns:
            The libraries that drew from this rank's own streams before.
        """
        before = self._own
        if own is not before:
            if own and not self._kept:
                self._begin_own()
            if "torch" in before and "torch" not in own:
                self._before_seed = None
            self._own = own
            for name in before ^ own:
                library, other = self._libraries[name], self._kept[name]
                self._kept[name] = library.get()
                library.set(other)
        return before

    @contextmanager
    def used(self, own: Libraries) -> Iterator[None]:
        """Inside the block, the libraries in ``own`` draw from this rank's own streams; after it, the same as before."""
        before = self.use(own)
        try:
            yield
        finally:
            self.use(before)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore both sets after the block. Only this rank runs the block, so its draws and seeds must not change the shared streams."""
        own, kept, seeds = self._own, dict(self._kept), (self._shared_seed, self._before_seed, self._fresh.copy())
        states, numpys = get_states(), kept["numpy"].state if kept else None
        try:
            yield
        finally:
            after = self.use(own)
            set_states(states)
            self._kept, (self._shared_seed, self._before_seed, self._fresh) = kept, seeds
            if kept:
                kept["numpy"].state = numpys
            self.use(after)

    def _begin_own(self) -> None:
        self._shared_seed = torch.initial_seed()
        own = _own_seed(self._shared_seed, self._rank)
        self._kept = {name: library.seeded(own) for name, library in self._libraries.items()}

    def restored(self) -> None:
        """Called when the script has set torch's state, as ``fork_rng`` does when it ends.

        If the script seeded torch in this pass, the shared stream also returns to its state before that seed.
        """
        if self._before_seed is not None and "torch" in self._own:
            self._kept["torch"], self._before_seed = self._before_seed, None

    def seeded(self, library: str) -> None:
        """Called when the script has just seeded ``library``. Seeds its streams in both sets, the own one differently on each rank."""
        if library == "torch":
            _begun_at.pop(torch.initial_seed(), None)
        if not self._kept:
            return
        stream = self._libraries[library]
        shared = stream.get()
        if library == "torch":
            if "torch" in self._own and self._before_seed is None:
                self._before_seed = self._kept["torch"]
            seed = self._shared_seed = torch.initial_seed()
            own = stream.seeded((seed + self._rank) % 2**63)
        elif library == "numpy":
            drawn = np.random.RandomState(np.random.MT19937(0))
            drawn.set_state(np.random.get_state())
            own = stream.seeded(int(drawn.randint(2**31)) + self._rank)
            if library in self._own:  # the bit generator itself is the stream: the shared set gets the one that was seeded
                other = self._kept[library]
                other.state = shared.state
                shared = other
        else:
            copy = random.Random(0)
            copy.setstate(shared)
            own = stream.seeded(copy.getrandbits(32) + self._rank)
        if library in self._own:
            self._kept[library] = shared
            stream.set(own)
        else:
            self._kept[library] = own

    def close(self) -> None:
        """Let all libraries draw from the shared streams again, and drop this rank's own streams."""
        self.use(NONE)
        self._kept = {}


def get_states() -> tuple[Any, ...]:
    """The states of the streams that torch, numpy and Python draw from now."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), _accelerators_state()


def set_states(states: tuple[Any, ...]) -> None:
    """Put back what :func:`get_states` returned."""
    cpu, numpys, pythons, accelerators = states
    torch.set_rng_state(cpu)
    np.random.set_state(numpys)
    random.setstate(pythons)
    if accelerators is not None and (module := drawing_module()) is not None:
        module.set_rng_state(accelerators)


@contextmanager
def states_kept() -> Iterator[None]:
    """Restore the states of the streams after the block."""
    states = get_states()
    try:
        yield
    finally:
        set_states(states)
