"""``parwrap.launch``: starts ranks and calls a function on them, as ``@distributed(nprocs=...)`` does."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from parwrap.decorators.distributed import distributed
from parwrap.decorators.scope import describe, scoped, undecorated
from parwrap.errors import UsageError
from parwrap.ranks.device import gpu_count

__all__ = ["launch"]

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    /,
    *args: Any,
    nprocs: int | Literal["gpu", "cpu", "auto"] | None = None,
    start_method: Literal["fork", "spawn"] | None = None,
    **kwargs: Any,
) -> Result:
    """Call ``function(*args, **kwargs)`` on ranks that are started for it, inside :class:`parwrap.distributed`.

    Use it in plain Python, at the prompt or in a notebook; the function, even a closure, may be defined there. The ranks' output is shown
    as it comes, and Ctrl-C ends them.

    Afterwards the caller's models, optimizers, schedulers, tensors, gradient scalers and random generators have the state of rank 0, in the
    same objects as before: those among the arguments, the ``self``, the closure and the globals that the function names, and those that
    objects and containers among these hold. Other objects that the function changed stay as they were in this process, and a warning names
    them. Random numbers continue from rank 0's. If a rank raises an exception, it is raised here, with its own type if that can be sent,
    and the other ranks are ended.

    If ranks have been started already, for example by ``parwrap run``, the function runs on these.

    Args:
        function: the function to call. Its decorator sets the options of ``distributed`` other than ``nprocs`` and ``start_method``.
        args, kwargs: arguments of the function. If one has the name of an argument of ``launch``, use ``functools.partial``.
        nprocs: the number of ranks, ``"gpu"`` (a rank for each GPU), ``"cpu"`` (for each core) or ``"auto"`` (for each GPU; without GPUs,
            for each core). By default the number of GPUs; without GPUs, 1. With 1, the function runs in this process.
        start_method: ``"fork"``: ranks inherit everything in this process, and compute with one thread each; ``"spawn"``: they are new
            interpreters, which receive what the function uses with cloudpickle, and divide the cores. By default, ranks are forked on
            Linux, unless CUDA has started.

    Returns:
        The function's result on rank 0.

    Raises:
        UsageError: an unknown value, or an option that ``function`` does not take; an object that cannot be sent to the ranks or back;
            cloudpickle is needed but not installed; several ranks on Windows.
        LaunchError: the machine has fewer GPUs than the options need.
        RankMismatchError: a rank ended without a result.

    >>> import parwrap
    >>> def train(epochs):
    ...     return parwrap.reduce_sum(epochs), parwrap.world_size()
    >>> launch(train, 3, nprocs=2)
    (6, 2)
    """
    if not callable(function):
        raise UsageError(
            f"parwrap.launch takes a function to call on the ranks, not {function!r}: instead of train(3), write parwrap.launch(train, "
            "3, nprocs=2)."
        )
    plain, decorators = undecorated(function)
    others = ", ..." * bool(args) + ("" if nprocs is None else f", nprocs={nprocs!r}")
    _refuse_options(plain, kwargs, others)
    given = next((each.given for each in decorators if isinstance(each, distributed)), {})
    if nprocs is None:
        nprocs = "gpu" if gpu_count() else 1
    here = {"nprocs": nprocs, "start_method": start_method}
    inside = [each for each in decorators if not isinstance(each, distributed)]
    return scoped(plain, [distributed(**{**given, **here}), *inside])(*args, **kwargs)


def _refuse_options(function: Callable[..., Any], given: Mapping[str, Any], others: str) -> None:
    """Raise :class:`UsageError` for a keyword that looks like one of parwrap's options and is not an argument of ``function``."""
    try:
        arguments = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin may accept any name
        return
    if any(each.kind is each.VAR_KEYWORD for each in arguments.values()):
        return
    for name, value in given.items():
        meant = [] if name in arguments else difflib.get_close_matches(name, distributed.option_names(), n=1, cutoff=0.8)
        if not meant:
            continue
        if meant[0] in inspect.signature(launch).parameters:
            advice = f"Did you mean {meant[0]}={value!r}?"
        else:
            called = f"parwrap.distributed({meant[0]}={value!r})({getattr(function, '__name__', 'function')})"
            advice = f"{meant[0]!r} is an option of parwrap.distributed: decorate the function, or call parwrap.launch({called}{others})."
        raise UsageError(f"{describe(function)} takes no argument {name!r}, which parwrap.launch would pass to it. {advice}")
