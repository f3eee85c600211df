"""``len(loader)`` before the first pass: returns a guess, and reports a wrong guess once the pass shows it.

``pass_history.py`` guesses what a pass over the loader is for.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from parwrap.coordination.call_site import warn
from parwrap.data.pass_history import LoaderHistory, PassHistories
from parwrap.data.samplers import shuffles
from parwrap.data.training_share import TrainingShares
from parwrap.loop.loop_state import Loop

__all__ = ["EarlyLengths"]


class EarlyLengths:
    """Gives the lengths of loaders, and checks those that were given before the first pass.

    Args:
        loop: what the training loop has done so far.
        shares: makes this rank's share of a loader.
        histories: the histories of all loaders.
    """

    def __init__(self, loop: Loop, shares: TrainingShares, histories: PassHistories) -> None:
        self._loop, self._shares, self._histories = loop, shares, histories

    def length(self, loader: DataLoader, whole: int) -> int:
        """The number of the ``whole`` batches of ``loader`` that this rank sees."""
        history, trains = self._histories.of(loader), self._histories.will_train(loader)
        share = self._shares.length(loader, whole)
        if torch.is_grad_enabled() and not history.has_trained and (history.trains is not False or self._loop.can_train()):
            history.given_lengths = ((share, whole) if trains else (whole, share)) if share != whole else None
            history.asked_in_eval = self._loop.in_eval_mode()
        return share if trains else whole

    def check(self, loader: DataLoader, history: LoaderHistory, trains: bool) -> None:
        """Report a length given before the first pass that has turned out wrong; a training loader may be looked at first."""
        may_train_yet = not (trains or self._loop.backwards or history.asked_in_eval) and shuffles(loader)
        if history.given_lengths is None or may_train_yet or trains == (history.given_lengths[0] < history.given_lengths[1]):
            return
        (given, other), history.given_lengths = history.given_lengths, None
        seen, why = ("this rank's share", "trained on") if trains else ("all of it", "not trained on")
        warn(
            f"parwrap: len() of a DataLoader was {given} before its first pass, but is {other} now: the loader is {why}, so a pass reads "
            f"{seen}. Values computed from {given}, such as the steps of a schedule or an average, are wrong: call len() in the pass, or "
            f"after model.{'train' if trains else 'eval'}()."
        )
