"""The interceptor of loaders: decides, when a pass over a loader begins, whether this rank sees all of it or its share.

What is read to be looked at (evaluation) is seen whole by every rank, so that printed metrics are those of a single
process; what is trained on is shared out, which is ``training_share.py``'s.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from parwrap.coordination.call_site import location, warn
from parwrap.data.iterables import world_size_asked
from parwrap.data.loader_position import MARK, Position
from parwrap.data.looking import ShareThenRest
from parwrap.data.passes import Pass
from parwrap.data.running_numbers import RunningNumbers
from parwrap.data.samplers import samples_in, shuffles, users_own
from parwrap.data.sharing_rules import Sharing, TrainingData
from parwrap.data.training_share import Shares
from parwrap.errors import UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.batch_weights import Reading, Weighed
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams, get_state, set_state
from parwrap.system.progress_bars import write_line
from parwrap.system.structures import first_tensor

__all__ = ["Loaders"]


@dataclass
class _History:
    """What is known of one loader.

    Attributes:
        trains: what the last pass was for; ``None`` until there was one.
        has_trained: whether there ever was a backward in a pass.
        shown: whether there was one in a pass over this rank's share.
        by_batch: whether the first pass that trained did so before its second batch was drawn.
        ahead: whether a pass has trained only when all of its share was drawn.
        looked: whether a pass has only looked whose rest cannot be read; then every rank reads all from then on.
        phase: how many optimizers there were when the last pass began.
        looked_phase: that number if the last pass looked at all of it.
        doubt: what the last pass has left open.
        noted: whether it was said that a pass only looked.
        told: the length that was given before the first pass, and that of a pass of the other kind, if they differ.
        told_in_eval: whether it was asked for in eval mode.
        asked: how many backwards had run, and how many passes had trained, when one batch was asked for by ``next(iter(loader))``.
    """

    trains: bool | None = None
    has_trained: bool = False
    shown: bool = False
    by_batch: bool = False
    ahead: bool = False
    looked: bool = False
    phase: int = -1
    looked_phase: int | None = None
    doubt: _Doubt | None = None
    noted: bool = False
    told: tuple[int, int] | None = None
    told_in_eval: bool = False
    asked: tuple[int, int] | None = None


class _Doubt(NamedTuple):
    """A pass has ended that may train yet, by a backward that comes after it.

    Attributes:
        backwards: how many had run then.
        waits: whether what was computed from all of it waits for one.
        text: what to say if none comes.
    """

    backwards: int
    waits: bool
    text: str


class Loaders(Interceptor):
    """Shares out the loaders of a loop.

    Args:
        group: the ranks to share with; ``None`` for a single rank.
        loop: what the training loop has done so far.
        streams: the random streams.
        sharing: gives how to share out now.
        began: called at the first training pass.

    Attributes:
        streams: the random streams.
        numbers: looks out for numbers that the script takes for those of all ranks.
        trained_passes: how many passes are over in which there was a backward.
    """

    def __init__(
        self,
        group: Group | None,
        loop: Loop,
        streams: RandomStreams,
        sharing: Callable[[], Sharing],
        began: Callable[[TrainingData], None],
    ) -> None:
        self._loop, self.streams, self._sharing = loop, streams, sharing
        self._size, self._alone = (group.world.size, False) if group else (1, True)
        self._shares = Shares(group, streams, sharing, began)
        self._positions: weakref.WeakKeyDictionary[DataLoader, Position] = weakref.WeakKeyDictionary()
        self._trained = self.trained_passes = 0
        self._closed = self._said_dropped = False
        self._histories: weakref.WeakKeyDictionary[DataLoader, _History] = weakref.WeakKeyDictionary()
        self._shuffled_seen = False
        self.numbers = RunningNumbers(self._size, write_line if group and group.world.rank == 0 else lambda line: None)

    def agree(self, loader: DataLoader) -> None:
        """Have all ranks hold the same samples behind ``loader``, of which each is about to look at a part."""
        self.check_told(loader, self._history(loader), trains=False)
        self._shares.agree(loader)

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over ``loader``."""
        if _is_private():
            return original(loader)
        if self._loop.parts:
            return self._evaluation(loader, original, lambda: None)
        history = self._history(loader)
        if not torch.is_grad_enabled():
            return self._evaluation(loader, original, lambda: None, lambda only_one: self.check_told(loader, history, trains=False))
        self._resolve_doubts(history)
        guess, before = self._trains(loader, history), replace(history)

        def instead(only_one: bool) -> Pass | None:
            if guess and only_one and not self._closed and self._shows_one(loader, history):
                return self._show_one(loader, original, history, before)
            return self._instead(loader, original, history, guess)

        return self._pass(loader, original, history, guess, instead)

    def _pass(
        self, loader: DataLoader, original: Callable, history: _History, trains: bool, instead: Callable[[bool], Pass | None] | None = None
    ) -> Pass:
        history.trains, history.phase = trains, self._loop.phase
        if not trains:
            return self._evaluation(loader, original, self._watch_evaluation(history), instead)
        return self._training(loader, original, history, instead)

    def _instead(self, loader: DataLoader, original: Callable, history: _History, guess: bool) -> Pass | None:
        """The pass that is read in the place of one that begins, if its loader turns out to be for something else than was ``guess``-ed."""
        if self._closed:
            return None
        trains = self._trains(loader, history)
        if history.has_trained or not trains:  # else it is known at the end of the pass
            self.check_told(loader, history, trains)
        if trains == guess or _is_private() or self._loop.parts:
            return None
        return self._where_drawn(lambda: self._pass(loader, original, history, trains))

    def _where_drawn(self, begin: Callable[[], Pass]) -> Pass:
        """The pass that ``begin`` begins in the place of another, which has drawn from the shared streams what a single process draws."""
        with self.streams.shared():
            before = get_state()
        other = begin()
        with self.streams.shared():
            set_state(before)
        return other

    def _shows_one(self, loader: DataLoader, history: _History) -> bool:
        """Whether one batch of ``loader`` is the same in every pass, to be shown, rather than the next one that is trained on."""
        before, history.asked = history.asked, (self._loop.backwards, self.trained_passes)
        if self._shares.keeps() or shuffles(loader) or isinstance(loader.dataset, IterableDataset):
            return False
        # a loop that trains on one batch at a time has had a backward since it has asked before, outside of all passes
        return before is None or self._loop.passes_in_for > 0 or before[0] == self._loop.backwards or before[1] < self.trained_passes

    def _show_one(self, loader: DataLoader, original: Callable, history: _History, before: _History) -> Pass:
        """A pass for one batch, which all ranks have alike; what is known of ``loader`` is what it was ``before``."""
        if not history.has_trained:
            self.take_back(loader, self.position(loader))
        shown = self._where_drawn(lambda: self._evaluation(loader, original, lambda: None))
        history.trains, history.phase, history.looked_phase = before.trains, before.phase, before.looked_phase
        return shown

    def _training(self, loader: DataLoader, original: Callable, history: _History, instead: Callable[[bool], Pass | None] | None) -> Pass:
        position, history.looked_phase = self._begin(loader), None
        share, weights = self._shares.batches(loader, original, position)
        self._loop.opened_pass()
        sharing, weighed = self._sharing(), Reading()
        reading = _Reading(self, self._shares, self._loop, loader, original, history, position, weighed)
        if self._shares.reads_all(loader):
            batches: Iterator = share
        else:
            batches = reading.watched(share)
            self.numbers.trains(loader.dataset)

        def drawn(batch: Any) -> None:
            self._loop.drew_batch()
            if reading.looks:
                return
            position.drew()
            reading.note_gradient()
            if weights is not None:
                weight = weights.popleft()
                factor, split = sharing.loss_factor(weight, self._size), sharing.batch == "global"
                self._loop.weights.draw(weighed, Weighed(weight, factor, samples_in(batch), split), first_tensor(batch))

        return Pass(batches, reading.closed, drawn, self._loop.reads_in_for, instead)

    def position(self, loader: DataLoader) -> Position:
        """Where training passes over ``loader`` are, also before the first."""
        loader = users_own(loader)
        if loader not in self._positions:
            self._positions[loader] = Position(loader, self.streams, self._shares.plan)
        return self._positions[loader]

    def positions(self) -> list[Position]:
        """Those of the loaders that were trained on, in the order of the first passes."""
        return sorted((each for each in self._positions.values() if each.number is not None), key=lambda each: each.number or 0)

    def _begin(self, loader: DataLoader) -> Position:
        if getattr(loader, "next_iter_state", None) is not None:
            raise UsageError(
                f"a {type(loader).__name__} was given a state that was taken without parwrap, which does not say where several ranks are. "
                "Take it from the loader, or from parwrap.loaders(), where parwrap runs the training."
            )
        position = self.position(loader)
        if position.number is None:
            position.number = self._trained
            self._trained += 1
        return position

    @intercepts
    def loader_state(self, loader: DataLoader, original: Callable[[], dict]) -> dict:
        """``state_dict()`` of a loader that has one: its own iterator is not the one that is read where it is shared out."""
        return original() if _is_private() or not self._will_train(loader) else self.position(loader).state_dict()

    @intercepts
    def load_loader_state(self, loader: DataLoader, original: Callable[[dict], None], state: dict) -> None:
        """``load_state_dict(state)`` of such a loader."""
        if isinstance(state, dict) and MARK in state:
            self.position(loader).load_state_dict(state)
        else:
            original(state)

    def _evaluation(
        self, loader: DataLoader, original: Callable, watch: Callable[[], None], instead: Callable[[bool], Pass | None] | None = None
    ) -> Pass:
        if self._loop.drawing():
            self._shares.take_first(loader)
        with self.streams.shared():  # a loader with workers draws ahead at once
            batches, whole = original(loader), not (self._loop.parts or self._shares.shares_out_itself(loader))
        self._loop.opened_evaluation()
        self.numbers.looks(loader.dataset)
        self._history(loader).looked_phase = self._loop.phase
        position = self.position(loader)
        position.looked_at += 1

        def drawn(batch: Any) -> None:
            self._loop.drew_batch(whole)
            watch()

        def closed(exhausted: bool) -> None:
            position.looked_at -= 1
            self._loop.closed_evaluation()
            watch()

        return Pass(batches, closed, drawn, instead=instead)

    @intercepts
    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)``: of what this rank gets to see of it."""
        whole = original(loader)
        if _is_private() or self._loop.parts:
            return whole
        history, trains = self._history(loader), self._will_train(loader)
        share = self._shares.length(loader, whole)
        if torch.is_grad_enabled() and not history.has_trained and (history.trains is not False or self._loop.can_train()):
            history.told = ((share, whole) if trains else (whole, share)) if share != whole else None
            history.told_in_eval = self._loop.in_eval_mode()
        return share if trains else whole

    @intercepts
    def world_size_asked(self) -> None:
        """A dataset that asks for the number of ranks shards itself."""
        world_size_asked()

    def close(self) -> None:
        """The session is over: passes that outlive it go on as they were begun."""
        self._closed = True
        self._shares.close()

    def left(self) -> None:
        """The function or script is over."""
        for history in list(self._histories.values()):
            self._resolve_doubt(history)

    def _history(self, loader: DataLoader) -> _History:
        self._shuffled_seen |= _shuffled(loader)
        return self._histories.setdefault(loader, _History())

    def _trains(self, loader: DataLoader, history: _History) -> bool:
        """Whether a pass that begins is one that may train, so that this rank's share comes first.

        Where there is something to train, a loader may: where it turns out to be looked at, the rest comes after the share. One that does
        not shuffle is read whole, in order, in eval mode, and where one that shuffles has been trained on.
        """
        if self._shares.keeps():
            return not self._loop.in_eval_mode()
        if history.has_trained:
            return True
        if history.looked or not self._loop.can_train():
            return False
        shuffled = _shuffled(loader)
        if shuffled or self._loop.in_eval_mode():
            return shuffled
        return self._loop.passes > 0 or not self._another_trains(loader, shuffled=True)

    def _will_train(self, loader: DataLoader) -> bool:
        """The best guess for a loader that was not iterated yet: scripts ask for its length before the first pass."""
        history = self._history(loader)
        if history.has_trained:  # an average is divided by the length after the pass, also where that only looked
            return torch.is_grad_enabled() and history.trains is not False and history.looked_phase != self._loop.phase
        if history.trains is not None and history.phase == self._loop.phase:
            return history.trains
        if self._loop.in_eval_mode():
            return torch.is_grad_enabled() and self._trains(loader, history) and not self._another_trains(loader)
        if any(other.trains and other.phase == self._loop.phase for other in self._histories.values()):
            return False
        return not self._shuffled_seen or shuffles(loader)

    def _another_trains(self, loader: DataLoader, shuffled: bool = False) -> bool:
        """Whether another loader, of those that are ``shuffled``, has been trained on since the last optimizer was built."""
        others = (other for each, other in self._histories.items() if each is not loader and (not shuffled or _shuffled(each)))
        return any(other.has_trained and other.phase == self._loop.phase for other in others)

    def check_told(self, loader: DataLoader, history: _History, trains: bool) -> None:
        """Say so if the length that was given before the first pass has turned out wrong; one that trains may be looked at before."""
        may_train_yet = not (trains or self._loop.backwards or history.told_in_eval) and shuffles(loader)
        if history.told is None or may_train_yet or trains == (history.told[0] < history.told[1]):
            return
        (told, other), history.told = history.told, None
        seen, why = ("this rank's share", "trained on") if trains else ("all of it", "only looked at")
        warn(
            f"parwrap: len() of a DataLoader was {told} when it was asked for before its first pass, and now it is {other}: "
            f"the loader is {why}, so that a pass sees {seen}. What was computed from {told}, such as the steps of a schedule or an "
            f"average, is off: ask for it in the pass, or after model.{'train' if trains else 'eval'}()."
        )

    def _watch_evaluation(self, history: _History) -> Callable[[], None]:
        before, versions = self._loop.backwards, self._loop.versions()
        if not self._loop.can_train():
            how = "before any optimizer was built"
        else:
            how = "in eval() mode" if self._loop.in_eval_mode() else "without shuffling after another one was trained on"

        def watch() -> None:
            if self._loop.backwards == before or self._loop.passes or history.has_trained:
                return
            # a backward alone is for gradients of inputs, or of a Fisher matrix
            if self._loop.versions() != versions or not (any(self._loop.optimizers()) or self._loop.in_eval_mode()):
                history.trains = history.has_trained = True
                self.warn(
                    f"a DataLoader was read {how}, and yet trained on: every rank trained on all of it. "
                    "From its next pass on each rank gets its share."
                )

        return watch

    def _resolve_doubts(self, history: _History) -> None:
        """A pass begins, over the loader of ``history``: what was broken off before and has not been trained on was looked at."""
        for each in list(self._histories.values()):
            if each.doubt and (each is history or not each.doubt.waits):
                self._resolve_doubt(each)

    def _resolve_doubt(self, history: _History) -> None:
        doubt, history.doubt = history.doubt, None
        if doubt is None:
            return
        if self._loop.backwards == doubt.backwards:
            self.warn(doubt.text)
        elif doubt.waits:
            history.has_trained = True

    def only_looks(self, loader: DataLoader, history: _History) -> bool:
        """Whether a pass over ``loader`` whose losses are kept to its end is likely to be one that looks all the same."""
        others = any(other.by_batch and other.phase == self._loop.phase for other in self._histories.values())
        return self._loop.in_eval_mode() or history.by_batch or (others and not history.has_trained)

    def take_back(self, loader: DataLoader, position: Position) -> None:
        """``loader`` has not been trained on yet, though a pass over it began as one that may."""
        if position.number is not None and position.number == self._trained - 1:
            position.number = None
            self._trained -= 1
        self._shares.take_back(loader)

    def warn_of_dropped_gradients(self) -> None:
        """Gradients of a pass were looked at rather than trained with."""
        if not self._said_dropped:
            self._said_dropped = True
            self.warn(
                f"a DataLoader was read at {location()} with backwards and without a step: their gradients are means over the ranks, and "
                "each rank has read its own share. For numbers of single samples or batches, such as a Fisher matrix or gradient norms, "
                "take torch.autograd.grad(loss, parameters), with which each rank reads all and has its own gradients, or a function under "
                "@parwrap.rank_zero_only. This is said once."
            )

    def warn(self, text: str) -> None:
        """A single rank has nothing that others could lack."""
        if not self._alone:
            warn(f"parwrap: {text}")


class _Reading:
    """A pass that may train: this rank's share comes first.

    Args:
        owner: the interceptor.
        shares: gives the rest of what this rank has not seen.
        loop: what the training loop has done so far.
        loader: the user's.
        original: reads a loader.
        history: of the loader.
        position: of the loader, where the pass has begun.
        weighed: the pass as the weights of its batches know it.

    Attributes:
        looks: whether the pass has turned out to look only.
    """

    def __init__(
        self,
        owner: Loaders,
        shares: Shares,
        loop: Loop,
        loader: DataLoader,
        original: Callable,
        history: _History,
        position: Position,
        weighed: Reading,
    ) -> None:
        self._owner, self._shares, self._loop = owner, shares, loop
        self._loader, self._original, self._history = loader, original, history
        self._position, self._epoch, self._unread = position, position.epoch, position.unread
        self._backwards, self._steps, self._versions, self._weighed = loop.backwards, loop.steps, loop.versions(), weighed
        self._batches: ShareThenRest | None = None
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self.looks = False

    def watched(self, share: Iterator) -> ShareThenRest:
        """The batches of the ``share``, and the rest where the pass only looks."""
        self._batches = ShareThenRest(share, self._unread, lambda: self._loop.backwards, self._asked, self._shown)
        return self._batches

    def note_gradient(self) -> None:
        """Remember which tensor the first backward has left."""
        if self._gradient is None and self._loop.backwards > self._backwards and (gradient := self._loop.a_gradient()) is not None:
            self._gradient = weakref.ref(gradient)

    def _drops_gradients(self) -> bool:
        """Whether gradients were made anew without a step in between, to be looked at. Those that are accumulated stay."""
        changed = self._gradient is not None and self._gradient() is not self._loop.a_gradient()
        return changed and self._batches is not None and (self._loop.steps, self._loop.versions()) == (self._steps, self._versions)

    def closed(self, exhausted: bool) -> None:
        history, loop = self._history, self._loop
        if self.looks:
            self._position.looked_at -= 1
            loop.closed_evaluation()
        else:
            if self._batches is not None and not (self._batches.read or exhausted):
                self._position.take_back(self._epoch)
            else:
                self._position.end()
            loop.closed_pass()
        loop.weights.close(self._weighed)
        if loop.backwards > self._backwards:
            self._owner.trained_passes += 1
            if self._drops_gradients():
                self._owner.warn_of_dropped_gradients()
            self._owner.check_told(self._loader, history, trains=True)
            history.has_trained, history.told = True, None
            self._owner.numbers.ended(self._loader.dataset)
        elif not exhausted and self._batches is not None and self._batches.undecided() and not sys.is_finalizing():
            self._broken_off(self._batches)
        self._batches = None

    def _broken_off(self, batches: ShareThenRest) -> None:
        if batches.read == 1 or self._loop.versions() != self._versions:
            return  # one batch is drawn for its shape, or to be shown
        self._history.doubt = _Doubt(
            self._loop.backwards,
            batches.first_waits(),
            f"{batches.read} batches of a DataLoader were read at {location()} without a backward, and each rank saw others. With "
            "torch.no_grad() around the loop all ranks see the same; parwrap.reduce_mean(x) is the mean over the ranks.",
        )

    def _asked(self, read: int, waits: bool) -> Iterator | None:
        """The share has ended and nothing was trained: the rest, if the pass only looks."""
        history, loop = self._history, self._loop
        if history.has_trained and not (history.shown or any(loop.optimizers())):
            return None  # by torch.autograd.grad and updates by hand
        stepped = loop.versions() != self._versions
        trains = history.ahead or stepped or (waits and not self._owner.only_looks(self._loader, history))
        looks = self._shares.all_look(trains) if self._unread else not (trains or self._shares.shares_out_itself(self._loader))
        if not looks:
            history.has_trained |= stepped
            if trains and not stepped:
                history.doubt = _Doubt(
                    loop.backwards,
                    True,
                    f"a DataLoader was read to its end at {location()} without training, and each rank saw only its share of it: it was "
                    "taken for training with a backward after the pass. With torch.no_grad() around the loop every rank sees all of it.",
                )
            return None
        history.trains, place = False, location()
        if self._unread is None:
            history.looked = True
            self._owner.warn(
                f"a DataLoader was read to its end at {place} without training, and each rank saw only its share of it. "
                "From its next pass on every rank sees all of it; with torch.no_grad() around the loop, the first would too."
            )
            return None
        self.looks = True
        self._begin_to_look()
        rest = self._unread.rest(read)
        self._note(place, read + len(rest))
        return self._shares.rest(self._loader, self._original, rest)

    def _begin_to_look(self) -> None:
        self._position.take_back(self._epoch)
        self._position.looked_at += 1
        if not self._history.has_trained:
            self._owner.take_back(self._loader, self._position)
        self._loop.closed_pass()
        self._loop.opened_evaluation()
        self._owner.numbers.looks(self._loader.dataset)
        self._loop.weights.close(self._weighed)

    def _note(self, place: str, batches: int) -> None:
        drawn: Any = self._loader.sampler if self._loader.batch_sampler is None else self._loader.batch_sampler
        whole = len(drawn) if hasattr(drawn, "__len__") else batches
        told, self._history.told = self._history.told, None
        if self._history.noted:
            return
        self._history.noted = True
        length = f"len() of it was {told[0]} before that, and of the whole it is {told[1]}. " if told else ""
        if self._batches is not None and self._batches.kept():
            length += (
                "If the batches are kept to be trained on, every rank trains on all of them, which is no faster: read the loader in each "
                "epoch, or read it under torch.no_grad() and train on parwrap.shard(batches). "
            )
        length += f"There are {batches} batches instead of {whole}: divide by what was counted. " if batches != whole else ""
        self._owner.warn(
            f"a DataLoader is read at {place} without a backward: each rank sees its own share first and then the rest, so that sums and "
            f"counts are those of one process, in another order. {length}With torch.no_grad() around the loop the order is the same too."
        )

    def _shown(self, read: int, looked: bool) -> None:
        """Something was trained."""
        history = self._history
        if not history.has_trained:
            history.by_batch = read == 1 and not looked
        history.has_trained = history.trains = history.shown = True
        if looked:
            history.ahead = True
            self._owner.warn(
                "a DataLoader is drawn ahead to the end of this rank's share before its first backward, and was taken for one that is only "
                "looked at: ranks have trained on batches of others. From its next pass on each rank gets its share."
            )


def _shuffled(loader: DataLoader) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and shuffles(loader)


def _is_private() -> bool:
    """Whether a loader is read by a worker or by a lone rank, which has nobody to share with."""
    return get_worker_info() is not None or is_alone()
