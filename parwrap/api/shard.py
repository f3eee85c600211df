"""``parwrap.shard(x)`` and ``parwrap.replicate(loader)``: tell parwrap how to split data that its rules for loaders do not cover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parwrap.api.distributed import shared_out
from parwrap.data.iterables import Pick
from parwrap.data.sharing_options import OwnPart, replicated
from parwrap.errors import UsageError
from parwrap.group.group import rank, world_size
from parwrap.options import CHOICES

__all__ = ["replicate", "shard"]

L = TypeVar("L", bound=DataLoader[Any])


def shard(x: Any, uneven: str = "pad") -> Any:
    """Return this rank's part of ``x``, for data outside of a ``DataLoader``: every ``world_size()``-th item, from item ``rank()`` on.

    Args:
        x: the data, the same on all ranks: a tensor or an array, split along the first dimension; a list, tuple or other sequence; a
            dataset; a pandas table, split by rows; or any other iterable, which is read to its end on every rank.
        uneven: if items do not divide evenly, ``"pad"``: some are repeated; ``"drop"``: some are skipped; ``"join"``: some ranks have one
            item more than others.

    Returns:
        A tensor, array, tuple, table or ``Subset`` if ``x`` is a tensor, array, tuple, table or dataset; a list for other sequences;
            otherwise an iterator. On one rank ``x`` itself.

    Raises:
        UsageError: ``x`` has no items with an order, so it cannot be split.

    >>> shard([1, 2, 3])
    [1, 2, 3]
    """
    if uneven not in tuple(CHOICES["uneven"]):
        raise UsageError(f"uneven={uneven!r} is not a valid value. Choose one of: {', '.join(map(repr, CHOICES['uneven']))}.")
    if isinstance(x, DataLoader):
        raise UsageError(
            "parwrap.shard does not take a DataLoader, because parwrap splits training loaders automatically: iterate over the loader "
            "itself, or pass its dataset."
        )
    if isinstance(x, (str, bytes, Mapping, Set)) or not (isinstance(x, (Iterable, Dataset)) or hasattr(x, "__getitem__")):
        raise UsageError(
            f"parwrap.shard cannot split a {type(x).__name__}: pass a sequence, a tensor, an array, a dataset or an iterator, for "
            "example sorted(x) or list(x.items())."
        )
    if isinstance(x, (torch.Tensor, np.ndarray)) and x.ndim == 0:
        raise UsageError("parwrap.shard cannot split a tensor or an array with 0 dimensions.")
    if world_size() == 1:
        return x
    pick = Pick(rank(), world_size(), uneven)
    if isinstance(x, IterableDataset) or not (hasattr(x, "__len__") and hasattr(x, "__getitem__")):
        shared_out(None)
        return pick(x)
    shared_out(len(x))
    indices = list(pick(range(len(x))))
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return x[indices]
    if hasattr(x, "iloc"):  # a table's items are columns, or it is indexed by labels
        return x.iloc[indices]
    if isinstance(x, Dataset):
        return OwnPart(x, indices)
    return tuple(x[index] for index in indices) if isinstance(x, tuple) else [x[index] for index in indices]


def replicate(loader: L) -> L:
    """Make every rank read all of ``loader`` in training too, in the same order. Returns the same loader.

    Use it for data that shards itself in a way that parwrap does not detect, and for data that every rank needs completely.

    Args:
        loader: a ``DataLoader``.

    Raises:
        UsageError: ``loader`` is another object.

    >>> [batch.tolist() for batch in replicate(DataLoader(range(4), batch_size=2))]
    [[0, 1], [2, 3]]
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"parwrap.replicate takes a DataLoader, not a {type(loader).__name__}: data outside of loaders is the same on all ranks anyway."
        )
    replicated.add(loader)
    return loader
