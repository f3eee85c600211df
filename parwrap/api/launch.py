"""``parwrap.launch``: launches ranks and calls a function on them. ``self_launch.py`` does the work."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from parwrap.api import distributed
from parwrap.api.self_launch import Launch, on_ranks
from parwrap.decorator import decorators_of, describe
from parwrap.errors import UsageError
from parwrap.group.device import gpu_count

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
    """Call ``function(*args, **kwargs)`` on ranks launched for it, inside :class:`parwrap.distributed`.

    Use it in plain Python, a REPL or a notebook; the function, even a closure, may be defined there. The ranks' output is shown as it
    comes, and Ctrl-C ends them. Afterwards the caller's models, optimizers, schedulers and tensors have the state of rank 0, in the same
    objects as before, and the random streams continue from rank 0's. Changes to other objects that the function reaches, such as lists and
    attributes, are copied back too; one warning names objects that cannot be pickled. Nothing stays open in this process. If a rank raises
    an exception, it is raised here, with its own type, and the other ranks are ended.

    If ranks have been launched already, for example by ``python -m parwrap.run``, the function runs on these.

    Args:
        function: the function to call. Its decorator sets the options of ``distributed``.
        args, kwargs: arguments of the function. If one has the name of an argument of ``launch``, use ``functools.partial``.
        nprocs: the number of ranks, ``"gpu"``, ``"cpu"`` (a rank for each core) or ``"auto"`` (for each GPU, or each core); by default
            the number of GPUs, or 1. One rank is this process.
        returns: ``"rank0"``: rank 0's result; ``"all"``: the list of the results of all ranks, which must pickle.
        start_method: ``"fork"``: ranks inherit everything in this process, and compute with one thread each; ``"spawn"``: they are new
            interpreters, which receive what the function uses with cloudpickle, and divide the cores. By default, ranks are forked on
            Linux, unless CUDA is initialized.

    Raises:
        UsageError: an unknown value, or an option that ``function`` does not take; an object that cannot be sent to the ranks or back;
            cloudpickle is needed but not installed.
        LaunchError: the machine has fewer GPUs.
        RankMismatchError: a rank ended without a result.

    >>> import parwrap
    >>> def train(epochs):
    ...     return parwrap.reduce_sum(epochs), parwrap.world_size()
    >>> launch(train, 3, nprocs=2)
    (6, 2)
    """
    __tracebackhide__ = True
    if not callable(function):
        raise UsageError(
            f"parwrap.launch takes a function to call on the ranks, not {function!r}: instead of train(3), write parwrap.launch(train, "
            "3, nprocs=2)."
        )
    decorators = getattr(function, "__parwrap_decorators__", None) or decorators_of(function)  # of a mixin's method
    decorated = [each for each in decorators if isinstance(each, distributed.distributed)]
    options = (decorated or [distributed.distributed()])[0]._options
    _refuse_options(function.__wrapped__ if decorators_of(function) else function, kwargs)  # type: ignore[attr-defined]
    call = partial(function if decorated else distributed.distributed()(function), *args, **kwargs)
    if nprocs is None and gpu_count():
        nprocs = "gpu"
    return on_ranks(Launch(nprocs, returns, start_method), options, call, joins=distributed.loaders_read() is not None)


def _refuse_options(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for a keyword that looks like a parwrap option and is not an argument of ``function``."""
    try:
        arguments = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # accepts any name
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
        raise UsageError(f"{describe(function)} takes no argument {name!r}, which parwrap.launch would pass to it. {advice}")
