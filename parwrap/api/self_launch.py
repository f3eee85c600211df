"""``nprocs=``: a call in a plain process, a REPL or a notebook launches the ranks that it runs on.

Decides how many ranks to launch, how they start and what the caller gets. Inside a launch, it starts no ranks.
``parwrap/inline/launching.py`` starts them.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parwrap.coordination.call_site import warn
from parwrap.errors import LaunchError, UsageError
from parwrap.group import group as groups
from parwrap.group.collectives import gather
from parwrap.group.device import cores, gpu_count
from parwrap.inline.forking import choose_start_method, import_for_optimizers, refuse_unforkable
from parwrap.inline.launching import run_on_ranks
from parwrap.loop.random_streams import get_state, set_state
from parwrap.options import Options
from parwrap.system.remote_exception import RemoteTraceback
from parwrap.world.world import detect

__all__ = ["Launch", "gathered", "on_ranks", "there_are_ranks"]

CHOICES: dict[str, dict[Any, str]] = {
    "returns": {"rank0": "rank 0's result", "all": "the list of the results of all ranks"},
    "start_method": {
        None: "forks ranks unless CUDA is initialized",
        "fork": "ranks inherit everything in this process, and compute with one thread each",
        "spawn": "ranks are new interpreters, which receive what the function uses",
    },
}
NAMED = ("gpu", "cpu", "auto")


@dataclass(frozen=True)
class Launch:
    """The checked options of a launch; the arguments are those of :func:`parwrap.launch`.

    >>> Launch(nprocs="cores")
    Traceback (most recent call last):
    parwrap.errors.UsageError: nprocs='cores' is not a positive number of ranks, nor 'gpu', 'cpu' or 'auto'.
    """

    nprocs: int | str | None = None
    returns: str = "rank0"
    start_method: str | None = None

    def __post_init__(self) -> None:
        if not (self.nprocs is None or self.nprocs in NAMED or (type(self.nprocs) is int and self.nprocs > 0)):
            raise UsageError(f"nprocs={self.nprocs!r} is not a positive number of ranks, nor 'gpu', 'cpu' or 'auto'.")
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in tuple(choices):
                meanings = "; ".join(f"{choice!r}: {meaning}" for choice, meaning in choices.items())
                raise UsageError(f"{name}={value!r} is not a valid value. Choose one of: {meanings}.")

    def ranks(self, backend: str | None) -> int:
        """The number of ranks on this machine.

        Raises:
            LaunchError: the machine has fewer GPUs.
        """
        gpus = gpu_count()
        named = {"gpu": gpus, "cpu": cores(), "auto": gpus or cores()}
        if self.nprocs == "gpu" and not gpus:
            raise LaunchError(
                "nprocs='gpu' starts a rank on each GPU, but torch cannot use a GPU here: set a number of ranks to train on the CPU."
            )
        count = named[self.nprocs] if isinstance(self.nprocs, str) else self.nprocs or 1
        if gpus and count > gpus and backend != "gloo":
            raise LaunchError(
                f"nprocs={self.nprocs!r} is more than the GPUs that torch can use here ({gpus}). Use at most {gpus}, or set "
                "backend='gloo' to let ranks share GPUs."
            )
        return count


def there_are_ranks() -> bool:
    """Whether this process was launched as one of several, or has a process group."""
    return groups.open_group() is not None or groups.is_outside_loop() or dist.is_initialized() or detect(os.environ).size > 1


_asked: Launch | None = None
"""The function that the present launch is for, until it begins."""


def on_ranks(launch: Launch, options: Options, call: Callable[[], Any], joins: bool) -> Any:
    """Run ``call()`` on the ranks that ``launch`` describes, or on existing ranks.

    Args:
        launch: the launch options.
        options: the options of the ``distributed`` that ``call`` opens.
        call: opens ``distributed`` and runs the function.
        joins: whether a ``distributed`` is open already.
    """
    __tracebackhide__ = True
    if _asked is not None:  # parwrap.launch has launched it for this very function
        return call()
    if joins or there_are_ranks():
        size = groups.world_size()
        if launch.nprocs not in (None, *NAMED, size):
            warn(
                f"parwrap: nprocs={launch.nprocs} starts no new ranks here: the function runs on "
                f"{f'the {size} existing ranks' if size > 1 else 'the one existing rank'}."
            )
        return _begun(launch, call)
    who = f"parwrap.distributed with nprocs={launch.nprocs!r}"
    if (size := launch.ranks(options.backend)) == 1:
        return _begun(launch, call)
    method = launch.start_method or choose_start_method()
    if method == "fork" or not hasattr(os, "fork"):
        refuse_unforkable(who, gpus=True)
        import_for_optimizers()
    try:
        result, streams = run_on_ranks(
            lambda: (_begun(launch, call), get_state()), size, options.patience, options.backend, start_method=method, who=who
        )
    except BaseException as error:
        if isinstance(error.__cause__, RemoteTraceback):
            error.with_traceback(None)  # the message is enough; a notebook would show pages of our own frames
        raise
    if not torch.cuda.is_initialized():
        streams.pop("cuda", None)
    set_state(streams)
    return result


def _begun(launch: Launch, call: Callable[[], Any]) -> Any:
    global _asked
    _asked = launch
    try:
        return call()
    finally:
        _asked = None


def gathered(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, changed to return the results of all ranks if requested."""

    def of_all(*args: Any, **kwargs: Any) -> Any:
        global _asked
        asked, _asked = _asked, None
        result = function(*args, **kwargs)
        if asked is None or asked.returns == "rank0":
            return result
        if groups.open_group() is None:
            return [result]
        everyones = [torch.load(io.BytesIO(packed), weights_only=False) for packed in gather(_packed(result))]
        everyones[groups.rank()] = result
        return everyones

    return of_all


def _packed(result: Any) -> bytes:
    """Pickle ``result`` with each storage only once, however many tensors share it."""
    with io.BytesIO() as file:
        try:
            torch.save(result, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)  # raised by torch itself; a TimeoutError is an OSError
        except Exception as error:
            raise UsageError(
                f"the result on rank {groups.rank()} cannot be sent to the other ranks, as returns='all' requires: {error}. Return only "
                "tensors, models, numbers and containers of them, and define their classes outside of the function."
            ) from error
        return file.getvalue()
