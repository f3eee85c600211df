"""Where every rank of the node is: one page of shared memory each, read before anything is sent and when a rank is blocked.

A rank writes its own page when it enters a backward or a control message: how many of each it has entered, what it is about to send and
the line of the script. It reads the pages of the others, and raises before it sends anything that can never meet its counterpart.

On a GPU a rank does not wait in the backward: it may run the script while its gradients wait for a rank that never sends its own. So the
pages also say which sets the last backwards averaged.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from parwrap.errors import LockstepError, counted
from parwrap.ranks.platform import shared_memory

__all__ = ["Page", "Positions", "State", "apart", "what_parted"]

SIZE = 512
"""Bytes of a page."""

WORDS = SIZE // 8

RECENT = 4
"""The number of last backwards whose sets a page has. A host is never that many backwards ahead of its GPU: each reads the numbers of the
one before."""

RECORD = Struct(f"{8 + RECENT}q")
"""The numbers of a page before its place: ``backwards``, ``state``, ``what``, ``controls`` and ``sets`` of :class:`Page`, a checksum of all
these but the state, which changes alone, the length of the place, and the two numbers of ``done``, which only errors read.

A reader whose checksum differs tries again: the page is being written, and not every processor shows writes in their order.
"""

STATE, CONTROLS, SETS, CHECKSUM, PLACE = 1, 3, 4, 4 + RECENT, RECORD.size
"""Where a page has its state, its number of controls, its sets and its checksum, in words, and its place, in bytes."""

ATTEMPTS = 1000
"""How often a reader tries again while a page is being written. The rank of the page may have died while writing."""


class State(IntEnum):
    """What a rank does."""

    RUNS = 0
    BACKWARD = 1
    CONTROL = 2
    ENDED = 3
    RAISED = 4
    AVERAGES = 5
    """The backward has reached its end on this rank, which waits for the average gradients."""
    INNER = 6
    """The rank sends a control message inside of a backward, as synchronized batch norms do."""


APART = 8
"""Added to the state of a rank that has found that the ranks are apart, and has stopped."""

MESSAGES = (State.CONTROL, State.INNER)

RUNS, BACKWARD, RAISED, AVERAGES = map(int, (State.RUNS, State.BACKWARD, State.RAISED, State.AVERAGES))  # each step compares these

_openings: Counter[Path] = Counter()
"""How many times this process has opened pages in each folder. All ranks that share a folder have the same count."""

SENTENCES: dict[int, str] = {
    State.RUNS: "runs the script; its last step was at {place}",
    State.BACKWARD: "is in the backward at {place}",
    State.CONTROL: "is in {place}",
    State.ENDED: "has ended; its last step was at {place}",
    State.RAISED: "has raised an error; its last step was at {place}",
    State.AVERAGES: "waits for the gradients of the backward at {place}",
    State.INNER: "is in {place}",
    APART: "has stopped, because the ranks have come apart; its last step was at {place}",
}


def sentence(page: Page) -> str:
    """The words that follow "rank 3" in an error: what the rank of ``page`` does, or did when it stopped."""
    words = SENTENCES.get(page.state) or SENTENCES[page.state - APART]
    stopped = ", and has stopped there" if page.state > APART else ""
    return f"{words.format(place=page.place)} (backwards begun: {page.backwards}){stopped}"


def _has_stopped(state: int) -> bool:
    return state == State.RAISED or state >= APART


class Page(NamedTuple):
    """What a rank says about itself.

    Attributes:
        backwards: the number of backwards that it has entered.
        state: what it does, a :class:`State`, to which ``APART`` may be added.
        what: the set of parameters of the backward, or the kind of the control message, that it has entered last.
        controls: the number of control messages that it has entered.
        place: the line of the script, with the kind of the message if it is in one; empty if another rank has read the page.
        sets: the sets of parameters of its last backwards, the newest first.
    """

    backwards: int = 0
    state: int = State.RUNS
    what: int = 0
    controls: int = 0
    place: str = "its start"
    sets: Sequence[int] = (0,) * RECENT


def apart(mine: Page, other: Page) -> bool:
    """Whether two ranks can never meet: the rank of ``mine``, which sends what this page says, and the rank of ``other``.

    >>> backward, another, ended = Page(3, State.BACKWARD, sets=[7]), Page(3, State.BACKWARD, sets=[8]), Page(2, State.ENDED)
    >>> apart(backward, backward), apart(backward, another), apart(backward, ended), apart(backward, Page(2))
    (False, True, True, False)
    """
    if _has_stopped(other.state) or _in_other_order(mine, other):
        return True
    if other.state == State.ENDED:
        return other.backwards < mine.backwards or other.controls < mine.controls
    sends_other = mine.state in MESSAGES and other.state in MESSAGES and mine.controls == other.controls and mine.what != other.what
    return sends_other or _lets_wait(mine, other) or _lets_wait(other, mine)


def _in_other_order(one: Page, another: Page) -> bool:
    """Whether two ranks have begun backwards and messages in different orders, or averaged different sets in the same backward."""
    further = one.backwards - another.backwards
    if further * (one.controls - another.controls) < 0:  # each has begun what the other has not
        return True
    both = zip(one.sets[max(further, 0) :], another.sets[max(-further, 0) :], strict=False)
    return any(a != b for a, b in both)


def _lets_wait(one: Page, another: Page) -> bool:
    """Whether ``one`` is at the end of a backward, inside of which ``another`` waits for a message that ``one`` has not sent."""
    inside = one.state == State.AVERAGES and another.state == State.INNER and one.backwards == another.backwards
    return inside and one.controls < another.controls


CALLED = re.compile(r"^parwrap\.|batch norm \d")
"""What the place of a message has that the script causes, and not a check of parwrap."""

ITS_END = "at its end, after"
"""What the place of a rank's last message has, which it sends after its function has ended."""


def what_parted(pages: Mapping[int, Page], done: Mapping[int, tuple[int, int]]) -> list[str]:
    """Sentences for an error, after the places of the ranks: how far each has come in its pass, if that differs, and what to do.

    Args:
        pages: what each rank does.
        done: how many backwards each rank has begun in its pass over a loader, and how many batches it has drawn.

    >>> what_parted({0: Page(3), 1: Page(2)}, {0: (3, 4), 1: (2, 4)})[0]
    'In its pass over a loader, rank 0 has begun 3 backwards on 4 batches, and rank 1 has begun 2 on 4.'
    """
    said = []
    if len(set(done.values())) > 1:
        (first, (backwards, batches)), *others = done.items()
        each = [f"rank {first} has begun {counted(backwards, 'backward')} on {counted(batches, 'batch')}"]
        each += [f"rank {rank} has begun {backwards} on {batches}" for rank, (backwards, batches) in others]
        said.append(f"In its pass over a loader, {', '.join(each[:-1])}, and {each[-1]}.")
    return [*said, f"{ALIKE} {_remedy(list(pages.values()), done)}"]


ALIKE = "Every rank must run the same passes, backwards and steps."
STOP = "If a rank decides by itself to stop or to skip, decide together: `if parwrap.any_rank(stop): break`."
SKIP = "If a rank skips what others train on, decide together before the backward: `if parwrap.any_rank(skip): continue`."
DRAW = "If the decision is random, draw it inside `with parwrap.same_draws():`."
CALL = "What waits for all ranks, such as parwrap.gather or a synchronized batch norm, must run on every rank, not under `if rank == 0:`."


def _remedy(pages: Sequence[Page], done: Mapping[int, tuple[int, int]]) -> str:
    """What to do, what fits best first."""
    if any(page.state == State.RAISED for page in pages):
        return "A rank has raised an error: that is what to mend."
    stopped = any(page.state == State.ENDED or ITS_END in page.place for page in pages)
    other_sets = len({page.backwards for page in pages}) == 1 and all(page.state % APART not in MESSAGES for page in pages)
    if not stopped and any(page.state % APART in MESSAGES and CALLED.search(page.place) for page in pages):
        return f"{CALL} {STOP}"
    if not stopped and (other_sets or len({batches for _, batches in done.values()}) == 1 < len(set(done.values()))):
        return f"{SKIP} {DRAW}"
    return f"{STOP} {DRAW}"


class Positions:
    """The pages of the ranks of this node.

    Args:
        folder: the folder that the ranks of the node share.
        rank: this rank among those of the node.
        ranks: the global ranks of the node's ranks, in their order on the node.
        alike: a function that returns whether to compare now. False after an interrupt, which ranks may handle in different ways.

    Attributes:
        done: how many backwards this rank has run in its pass over a loader, and how many batches it has drawn there.
        opening: how many times this process has opened pages in ``folder`` before.
        mine: this rank's page, as it was written last; its state may have changed since.
    """

    def __init__(self, folder: Path, rank: int, ranks: Iterable[int], alike: Callable[[], bool] = lambda: True) -> None:
        self._rank, self._ranks, self._alike, self.done = rank, tuple(ranks), alike, (0, 0)
        self._others = [index for index in range(len(self._ranks)) if index != rank]
        self.opening = _openings[folder]
        _openings[folder] += 1
        self._path = folder / f"positions-{self.opening}"
        self._memory = shared_memory(self._path, SIZE * len(self._ranks))
        self._numbers = memoryview(self._memory).cast("q")
        self._length = 0
        self._came_apart = ""
        self.mine = Page(place="")
        self._write(Page())

    def enter(self, state: State, what: int, place: str) -> None:
        """Say that this rank is about to send; raise if another rank of the node can never meet it there.

        Args:
            state: what it does.
            what: the set of parameters of the backward, or the kind of the message.
            place: the line of the script.

        Raises:
            LockstepError: with the places of all ranks of the node.
        """
        if self._came_apart:
            self._refuse_to_go_on()
        backwards, _, _, controls, _, sets = self.mine
        if state == BACKWARD:
            backwards, sets = backwards + 1, (what, *sets[:-1])
        self._write(Page(backwards, state, what, controls + (state == State.CONTROL), place, sets))
        self.compare()

    @contextmanager
    def inner(self, what: int, place: str) -> Iterator[None]:
        """Inside the block, say that this rank, at ``place``, sends a control message of kind ``what`` inside of a backward.

        Raises:
            LockstepError: another rank of the node has raised, or can never meet this one there.
        """
        self._refuse_to_go_on()
        backward = self.now()
        self._write(Page(backward.backwards, State.INNER, what, backward.controls + 1, place, backward.sets))
        self.compare()
        yield
        self._write(backward._replace(controls=self.mine.controls))

    def averages(self) -> None:
        """Say that this rank's backward has reached its end.

        Raises:
            LockstepError: another rank of the node has raised, or can never meet this one there.
        """
        self._numbers[self._rank * WORDS + STATE] = AVERAGES
        self.compare()

    def compare(self) -> None:
        """Raise if another rank of the node can never meet this one where it is. After such an error, this rank enters no step.

        Raises:
            LockstepError: with the places of all ranks of the node.
        """
        numbers, (backwards, _, _, controls, _, sets), mine = self._numbers, self.mine, self.mine[:4]
        for other in self._others:  # a fast look at what another rank may send, before apart() decides
            at = other * WORDS
            state = numbers[at + STATE]
            if state == RUNS:  # it waits for nothing, but its GPU may
                further = numbers[at] - backwards
                differs = further > 0 or (further == 0 and numbers[at + SETS] != sets[0]) or numbers[at + CONTROLS] > controls
            else:  # one that waits for averages may be in the same backward, which this rank may have reached the end of as well
                differs = (numbers[at], BACKWARD if state == AVERAGES else state, numbers[at + 2], numbers[at + CONTROLS]) != mine
            if differs:
                self._compare_pages(other)

    def _compare_pages(self, other: int) -> None:
        if self._alike() and apart(self.now(), self._read(other)):
            error = self.error()
            self._came_apart = str(error)
            self.raised(error)
            raise error

    def _refuse_to_go_on(self) -> None:
        if self._came_apart and self._alike():
            raise LockstepError(
                "the script has caught the error below, but other ranks may still wait for this one there, so this rank cannot go on. "
                f"Let the error end the job. It was: {self._came_apart}"
            )

    def run(self) -> None:
        """Say that this rank has what it waited for, unless it has stopped."""
        at = self._rank * WORDS + STATE
        if RAISED != self._numbers[at] < APART:  # as _has_stopped, without a call in each step
            self._numbers[at] = RUNS

    def raised(self, error: BaseException) -> None:
        """Say that this rank takes no further step, because of ``error``."""
        state = self.now().state
        if not isinstance(error, LockstepError):
            self._set(State.RAISED)
        elif not _has_stopped(state):
            self._set(state + APART)

    def end(self, timeout: float, patience: float = 2.0) -> None:
        """Say that this rank's function has ended, and wait until all ranks of the node have.

        Raises:
            LockstepError: this rank has found before that ranks are apart; another has raised, or has run another number of backwards; a
                rank is in a step that this rank does not take, for more than ``patience`` seconds; or a rank has not ended within
                ``timeout`` seconds.
        """
        self._refuse_to_go_on()
        deadline = time.monotonic() + timeout
        self._write(self.mine._replace(state=State.ENDED))
        since: float | None = None
        while True:
            pages = {other: self._read(other) for other in self._others}
            if all(page.state == State.ENDED for page in pages.values()):
                if any(page.backwards != self.mine.backwards for page in pages.values()):
                    raise self.error()
                return
            if any(_has_stopped(page.state) for page in pages.values()):
                raise self.error()
            ahead = [page for page in pages.values() if page.backwards > self.mine.backwards or page.controls > self.mine.controls]
            if ahead and since is None:
                since = time.monotonic()
            if since is not None and time.monotonic() - since > patience:
                raise self.error()
            if time.monotonic() > deadline:
                raise self.error(f"a rank has not ended within {timeout:g} s")
            time.sleep(0.005)

    def another_raised(self) -> bool:
        """Whether another rank of the node has raised, so that it takes no further step."""
        return any(_has_stopped(self._numbers[other * WORDS + STATE]) for other in self._others)

    def has_stopped(self) -> bool:
        """Whether this rank has raised, or has found that ranks are apart."""
        return _has_stopped(self.now().state)

    def check_wait(self, since: float, what: str, patience: float = 10.0) -> None:
        """Raise if the node's first rank, for which this rank waits outside of any step, will never do what this rank waits for.

        Args:
            since: the time, by ``time.monotonic()``, since which this rank waits.
            what: what it waits for.
            patience: seconds for which the first rank may wait for this one in a step, because another thread of it may still write.

        Raises:
            LockstepError: the first rank has raised, or waits for this one.
        """
        first, mine = self._read(0), self.mine
        is_ahead = first.backwards > mine.backwards or first.controls > mine.controls
        waits = first.state in (State.BACKWARD, State.AVERAGES, State.CONTROL, State.INNER) and is_ahead
        if _has_stopped(first.state) or (waits and time.monotonic() - since > patience):
            raise self.error(f"rank {self._ranks[self._rank]} waits for {what}")

    def now(self) -> Page:
        """This rank's page with its present state."""
        return self.mine._replace(state=self._numbers[self._rank * WORDS + STATE])

    def error(self, why: str = "") -> LockstepError:
        """The error that says where all ranks of the node are, and ``why`` it is raised."""
        pages = {rank: self._read(index) for index, rank in enumerate(self._ranks)}
        done = {rank: self._begun(index, pages[rank]) for index, rank in enumerate(self._ranks)}
        pages = {rank: page._replace(place=self._place(index)) for index, (rank, page) in enumerate(pages.items())}
        lines = [f"  rank {rank} {sentence(page)}" for rank, page in pages.items()]
        return LockstepError(
            f"the ranks have come apart{f', because {why}' if why else ''}:\n" + "\n".join([*lines, *what_parted(pages, done)])
        )

    def _read(self, index: int) -> Page:
        """The page of rank number ``index`` of this node. Its place is left empty: only errors need it, from :meth:`_place`."""
        for attempt in range(ATTEMPTS):
            backwards, state, what, controls, *rest = RECORD.unpack_from(self._memory, index * SIZE)
            sets, checksum = rest[:RECENT], rest[RECENT]
            if checksum in (hash((backwards, what, controls, *sets)), 0):  # 0: nothing is written yet
                break
            time.sleep(0.001 * (attempt > 10))  # the other rank may wait for a core
        return Page(backwards, state, what, controls, "", sets)

    def _begun(self, index: int, page: Page) -> tuple[int, int]:
        """How many backwards rank number ``index`` of this node, with this ``page``, has begun in its pass, and its batches."""
        backwards, batches = RECORD.unpack_from(self._memory, index * SIZE)[-2:]
        return backwards + (batches > 0 and page.state % APART in (BACKWARD, AVERAGES, State.INNER)), batches

    def _place(self, index: int) -> str:
        length = RECORD.unpack_from(self._memory, index * SIZE)[-3]
        return self._memory[index * SIZE + PLACE : index * SIZE + PLACE + length].decode(errors="replace")

    def add_to_place(self, words: str) -> None:
        """Add ``words`` to what other ranks read as the place of this rank's last step."""
        self._write(self.mine._replace(place=self.mine.place + words))

    def _set(self, state: int) -> None:
        self._numbers[self._rank * WORDS + STATE] = state  # a single word is always whole

    def _write(self, page: Page) -> None:
        at = self._rank * SIZE
        backwards, state, what, controls, place, sets = page
        if place != self.mine.place:
            text = place.encode()[: SIZE - PLACE]
            self._length = len(text)
            self._memory[at + PLACE : at + PLACE + len(text)] = text
        checksum = hash((backwards, what, controls, *sets))
        # at once: pack_into would write zeros first
        self._memory[at : at + PLACE] = RECORD.pack(backwards, state, what, controls, *sets, checksum, self._length, *self.done)
        self.mine = page

    def close(self) -> None:
        """Unmap the pages and remove their file. Every rank has mapped it by now."""
        self._numbers.release()
        self._memory.close()
        with suppress(PermissionError):  # Windows removes no file that another rank has mapped; the folder is removed later
            self._path.unlink(missing_ok=True)
