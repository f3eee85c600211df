"""The state that determines a loader's order, the random streams and the samplers' generators, as plain numbers and texts.

Everything is plain: no tensors, so that a checkpoint can be loaded onto any device and with ``weights_only=True``.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from parwrap.errors import UsageError

__all__ = ["get_sources", "set_sources"]


def get_sources(loader: DataLoader) -> list[Any]:
    """The states of the running streams and of the generators that ``loader`` and its samplers hold.

    >>> loader = DataLoader(range(9), shuffle=True, generator=torch.Generator().manual_seed(1))
    >>> before = get_sources(loader)
    >>> order = list(loader.sampler)
    >>> set_sources(loader, before); order == list(loader.sampler)
    True
    """
    return [_state(each) for each in _sources(loader)]


def set_sources(loader: DataLoader, states: list[Any]) -> None:
    """Continue from ``states``.

    Raises:
        UsageError: ``loader`` draws from other sources than the loader of the states.
    """
    sources = list(_sources(loader))
    if [state["of"] for state in states] != [_kind(each) for each in sources]:
        raise UsageError(
            f"the state belongs to a loader that draws from {_listed(state['of'] for state in states)}, but this one draws from "
            f"{_listed(map(_kind, sources))}. Load it into a loader with the same sampler and generator."
        )
    for source, state in zip(sources, states, strict=True):
        _set_state(source, _decoded(state["state"]))


def _sources(loader: DataLoader) -> Iterator[Any]:
    yield from (torch.default_generator, np.random, random)  # numpy creates its own when first used
    seen: set[int] = set()
    waiting: list[Any] = [loader.generator, loader.sampler, loader.batch_sampler]
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen or isinstance(each, random.SystemRandom):
            continue
        seen.add(id(each))
        if isinstance(each, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            yield each
        elif isinstance(each, Sampler):
            waiting += vars(each).values()


def _state(source: Any) -> dict[str, Any]:
    if isinstance(source, torch.Generator):
        state: Any = source.get_state().numpy()
    elif isinstance(source, np.random.Generator):
        state = source.bit_generator.state
    elif hasattr(source, "getstate"):
        version, words, gauss = source.getstate()
        state = {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}
    else:
        state = source.get_state(legacy=False)
    return {"of": _kind(source), "state": _encoded(state)}


def _set_state(source: Any, state: Any) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(torch.from_numpy(state))
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif hasattr(source, "setstate"):
        source.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    else:
        source.set_state(state)


def _kind(source: Any) -> str:
    if source is torch.default_generator:
        return "torch"
    return source.__name__ if hasattr(source, "__name__") else f"a {type(source).__module__}.{type(source).__name__}"


def _listed(kinds: Iterable[str]) -> str:
    return ", ".join(kinds)


def _encoded(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "base64": base64.b64encode(state.tobytes()).decode()}
    if isinstance(state, dict):
        return {name: _encoded(value) for name, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def _decoded(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if "base64" in state:
        return np.frombuffer(base64.b64decode(state["base64"]), state["dtype"]).copy()
    return {name: _decoded(value) for name, value in state.items()}
