"""``parwrap.launch``: a function on ranks that the call itself launches. How that goes is ``self_launch.py``'s."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from parwrap.api import distributed
from parwrap.api.self_launch import Launch, on_ranks
from parwrap.decorator import decorators_of, describe
from parwrap.errors import UsageError

__all__ = ["launch"]


def launch(
    function: Callable[..., Any],
    /,
    *args: Any,
    nprocs: int | str | None = None,
    returns: str = "rank0",
    start_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)`` on ranks that are launched for it, inside :class:`parwrap.distributed`.

    For plain Python, a REPL or a notebook; the function, a closure too, may be defined there. What ranks write is shown as it comes, and
    Ctrl-C ends them. Tensors, models, optimizers and schedulers of the caller are then what they have become on rank 0, the same objects as
    before, and the random streams go on from rank 0's. What the function changes in other objects that it reaches, as in lists and
    attributes, is changed in them here too; what does not pickle is named in one warning. Nothing stays open in this process. What a rank
    raises is raised here, as itself, and the others are ended.

    Where ranks have been launched already, by ``python -m parwrap.run`` for one, the function runs on these.

    Args:
        function: what to call. Options of ``distributed`` are those that it is decorated with.
        args, kwargs: for the function. Those that have the names of arguments of this function it can be given by ``functools.partial``.
        nprocs: the number of ranks, ``"gpu"``, ``"cpu"`` (a rank for each core) or ``"auto"`` (for each GPU, or each core); by default
            the number of GPUs, or 1. One rank is this process.
        returns: ``"rank0"``: the value that rank 0 returns; ``"all"``: the list of the values of all ranks, which then have to pickle.
        start_method: ``"fork"``: ranks have all that this process has, and compute with a thread each; ``"spawn"``: they are
            interpreters of their own, which are sent what the function uses by cloudpickle, and share the cores. By default ranks are
            forked where CUDA has not started, on Linux.

    Raises:
        UsageError: a value that does not exist, or an option that ``function`` does not take; what ranks cannot be sent, or cannot send
            back; cloudpickle is needed and not there.
        LaunchError: there are not as many GPUs.
        RankMismatchError: a rank has ended without a word.

    >>> import parwrap
    >>> def train(epochs):
    ...     return parwrap.reduce_sum(epochs), parwrap.world_size()
    >>> launch(train, 3, nprocs=2)
    (6, 2)
    """
    __tracebackhide__ = True
    if not callable(function):
        raise UsageError(
            f"parwrap.launch takes a function to call on the ranks, not {function!r}: write parwrap.launch(train, 3, nprocs=2), where a "
            "plain call is train(3)."
        )
    decorators = getattr(function, "__parwrap_decorators__", None) or decorators_of(function)  # of a mixin's method
    decorated = [each for each in decorators if isinstance(each, distributed.distributed)]
    options = (decorated or [distributed.distributed()])[0]._options
    _refuse_options(function.__wrapped__ if decorators_of(function) else function, kwargs)  # type: ignore[attr-defined]
    call = partial(function if decorated else distributed.distributed()(function), *args, **kwargs)
    if nprocs is None and torch.cuda.device_count():
        nprocs = "gpu"
    return on_ranks(Launch(nprocs, returns, start_method), options, call, joins=distributed.loaders_read() is not None)


def _refuse_options(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for what looks like an option of parwrap's and is no argument of ``function``."""
    try:
        arguments = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # tells nothing
        return
    if any(each.kind is each.VAR_KEYWORD for each in arguments.values()):
        return
    for name, value in given.items():
        meant = [] if name in arguments else difflib.get_close_matches(name, distributed.distributed.option_names(), n=1, cutoff=0.8)
        if not meant:
            continue
        if meant[0] in inspect.signature(launch).parameters:
            advice = f"Did you mean {meant[0]}={value!r}?"
        else:
            called = f"parwrap.distributed({meant[0]}={value!r})({getattr(function, '__name__', 'function')})"
            advice = f"{meant[0]!r} is an option of parwrap.distributed: decorate the function, or call parwrap.launch({called})."
        raise UsageError(f"{describe(function)} takes no argument {name!r}, which parwrap.launch would pass on. {advice}")
