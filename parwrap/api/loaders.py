"""``loaders``: the positions of the training loaders of the running function, to save in a checkpoint and continue from."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from parwrap.api import distributed
from parwrap.data.loader_position import Position
from parwrap.errors import UsageError

__all__ = ["loaders"]


def loaders(*which: DataLoader[Any]) -> list[Position]:
    """Return the positions of the training loaders, inside a function that ``parwrap.distributed`` runs.

    Save ``state_dict()`` of each in a checkpoint. After ``load_state_dict(state)``, training continues with the next batch, on any number
    of ranks. ``len(loader)`` stays that of a whole pass.

    Args:
        which: the loaders to return, in this order, even before they are trained on; by default all trained ones, in the order of their
            first passes.

    Raises:
        UsageError: the call is outside of a distributed function, an argument is not a ``DataLoader``, or no loader is given and none was
            trained on yet.

    >>> import parwrap, torch
    >>> from torch.utils.data import DataLoader
    >>> def train(state=None):
    ...     model = torch.nn.Linear(1, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     loader = DataLoader(range(6), batch_size=2)
    ...     if state:
    ...         parwrap.loaders(loader)[0].load_state_dict(state)
    ...     for batch in loader:
    ...         model(batch[:, None].float()).sum().backward()
    ...         return batch.tolist(), parwrap.loaders()[0].state_dict()
    >>> batch, state = parwrap.distributed(train)()
    >>> batch, parwrap.distributed(train)(state)[0]
    ([0, 1], [2, 3])
    """
    read = distributed.loaders_read()
    if read is None:
        raise UsageError(
            "parwrap.loaders() lists the training loaders of a function or script that parwrap.distributed runs, but none is running "
            "here. Call it inside that function or script, before it returns."
        )
    for each in which:
        if not isinstance(each, DataLoader):
            raise UsageError(f"parwrap.loaders takes DataLoaders, not a {type(each).__name__}.")
    listed = [read.positions.of(each) for each in which] or read.positions.trained()
    if not listed:
        raise UsageError(
            "no DataLoader was trained on yet, so parwrap.loaders() has none to list. To load a state before the first pass, pass the "
            "loader: parwrap.loaders(train_loader)[0].load_state_dict(state)."
        )
    return listed
