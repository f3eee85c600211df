"""From a thread, ends waits that would never end: between ranks of different nodes, and on GPUs for a rank that has failed.

Within a node, ``positions.py`` finds ranks that come apart on pages of shared memory. Across nodes, a rank that has been blocked in one
step for two seconds puts its page into the store, and compares it with that of the next rank. If ranks are blocked at different positions,
some rank differs from the next one, so one comparison for each rank suffices. Nothing is sent while ranks move. A page that is out of date
proves nothing and does no harm, because counts only grow.

On a GPU a rank may also be blocked while it runs the script: where it reads a number, such as a loss. The script may as well compute for
long there, so it looks again only after 4, 8, 16 seconds, and so on. Python does not run there, and so no handler of a signal.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch.optim import Optimizer

from parwrap.checks.positions import Page, Positions, State, apart, sentence
from parwrap.errors import LockstepError
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.interrupts import Interrupts, noting_arrivals
from parwrap.ranks.background import in_background
from parwrap.ranks.group import Group
from parwrap.ranks.store import SignedStore
from parwrap.torch_private.distributed import abort_nccl

__all__ = ["Aborted", "watched"]

PATIENCE = 2.0
"""Seconds in one step after which a rank counts as blocked."""

INTERVAL = 0.25

UNHEARD = 8.0
"""Seconds after which a signal that Python has not handled shows that this rank waits on its GPU for ranks that have failed."""


class Aborted(Interceptor):
    """Whether NCCL was aborted. Then no optimizer steps and nothing that the job trains is saved.

    An abort ends an all-reduce before all ranks have taken part, and what the GPU was to do after it runs with what is there: a read of
    a number returns, and a step that the script has begun before spoils the weights.

    Args:
        interrupts: holds signals.

    Attributes:
        spoiled: whether the abort may have changed what the job trains.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._why = ""
        self._stepped = False  # since an interrupt was raised
        self.spoiled = False

    def note(self, why: str) -> None:
        """Note that NCCL is about to be aborted because of ``why``.

        All ranks raise an interrupt after the same backward, with the weights of the step before. A script that catches it may save these.
        """
        self.spoiled = not self._interrupts.raised or self._stepped
        self._why = why

    def step(self, optimizer: Optimizer) -> None:
        if self._why:
            raise LockstepError(f"no optimizer steps any more: {self._why}")
        self._stepped = self._interrupts.raised

    def check_save(self, is_checkpoint: Callable[[], bool]) -> None:
        """Raise if weights may be spoiled and what is about to be saved, or was just written, is a checkpoint.

        Raises:
            LockstepError: so that an earlier checkpoint stays.
        """
        if self.spoiled and is_checkpoint():
            raise LockstepError(f"no checkpoint is saved any more, so that an earlier one stays: {self._why}")


@contextmanager
def watched(group: Group, positions: Positions, interrupts: Interrupts, report: Callable[[str], None]) -> Iterator[Aborted]:
    """Inside the block, end waits of this rank that would never end.

    On several nodes, end the process if the next rank can never meet this one. With NCCL, abort NCCL once another rank of the node
    has failed, or a signal has not been handled for some seconds.

    Args:
        group: the process group.
        positions: the pages of this node.
        interrupts: holds signals.
        report: shows an error, also on ranks that are silent otherwise.

    Yields:
        whether NCCL was aborted.
    """
    aborted = Aborted(interrupts)
    with ExitStack() as threads:
        if group.store is not None and not group.world.on_one_node:
            run = partial(_compare_with_other_nodes, group, positions, report)
            threads.enter_context(in_background(run, "parwrap watchdog"))
        if group.backend == "nccl":
            run = partial(_let_go_of_failed, positions, interrupts, aborted, threads.enter_context(noting_arrivals()))
            threads.enter_context(in_background(run, "parwrap watchdog of the GPU"))
        yield aborted


def _compare_with_other_nodes(group: Group, positions: Positions, report: Callable[[str], None], stopped: threading.Event) -> None:
    """End this process if this rank is blocked, and the next rank can never meet it."""
    assert group.store is not None
    store = SignedStore(group.store, f"positions {positions.opening}")
    rank, following = group.world.rank, (group.world.rank + 1) % group.world.size
    blocks = {State.BACKWARD, State.AVERAGES, State.CONTROL, State.INNER} | ({State.RUNS} if group.device.type == "cuda" else set())
    seen, since, patience = positions.now(), time.monotonic(), PATIENCE
    put: Page | None = None
    while not stopped.wait(INTERVAL):
        mine = positions.now()
        if mine != seen or mine.state not in blocks:
            seen, since, patience = mine, time.monotonic(), PATIENCE
        elif time.monotonic() - since > patience:
            patience *= 2 if mine.state == State.RUNS else 1
            if mine != put:
                store.set(f"rank {rank}", list(mine))
                put = mine
            if store.has(f"rank {following}"):
                theirs = Page(*store.get(f"rank {following}", list))
                if apart(mine, theirs) or apart(theirs, mine):
                    # the main thread is blocked in native code, so it cannot raise
                    there = sentence(theirs)
                    why = f"rank {following} {there}, and rank {rank} can never meet it there. The ranks of this node"
                    report(f"{positions.error(why)}")
                    os._exit(1)


def _let_go_of_failed(
    positions: Positions, interrupts: Interrupts, aborted: Aborted, arrived: Callable[[], bytes], stopped: threading.Event
) -> None:
    """Abort NCCL once a rank of the node has raised, or Python does not handle a signal: the main thread then waits no longer."""
    since: float | None = None
    while not stopped.wait(INTERVAL):
        failed, unheard = positions.another_raised(), interrupts.unheard(arrived())
        since = (since or time.monotonic()) if failed or unheard else None
        if since is not None and time.monotonic() - since > (PATIENCE if failed else UNHEARD):
            because = "another rank has failed" if failed else "a signal to end came while this rank waited for its GPU"
            error = positions.error(f"{because}. NCCL was aborted, and the last gradients may lack those of other ranks")
            aborted.note(str(error))
            raises = aborted.spoiled and not unheard and not positions.has_stopped()
            if raises and positions.now().state == State.RUNS:
                interrupts.raise_soon(error)  # the main thread may read a number that nothing averaged
                raises = False
            if unheard:
                interrupts.hold_no_more()
            abort_nccl()
            while raises and not stopped.wait(INTERVAL / 10):  # a backward is not interrupted inside: what calls its hooks is no Python
                if positions.now().state == State.RUNS:
                    interrupts.raise_soon(error)
                    return
            return
