"""A loader that every rank reads whole and that is trained on nevertheless: it is split from its next pass on."""

from __future__ import annotations

from collections.abc import Callable

from parwrap.data.pass_history import LoaderHistory
from parwrap.loop.loop_state import Loop

__all__ = ["watch_for_training"]


def watch_for_training(loop: Loop, history: LoaderHistory, say: Callable[[str], None]) -> Callable[[], None]:
    """The function to call at each batch and at the end of a pass that begins as one that only looks, over the loader of ``history``.

    Args:
        loop: what the training loop has done so far.
        history: the loader's history.
        say: called with the warning.
    """
    before, versions = loop.backwards, loop.versions()
    if not loop.can_train():
        how = "before any optimizer was built"
    else:
        how = "in eval() mode" if loop.in_eval_mode() else "without shuffling after another one was trained on"

    def watch() -> None:
        if loop.backwards == before or loop.passes or history.has_trained:
            return
        # a backward alone may be for gradients of inputs, or a Fisher matrix
        if loop.versions() != versions or not (any(loop.optimizers()) or loop.in_eval_mode()):
            history.trains = history.has_trained = True
            say(
                f"a DataLoader was read {how}, and yet trained on: every rank trained on all of it. "
                "From its next pass on each rank gets its share."
            )

    return watch
