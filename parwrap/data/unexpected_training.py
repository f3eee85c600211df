"""Detects training on a loader that every rank reads completely: from the next pass on, the loader is split."""

from __future__ import annotations

from collections.abc import Callable

from parwrap.data.pass_history import LoaderHistory
from parwrap.loop.loop_state import Loop

__all__ = ["watch_for_training"]


def watch_for_training(loop: Loop, history: LoaderHistory, say: Callable[[str], None]) -> Callable[[], None]:
    """A function to call at each batch and at the end of a pass that is not expected to train, over the loader of ``history``.

    Args:
        loop: what the training loop has done so far.
        history: the loader's history.
        say: a function, called with the warning.
    """
    before, versions = loop.backwards, loop.versions()
    if not loop.can_train():
        how = "before any optimizer was built"
    else:
        how = "in eval() mode" if loop.in_eval_mode() else "without shuffling, after another DataLoader was trained on"

    def watch() -> None:
        if loop.backwards == before or loop.passes or history.has_trained:
            return
        # a backward pass without a step may be for gradients of inputs, or a Fisher matrix
        if loop.versions() != versions or not (any(loop.optimizers()) or loop.in_eval_mode()):
            history.trains = history.has_trained = True
            say(
                f"a DataLoader was read {how}, but the loop then trained on it: every rank trained on all of it. From the next pass on, "
                "each rank gets its share."
            )

    return watch
