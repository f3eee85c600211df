"""The position of the training passes over one loader. A checkpoint saves it, and a later run continues from it.

It counts what all ranks together have trained on, so that any number of ranks can continue. ``training_share.py`` deals out the rest of a
pass; ``known_positions.py`` has the positions of all loaders.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from parwrap.data.sampler_state import get_sources, set_sources
from parwrap.data.unread import Unread
from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.group import Group
from parwrap.loop.random_streams import RandomStreams

__all__ = ["EPOCH", "LENGTH", "MARK", "RANKS", "Plan", "Position", "digest"]

MARK = "parwrap"
"""The entry that identifies a state; its value is the version of the other entries."""

LOADED = "the position that a training loader continues from"

LENGTH, RANKS, EPOCH = "dataset's length", "number of ranks", "sampler's epoch"

HINTS = {
    RANKS: " Only a loader whose sampler parwrap replaces can continue with another number of ranks.",
    EPOCH: " Call the set_epoch of its DistributedSampler before the pass, as in the run that saved the state.",
}
"""Advice for facts that differ from the saved ones."""

MEANINGS = {
    "samples": "one that takes each sample once, in order or shuffled",
    "batches": "one with its own sampler",
    "draws": "one whose ranks form their batches together",
    "own": "one with a DistributedSampler for as many replicas as there are ranks",
    "stream": "one over an IterableDataset",
}
"""The kinds of loaders, by the unit of their positions: samples, whole batches, and each rank's own batches."""


class Plan(NamedTuple):
    """How a pass reads a loader.

    Attributes:
        kind: one of ``MEANINGS``.
        per_step: the units that all ranks together take per step.
        takes: the kinds of positions that it can continue from.
        facts: what must be the same in the continuing run, by its name in errors.
    """

    kind: str
    per_step: int
    takes: tuple[str, ...]
    facts: dict[str, Any]


class Position:
    """The position of the training passes over one loader; :func:`parwrap.loaders` lists them.

    Args:
        loader: the loader, kept alive only while a pass is open.
        streams: the random streams that its sampler may draw from.
        plan: a function that returns how a loader is read, optionally for a position of the given ``kind``.

    Attributes:
        number: the loader's number in the order of first training passes; ``None`` before its first pass.
        epoch: the number of the last pass begun, counted from 0; -1 before the first pass.
        seed: the seed for splitting the loader, and the number of loaders that had a seed at that time.
        given: the seed from a loaded state, until it is used.
        draws: the counter of the sampler's draws in the last pass begun.
        unread: the part of the data that this pass does not read; ``None`` if it cannot be read or is not needed.
        looked_at: the number of open passes that do not train.
    """

    def __init__(self, loader: DataLoader, streams: RandomStreams, plan: Callable[..., Plan]) -> None:
        self._loader, self._streams, self._plan_of = weakref.ref(loader), streams, plan
        self.number: int | None = None
        self.epoch = -1
        self.seed: tuple[int, int] | None = None
        self.given: tuple[int, int] | None = None
        self.draws: Any = None
        self.unread: Unread | None = None
        self.looked_at = 0
        self._plan: Plan | None = None
        self._held: DataLoader | None = None
        self._open = self._done = 0
        self._several = False
        self._began: list[Any] = []
        self._loaded: dict[str, Any] | None = None

    def __repr__(self) -> str:
        loaded = self._loaded
        epoch, done, per_step = (
            (loaded["epoch"], loaded["done"], loaded["per_step"]) if loaded else (self._next, self._done, self._per_step)
        )
        which = "not trained on yet" if self.number is None else str(self.number)
        return f"<parwrap loader {which}: epoch {epoch}, {math.ceil(done / per_step)} batches done>"

    @property
    def _next(self) -> int:
        """The epoch of the next batch, from 0."""
        return self.epoch if self._open else self.epoch + 1

    @property
    def kind(self) -> str | None:
        """The unit of the position in the last pass begun."""
        return self._plan.kind if self._plan else None

    @property
    def _per_step(self) -> int:
        return self._plan.per_step if self._plan else 1

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, which is after the last batch that the loop has drawn, however far its workers have read ahead.

        It contains numbers and texts, a few kilobytes, and is the same on all ranks. No rank waits for another one.

        Raises:
            UsageError: two training passes over the loader are open, or one was left early; or an open pass does not train.
        """
        if self._loaded is not None:
            return self._loaded
        if self.looked_at and self.number is None:
            raise UsageError(
                "a DataLoader is being read without training: in eval() mode, without gradients or before an optimizer exists. Such a "
                "pass keeps no position."
            )
        if self._several:
            raise UsageError(
                "two training passes over one DataLoader are open, so it has no single position. Use a separate DataLoader for each."
            )
        loader, inside = self._alive(), self._open > 0
        plan = self._plan or self._plan_of(loader)
        drawn = self.draws.drawn if inside and self.draws else 0
        with self._streams.shared():
            now = get_sources(loader)
        return {
            MARK: 1,
            "kind": plan.kind,
            "epoch": self._next,
            "done": self._done,
            "per_step": plan.per_step,
            "seed": self.seed,
            "facts": plan.facts,
            "drawn": drawn,
            "last": digest(self.draws.last) if drawn else None,
            "began": self._began if inside else now,
            "now": now,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass continue from ``state``. Call it on every rank.

        Args:
            state: the result of ``state_dict()``, from any number of ranks.

        Raises:
            UsageError: ``state`` is not such a state, or belongs to a different kind of loader or to a dataset of a different length.
        """
        loader = self._alive()
        if not isinstance(state, dict) or state.get(MARK) != 1:
            raise UsageError(
                f"load_state_dict takes what the state_dict() of a loader in parwrap.loaders() returned, not {_described(state)}."
            )
        self._check_kind(state, self._plan_of(loader))
        self._loaded = state

    def begin(self, loader: DataLoader, group: Group | None) -> dict[str, Any] | None:
        """Begin a pass. Returns the state to continue from, or ``None`` if the pass starts at its first batch."""
        state, self._loaded = self._loaded, None
        if state is not None:
            self._agree(state, group)
            self._check_kind(state, self._plan_of(loader))
            _compare(state["facts"], self._plan_of(loader).facts)
            self.epoch = state["epoch"] - 1
            self.seed = self.given = tuple(state["seed"]) if state["seed"] else None
            with self._streams.shared():
                set_sources(loader, state["began"])
        inside = state is not None and state["done"] > 0
        self._plan = self._plan_of(loader, state["kind"]) if state and inside else self._plan_of(loader)
        self._done = state["done"] if state else 0
        self._open, self.epoch, self.draws, self._held = self._open + 1, self.epoch + 1, None, loader
        self.unread = None
        self._several = self._open > 1
        with self._streams.shared():
            self._began = get_sources(loader)
        return state if inside else None

    def set_back(self, loader: DataLoader) -> None:
        """Reset the streams to where the pass began."""
        with self._streams.shared():
            set_sources(loader, self._began)

    def went_on(self, loader: DataLoader, state: dict[str, Any]) -> None:
        """Set the pass to the position in ``state``, and the streams too, even if they were used since."""
        with self._streams.shared():
            set_sources(loader, state["now"])

    def drew(self) -> None:
        """Advance the position by one batch."""
        self._done += self._per_step

    def take_back(self, epoch: int) -> None:
        """Undo the beginning of a pass that turned out not to train, including its ``epoch``."""
        self.end()
        if self.epoch == epoch:
            self.epoch -= 1

    def end(self) -> None:
        """Close a pass. The position is reset when no pass is open."""
        self._open -= 1
        if not self._open:
            self._done, self._several, self._held = 0, False, None

    def _alive(self) -> DataLoader:
        loader = self._loader()
        if loader is None:
            raise UsageError("the DataLoader of this position no longer exists. List the loaders again: parwrap.loaders().")
        return loader

    def _check_kind(self, state: dict[str, Any], plan: Plan) -> None:
        if state["kind"] not in plan.takes:
            raise UsageError(
                f"the state belongs to another kind of DataLoader, {MEANINGS[state['kind']]}; this is {MEANINGS[plan.kind]}. "
                "parwrap.loaders() lists loaders in the order of their first training passes: load the states in the same order."
            )
        _compare(state["facts"], plan.facts, only=LENGTH)

    def _agree(self, state: dict[str, Any], group: Group | None) -> None:
        """Check that all ranks have loaded the same state. Otherwise a rank would train on samples of other ranks."""
        if group is None:
            return
        places = group.exchange(LOADED, {"epoch": state["epoch"], "done": state["done"], "seed": state["seed"]})
        if len({repr(place) for place in places.values()}) > 1:
            listed = ", ".join(f"epoch {place['epoch']} after {place['done']} on rank {rank}" for rank, place in places.items())
            raise RankMismatchError(
                f"the states loaded for a DataLoader differ between ranks: {listed}. Load the same state on every rank."
            )


def digest(drawn: Any) -> str:
    """A short digest, equal for equal indices.

    >>> digest([1, 2]) == digest([1, 2]), digest([1, 2]) == digest([2, 1])
    (True, False)
    """
    return hashlib.blake2b(repr(drawn).encode(), digest_size=8).hexdigest()


def _compare(before: dict[str, Any], now: dict[str, Any], only: str | None = None) -> None:
    """Raise if a fact, or the ``only`` one to check, has changed."""
    for name in before.keys() & now.keys() if only is None else {only} & before.keys():
        if before[name] != now[name]:
            raise UsageError(
                f"the state belongs to a DataLoader whose {name} was {before[name]}, but that of this one is "
                f"{now[name]}.{HINTS.get(name, '')}"
            )


def _described(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    return f"a dict with {', '.join(map(repr, list(state)[:3]))}" if state else "an empty dict"
