"""The check that all ranks hold the same weights: a checksum of every parameter that trains and of the optimizers' hyperparameters.

It finds every way in which ranks go apart: gradients that no backward averaged, a step on one rank alone, noise on weights, a learning
rate that one rank decided. It runs after steps 1, 2, 3, then at ever longer distances up to 100 steps, likewise when passes begin, and at
the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from parwrap.errors import RankMismatchError, counted, shortened
from parwrap.loop.modules import Modules, has_values
from parwrap.loop.optimizers import Optimizers, parameters_of
from parwrap.loop.passes import Passes
from parwrap.places import Place, script_place, warn
from parwrap.ranks.agreement import agree
from parwrap.ranks.collectives import by_kind
from parwrap.ranks.device import processor, to_host
from parwrap.ranks.group import Group
from parwrap.ranks.structures import mapped

__all__ = ["Differ", "SameWeights", "checksums", "is_due", "take_rank_zeros"]

LONGEST = 100
"""Steps between two checks in the long run."""

PIECE = 2**24
"""How many bytes are summed at a time: a check needs about twice as many beside the weights."""

ROW, ALIGNED = 32, 8 * 32
"""The words of 8 bytes in a row, which has one sum, and its bytes. Each tensor begins a row."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def is_due(step: int) -> bool:
    """Whether to check after that many steps of the script's optimizers, or when that many training passes have begun.

    >>> [step for step in range(1, 301) if is_due(step)]
    [1, 2, 3, 4, 8, 16, 32, 64, 100, 200, 300]
    """
    return step <= 3 or step % LONGEST == 0 or (step < LONGEST and step & (step - 1) == 0)


@torch.no_grad()
def checksums(tensors: Iterable[torch.Tensor], numbers: Iterable[int] | None = None) -> torch.Tensor:
    """A checksum of the bits of each tensor and of their order.

    Args:
        tensors: dense or sparse tensors of any shape, dtype and device.
        numbers: for each tensor, the number that stands for its place; by default they are counted.

    Returns:
        An int64 tensor of shape ``(number of tensors,)``, on the device of the first.

    >>> a, b = torch.ones(2), torch.zeros(2)
    >>> torch.equal(checksums([a, b]), checksums([a, b.clone()])), torch.equal(checksums([a, b]), checksums([b, a]))
    (True, False)
    """
    given = [each.detach().coalesce().values() if each.is_sparse else each.detach() for each in tensors]
    places = [*range(len(given))] if numbers is None else list(itertools.islice(numbers, len(given)))
    sums = torch.zeros(len(given), dtype=torch.int64, device=given[0].device if given else None)
    for (device, size), members in by_kind(enumerate(given), lambda each: (each[1].device, each[1].element_size())).items():
        of_group = torch.zeros_like(sums, device=device)
        for piece in _pieces(members, PIECE // min(size, 8)):
            _add_sums(piece, of_group)
        sums += of_group.to(sums.device)
    return sums.mul_(_sent([2 * place + 1 for place in places], sums.device))


def _pieces(members: Iterable[tuple[int, torch.Tensor]], most: int) -> Iterator[list[tuple[int, int, torch.Tensor]]]:
    """Parts of tensors as integers, in pieces of at most ``most``: the number of the tensor, that of its first row here, and the part."""
    piece: list[tuple[int, int, torch.Tensor]] = []
    room = most
    for place, dense in members:
        begins = 0
        for part in _parts(dense, most):
            in_row = ALIGNED // part.element_size()
            rows = -(-part.numel() // in_row)
            if rows * in_row > room:
                yield piece
                piece, room = [], most
            piece.append((place, begins, part))
            begins, room = begins + rows, room - rows * in_row
    if piece:
        yield piece


def _parts(dense: torch.Tensor, most: int) -> Iterable[torch.Tensor]:
    """``dense`` as flat integers, in parts of at most ``most``."""
    bits = BITS[dense.element_size()]
    if dense.is_contiguous():
        flat = dense.view(-1).view(bits)
        return flat.split(most) if flat.numel() > most else (flat,)
    rows = dense.split(max(1, most // dense[0].numel()))  # a copy of all of it would need as much memory
    return (part for each in rows for part in each.reshape(-1).view(bits).split(most))


def _add_sums(piece: Sequence[tuple[int, int, torch.Tensor]], sums: torch.Tensor) -> None:
    """Add to ``sums`` those of the parts in ``piece``. How many operators this takes does not depend on the number of parts.

    Each word of 8 bytes counts by an odd factor for its place. Two changes of the highest bit, a sign, cancel in any sum of 64 bits, so
    high bits change low ones first.
    """
    parts = [part for *_, part in piece]
    in_row = ALIGNED // parts[0].element_size()
    zeros = parts[0].new_zeros(in_row)
    lacking = [-part.numel() % in_row for part in parts]
    fill = {length: zeros[:length] for length in lacking}
    filled = torch.cat([each for part, length in zip(parts, lacking, strict=True) for each in (part, fill[length])])
    halves = filled.view(torch.int32).view(-1, 2)
    halves[:, 0].bitwise_xor_(halves[:, 1] >> 15)
    words = filled.view(torch.int64).view(-1, ROW)
    words.mul_(_factors(torch.arange(ROW, device=sums.device)))
    rows = [-(-part.numel() // in_row) for part in parts]
    starts = [begins - end + count for (_, begins, _), count, end in zip(piece, rows, itertools.accumulate(rows), strict=True)]
    known = _sent([[place for place, *_ in piece], starts, rows], sums.device)
    place, start = known[:2].repeat_interleave(known[2], dim=1, output_size=len(words))
    numbers = start + torch.arange(len(words), device=sums.device)
    sums.index_add_(0, place, words.sum(1).mul_(_factors(numbers + ROW)))


def _factors(numbers: torch.Tensor) -> torch.Tensor:
    """For each number an odd factor of 64 bits, as splitmix64 mixes them: no simple pattern of changes cancels."""
    mixed = numbers * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 27)) | 1


def _sent(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """``numbers`` on ``device``, without a wait for it."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type != "cpu").to(device, non_blocking=True)


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers and strings among the options of each group of parameters. Tensors on a GPU are left out, to not wait for it."""

    def shown(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist() if value.device.type == "cpu" else None
        return value if isinstance(value, (int, float, str)) else None

    groups = [sorted((name, mapped(value, shown)) for name, value in group.items() if name != "params") for group in optimizer.param_groups]
    return [{name: value for name, value in group if value is not None} for group in groups]


def _first_option(first: list[tuple[str, dict[str, Any]]], theirs: list[tuple[str, dict[str, Any]]]) -> str:
    """Words for the first option that differs. Each group of parameters has the name of its optimizer's class, and its options.

    >>> _first_option([("SGD", {"lr": 0.1})], [("SGD", {"lr": 0.2})]), _first_option([("SGD", {})], [("Adam", {})])
    ('lr of SGD is 0.1 and 0.2', 'one has a group of SGD where the other has one of Adam')
    """
    for (name, mine), (other, options) in zip(first, theirs, strict=False):
        if name != other:
            return f"one has a group of {name} where the other has one of {other}"
        for option in {**mine, **options}:
            values = [shortened(repr(each[option]), 40) if option in each else "not set" for each in (mine, options)]
            if repr(mine.get(option)) != repr(options.get(option)):
                return f"{option} of {name} is {values[0]} and {values[1]}"
    return f"one has {counted(len(first), 'group')} of parameters, the other {len(theirs)}"


class SameWeights:
    """Compares the weights of the ranks now and then.

    Args:
        group: the process group.
        passes: the passes over loaders.
        optimizers: the optimizers of the script.
        modules: the modules of the script: weights may change without an optimizer.

    Attributes:
        owned_only: whether only optimizers' parameters are compared. Parameters that follow them, such as a moving average, may differ.
        leaves_out: a function that returns whether each rank has only a part of a parameter, so that there is nothing to compare.
        due_at: the line of a step after which weights are due to be compared, before the next backward; ``None`` if they are not.
    """

    def __init__(self, group: Group, passes: Passes, optimizers: Optimizers, modules: Modules) -> None:
        self._group, self._passes, self._optimizers, self._modules = group, passes, optimizers, modules
        self.owned_only = False
        self.leaves_out: Callable[[torch.Tensor], bool] = lambda parameter: False
        self.due_at: Place | None = None
        self._checked: tuple[int, int] | None = (0, 0)
        self._begun = 0
        self._said = False
        self._due = 1  # the number of steps after which to check next
        self._unchecked: dict[Optimizer, None] = {}  # kept alive: the last steps are compared after the function has dropped them
        self._on_the_way: tuple[_Check, torch.Event] | None = None

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped together with other ranks, and compare the weights if that is due; see :func:`is_due`."""
        self._unchecked[optimizer] = None
        if self._optimizers.steps >= self._due:
            self._due = next(step for step in itertools.count(self._optimizers.steps + 1) if is_due(step))
            self.due_at = script_place()
            if len(self._optimizers.all()) == 1:  # several may step in another order on another rank, as in a set
                self.check(early=True)

    def note(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped: the next check compares its parameters and hyperparameters."""
        self._unchecked[optimizer] = None

    def begins_pass(self) -> None:
        """Count a training pass that begins, and compare the weights if :func:`is_due` is true for it.

        The script may have changed them without a step.
        """
        self._begun += 1
        if is_due(self._begun):
            self.check("the check of weights as a training pass begins")

    def end(self) -> None:
        """Compare the weights a last time: they may have changed since the last step, as where a script loads the best ones."""
        if self._optimizers.trained or self._passes.batches:
            self._checked = None
            self.check("the last check of weights")
            if self._on_the_way is not None:  # a GPU's last check is compared by the next one
                self._checked = None
                self.check("the last check of weights")

    def check(self, kind: str = "the check of weights", early: bool = False) -> None:
        """Compare the weights, if the script has trained or drawn a batch since the last check; ``kind`` names the message in errors.

        An ``early`` check, between steps, is put off where other optimizers have stepped on other ranks.

        On a GPU, this compares the weights as they were at the check before, to not wait for the GPU. If processors of different kinds
        have rounded differently, write rank 0's weights on all ranks.

        Raises:
            RankMismatchError: the weights differ, or the options of optimizers, or which parameters are frozen.
        """
        clock = self._optimizers.trained, self._passes.batches
        if self._checked == clock:
            return
        self._checked = clock
        now = self._taken(early)
        self.due_at = None
        if not now.sums.is_cpu:
            before, (whole, event) = self._on_the_way, to_host(now.whole)
            self._on_the_way = now._replace(whole=whole), event
            if before is None:
                return
            now = before[0]
            before[1].synchronize()
        self._compare(kind, now)

    def _taken(self, early: bool) -> _Check:
        """What to compare of the weights as they are now."""
        optimizers, self._unchecked = [*self._unchecked], {}
        optimizers.sort(key=lambda each: min(self._modules.numbers_of(parameters_of(each)), default=0))
        owned = [p for optimizer in optimizers for p in parameters_of(optimizer) if has_values(p) and not self.leaves_out(p)]
        owned = self._modules.in_order(owned, always=True)
        ids = set(map(id, owned))
        trainable = self._modules.trainable(self.leaves_out)
        others = {} if self.owned_only else {number: p for number, p in trainable.items() if id(p) not in ids}
        parameters = [*owned, *others.values()]
        options = [(type(each).__name__, group) for each in optimizers for group in _hyperparameters(each)]
        frozen = [place for place, p in enumerate(owned) if not p.requires_grad]
        sums = checksums(parameters, [*range(len(owned)), *others])
        whole = (sums * torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)).sum() if len(sums) else sums.sum()
        steps = self._optimizers.steps
        when = (f"after step {steps}" if steps else f"after {self._passes.batches} batches") + (f" ({self.due_at})" if self.due_at else "")
        return _Check(when, owned, others, options, frozen, self._modules.frozen(), sums, whole, optimizers if early else [], self.due_at)

    def _compare(self, kind: str, check: _Check) -> None:
        def details() -> _Weights:
            sums, count = check.sums.tolist(), len(check.owned)
            others = dict(zip(check.others, sums[count:], strict=True))
            numbers = sorted(self._modules.numbers_of(check.owned))
            return _Weights(processor(self._group.device), check.options, sums[:count], others, check.frozen, check.frozen_others, numbers)

        def error(all_ranks: list[_Weights]) -> Exception | None:
            return self._error(all_ranks, check)

        digest = crc32(f"{check.options} {check.frozen}".encode()) ^ (int(check.whole) % 2**61)
        differing = agree(self._group, kind, digest, details, error)
        if differing is not None and _puts_off(check, differing):
            self._unchecked = dict.fromkeys(check.early) | self._unchecked
            self._checked, self.due_at = None, check.place
        elif differing is not None:  # by rounding, as far as checksums show
            held = set(check.others).intersection(*(each.others for each in differing))
            with self._group.control_message("the weights of unlike processors"):
                how = take_rank_zeros(self._group, [*check.owned, *(check.others[number] for number in sorted(held))])
            if how is Differ.MORE:
                raise cast(Exception, self._error([each._replace(processor="") for each in differing], check))
            if how is Differ.BY_ROUNDING and not self._said:
                self._said = True
                warn(
                    "parwrap: weights differ by rounding between ranks, because their processors round differently "
                    f"({', '.join(sorted({each.processor for each in differing}))}). Rank 0's weights are used at every check, so there is "
                    "nothing to do."
                )

    def _error(self, all_ranks: Sequence[_Weights], check: _Check) -> Exception | None:
        """The error for ranks whose options or checksums differ; a module that only some ranks still hold is no difference.

        Checksums of ranks on unlike processors may differ, because these round in other ways.
        """
        if _puts_off(check, all_ranks):
            return None
        are_alike = len({each.processor for each in all_ranks}) == 1
        when, owned, others = check.when, check.owned, check.others
        first, *rest = all_ranks
        for rank, theirs in enumerate(rest, 1):
            if len(theirs.owned) != len(first.owned):
                return RankMismatchError(
                    f"rank 0 trains {len(first.owned)} parameters {when}, but rank {rank} trains {len(theirs.owned)}. Build the same "
                    "models and optimizers on every rank."
                )
            if repr(theirs.options) != repr(first.options):
                found = _first_option(first.options, theirs.options)
                return RankMismatchError(
                    f"the options of the optimizers differ between rank 0 and rank {rank} {when}: {found}. Compute them from numbers that "
                    "are the same on all ranks: a loss after its backward, or parwrap.total(correct, of=loader)."
                )
            asks = [(owned[place], place in first.frozen) for place in sorted({*first.frozen} ^ {*theirs.frozen})]
            if not self.owned_only:
                by_first = {*first.frozen_others} & theirs.others.keys()
                frozen = by_first | ({*theirs.frozen_others} & first.others.keys())
                asks += [(p, number in by_first) for number, p in self._modules.numbered().items() if number in frozen]
            if asks:
                p, on_first = asks[0]
                where, elsewhere = (0, rank) if on_first else (rank, 0)
                return RankMismatchError(
                    f"{self._modules.name_of(p)} is frozen (requires_grad=False) on rank {where}, but not on rank {elsewhere}, {when}. "
                    "Freeze and unfreeze the same parameters on every rank. Decide by a number that all ranks share, such as the epoch or "
                    "a loss after its backward."
                )
            differ = [p for p, a, b in zip(owned, first.owned, theirs.owned, strict=True) if a != b]
            held = first.others.keys() & theirs.others.keys() & others.keys()
            differ += [others[number] for number in sorted(held) if first.others[number] != theirs.others[number]]
            if differ and are_alike and (why := self._modules.renormed(differ[0])):
                return RankMismatchError(
                    f"{self._modules.name_of(differ[0])} differs between rank 0 and rank {rank} {when}, because {why}."
                )
            if differ and are_alike:
                return RankMismatchError(
                    f"{self._modules.name_of(differ[0])} differs between rank 0 and rank {rank} {when}: a rank has changed it by numbers "
                    "that no backward averaged. Average gradients that you make by hand, `grads = parwrap.reduce_mean(grads)`, draw what "
                    "changes weights inside `with parwrap.same_draws():`, and let all ranks decide on the same numbers: a loss after its "
                    "backward, `parwrap.total(correct, of=loader)`, or `parwrap.any_rank(...)`."
                )
        return None


class _Check(NamedTuple):
    """The weights of this rank at a check.

    Attributes:
        when: words for the step.
        owned: the parameters of its optimizers.
        others: other parameters of its modules, by their numbers.
        options: as in :class:`_Weights`, and so are ``frozen`` and ``frozen_others``.
        sums: the checksums of ``owned`` and ``others``.
        whole: a checksum of these; of a GPU's, on the host.
        early: the optimizers that have stepped, of an early check.
        place: the line of the step.
    """

    when: str
    owned: list[torch.Tensor]
    others: dict[int, torch.Tensor]
    options: list[tuple[str, dict[str, Any]]]
    frozen: list[int]
    frozen_others: list[int]
    sums: torch.Tensor
    whole: torch.Tensor
    early: list[Optimizer]
    place: Place | None


class _Weights(NamedTuple):
    """What a rank says about its weights if the digests differ.

    Attributes:
        processor: what it computes on.
        options: the options of each group of its optimizers, with the name of the optimizer's class.
        owned: the checksums of their parameters, in order.
        others: the checksums of other parameters of its modules, by their numbers.
        frozen: the places in ``owned`` of the parameters that do not require grad.
        frozen_others: the numbers of its modules' parameters that do not require grad.
        numbers: the numbers of the parameters of its optimizers, sorted.
    """

    processor: str
    options: list[tuple[str, dict[str, Any]]]
    owned: list[int]
    others: dict[int, int]
    frozen: list[int]
    frozen_others: list[int]
    numbers: list[float]


def _puts_off(check: _Check, all_ranks: Sequence[_Weights]) -> bool:
    """Whether an early check has found that other optimizers have stepped on other ranks, which may step in another order."""
    return bool(check.early) and any(each.numbers != all_ranks[0].numbers for each in all_ranks)


class Differ(IntEnum):
    """How much tensors differ between ranks.

    ``BY_ROUNDING``: by at most 256 units in the last place of a float32, or 2 of a shorter type, relative to a tensor's largest value.
    """

    NOT = 0
    BY_ROUNDING = 1
    MORE = 2


@torch.no_grad()
def take_rank_zeros(group: Group, tensors: Sequence[torch.Tensor]) -> Differ:
    """Write rank 0's values into ``tensors`` on all ranks; they have the same shapes everywhere. Returns how much any rank differed."""
    how = Differ.NOT
    for each in tensors:
        sent = each.detach().clone()
        dist.broadcast(sent, 0)
        if sent.numel() and not torch.equal(each.detach(), sent):
            how = max(how, Differ.BY_ROUNDING if _differ_by_rounding(each.detach(), sent) else Differ.MORE)
        each.data.copy_(sent)
    on_any_rank = torch.tensor(int(how))
    dist.all_reduce(on_any_rank, dist.ReduceOp.MAX, group=group.control)
    return Differ(int(on_any_rank))


def _differ_by_rounding(mine: torch.Tensor, sent: torch.Tensor) -> bool:
    if not (sent.is_floating_point() or sent.is_complex()):
        return False
    rounding = max(256 * torch.finfo(torch.float32).eps, 2 * torch.finfo(sent.dtype).eps)
    largest = float(sent.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(mine, sent, rtol=0, atol=rounding * largest, equal_nan=True)
