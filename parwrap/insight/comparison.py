"""Compares what two runs have recorded, step by step. Where they differ, it finds reasons and lists those with the best evidence first."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from parwrap.checks.same_work import WHOLE_WORK
from parwrap.errors import counted
from parwrap.insight.printed import PrintedLines, compared_lines
from parwrap.insight.recording import Recorded, Step, stride

__all__ = ["Comparison", "Difference", "compared", "compared_with_ddp", "with_prints"]

TOLERANCE = 1e-5
"""The largest difference that counts as rounding after one step, as a fraction of the tensor's largest value, or of 1 if that is larger."""

TOLERANCE_OF_HALF = 1e-3
"""The same in half precision: products are rounded to 8 or 11 bits, in another order."""

NOISE, NOISE_OF_HALF = 1e-6, 2**-8
"""A gradient below the first fraction of the largest one is only rounding; in half precision, below the second. An optimizer that divides
by the size of a gradient, such as Adam, turns such rounding into a whole step."""

_Apart = tuple[float, str, float, float]
"""A difference: its size, its place and both values."""

NEAR, NEAR_OF_HALF = 1e-3, 2e-2
"""Gradients of two runs are in proportion if one differs from a multiple of the other by less than the first fraction of its norm; in half
precision, the second."""


@dataclass
class Difference:
    """Where two runs differ first.

    Attributes:
        step: the number of the step, from 1.
        place: the line that steps; empty if one run ends before the other.
        what: the parameter and the index of the value in it, or what else differs.
        one: the value in the first run.
        several: the value with parwrap.
        reasons: what may be the cause, the likeliest first.
    """

    step: int
    place: str
    what: str
    one: float | str
    several: float | str
    reasons: list[str]


@dataclass
class Comparison:
    """How two runs compare.

    Attributes:
        ranks: the number of ranks of the second run.
        reference: what the first run was: ``"one process"``, or ``"DDP by hand"``.
        steps: the number of equal steps at the beginning.
        largest: the largest difference in these steps, divided by the largest value of its parameter, or by 1 if that is larger.
        name: the parameter with this difference.
        left_out: how many values are not compared, because their gradients are only rounding errors.
        no_numbers: how many values are nan or infinite in both runs after the last step that is equal.
        difference: where the weights differ first; ``None`` if they are equal.
        mode: which batches the second run has trained on: those of one process, divided (``"--batch global"``), or each rank's own
            (``"--batch per_rank"``).
        printed: how what rank 0 prints compares; ``None`` if that was not compared, because weights differ or DDP by hand is the reference.
        last_step: the step up to which printed lines were compared.
        tolerance: the largest difference that counts as rounding after the first step.
        by_step: the largest difference after each step, also after the first that differs; ``None`` where a value is nan or infinite in
            one run alone.
    """

    ranks: int
    reference: str = "one process"
    steps: int = 0
    largest: float = 0.0
    name: str = ""
    left_out: int = 0
    no_numbers: int = 0
    difference: Difference | None = None
    mode: str = "--batch global"
    printed: PrintedLines | None = None
    last_step: int = 0
    tolerance: float = 0.0
    by_step: list[float | None] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether no difference was found, neither in weights nor in what is printed."""
        return self.difference is None and (self.printed is None or self.printed.difference is None)

    def __str__(self) -> str:
        first, where, reference = self.difference, f"on {counted(self.ranks, 'rank')}", self.reference
        if first is None:
            weights = "" if self.equal else "weights are "
            equal = f"{weights}equal to {reference} after {counted(self.steps, 'step')} {where}"
            left_out = f"; left out, because gradients are only rounding errors: {counted(self.left_out, 'value')}" if self.left_out else ""
            no_numbers = f"; {self.no_numbers} values are nan or infinite in both" if self.no_numbers else ""
            return f"{equal}: largest difference {self.largest:.1g} ({self.name}){left_out}{no_numbers}{self._of_printed()}"
        at = f"step {first.step}" + (f" ({first.place})" if first.place else "")
        digits = 6 if _shown(first.one, 6) != _shown(first.several, 6) else 9  # with 9 digits, unlike numbers of float32 differ
        one, several = _shown(first.one, digits), _shown(first.several, digits)
        values = f"{first.what} is {one} with {reference} and {several} with parwrap"
        return "\n".join(
            [f"differs from {reference} at {at} {where}: {values}", *_numbered(first.reasons), f"compared: weights, {self.mode}"]
        )

    def _of_printed(self) -> str:
        """What was compared, and what is printed differently, in words."""
        lines = self.printed
        if lines is None:
            return f"\ncompared: weights after each step, {self.mode}; not what is printed"
        others = f", {counted(lines.other_text, 'line')} with other text left out" if lines.other_text else ""
        numbers = f"numbers in {counted(lines.lines, 'printed line')}" if lines.lines else "no numbers are printed"
        said = [f"compared, {self.mode}: weights after each step; {numbers} up to step {self.last_step}{others}"]
        if (first := lines.difference) is not None:
            of = f"{lines.differing} of {counted(lines.lines, 'line')}"
            said += [f"rank 0 prints other numbers than one process in {of}, first: {first}", *_numbered(first.reasons)]
        return "\n" + "\n".join(said)


def _numbered(reasons: Sequence[str]) -> list[str]:
    return [f"  {number}. {each}" for number, each in enumerate(reasons, 1)]


def _shown(value: float | str, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def compared_with_ddp(by_hand: Recorded, parwraps: Recorded, ranks: int, said: str, tolerance: float = 0.0) -> Comparison:
    """Compare ``by_hand``, a run with torch's DDP, with ``parwraps``, as :func:`compared` does, by default with a ``tolerance`` of 0."""
    result = compared(by_hand, parwraps, ranks, said=said, tolerance=tolerance)
    result.reference, result.mode = "DDP by hand", "--batch per_rank"
    if result.difference and not parwraps.failed:
        result.difference.reasons = [OUTSIDE]
    return result


def compared(
    one: Recorded,
    several: Recorded,
    ranks: int,
    *,
    synchronized: bool = True,
    said: str = "",
    tolerance: float | None = None,
    dropout: bool = True,
) -> Comparison:
    """Compare a run on one process with a run on several ranks.

    Args:
        one: what the run on one process has recorded.
        several: what the run on several ranks has recorded.
        ranks: the number of ranks.
        synchronized: whether batch norms are synchronized on several ranks.
        said: what the run on several ranks has printed.
        tolerance: the largest difference that counts as rounding after the first step, as a fraction of a tensor's largest value, or of 1
            if that is larger. By default :data:`TOLERANCE`, or :data:`TOLERANCE_OF_HALF` if a run has computed in half precision. A
            gradient may differ by 100 times this fraction of its norm, plus a tenth of this fraction of the largest norm so far. Each
            further step adds as much.
        dropout: whether dropout was on.
    """
    result, half = Comparison(ranks), one.half or several.half
    if tolerance is None:
        tolerance = TOLERANCE_OF_HALF if half else TOLERANCE
    result.tolerance = tolerance
    noise = NOISE_OF_HALF if half and tolerance else NOISE
    seen: defaultdict[int, _Seen] = defaultdict(_Seen)
    for number, (left, right) in enumerate(zip(one.steps, several.steps, strict=False), 1):
        if result.difference is not None:
            if _alike_parts(left, right):
                _note_apart(result, _after(left, right, seen[left.number], noise))
            continue
        found = _first_difference(left, right, number, seen[left.number], result, number * tolerance, noise)
        if found is not None:
            what, values, reasons = found
            if not reasons:
                augmented = any(step.draws_reading for run in (one, several) for step in run.steps)
                reasons = _reasons(left, right, ranks, several.batch_norms and not synchronized, augmented, half, said, dropout)
            result.difference = Difference(number, left.place, what, *values, reasons)
            continue
        result.steps = number
        result.left_out = sum(int(each.sum()) for each_seen in seen.values() for each in each_seen.noise)
    if result.difference is not None:
        return result
    steps = len(one.steps), len(several.steps)
    result.last_step = one.end[0] if one.end else steps[0]
    if several.failed:
        if steps[0] == steps[1]:
            steps = result.last_step, several.end[0] if several.end else steps[1]
        ends = f"after {counted(steps[0], 'step')}", f"after {counted(steps[1], 'step')} with an error"
        result.difference = Difference(steps[1] + (steps[0] > steps[1]), "", "the end", *ends, [_error_in(said)])
    elif steps[0] != steps[1]:
        result.difference = Difference(min(steps) + 1, "", "the number of steps", *steps, [OTHER_STEPS])
    return result


def with_prints(result: Comparison, one: Recorded, several: Recorded, again: Callable[[], Recorded], tolerance: float | None) -> None:
    """Compare what two runs with equal weights have printed, and note it in ``result``.

    Where they differ, ``again`` runs the script on one process a second time: what differs between these two is not compared.
    """
    if result.difference is not None or result.mode == "--batch per_rank":
        return
    allowed = (tolerance or (TOLERANCE_OF_HALF if one.half or several.half else TOLERANCE)) * max(result.last_step, 1)
    result.printed = compared_lines(one.printed, several.printed, result.ranks, allowed)
    if result.printed.difference is not None:
        result.printed = compared_lines(one.printed, several.printed, result.ranks, allowed, again().printed)


@dataclass
class _Seen:
    """What the steps of an optimizer have shown so far.

    Attributes:
        noise: for each parameter, which values are left out, because their gradients are only rounding errors.
        largest: the largest norm of a gradient.
    """

    noise: list[torch.Tensor] = field(default_factory=list)
    largest: float = 0.0


def _first_difference(
    one: Step, several: Step, number: int, seen: _Seen, result: Comparison, tolerance: float, noise: float
) -> tuple[str, tuple[float | str, float | str], list[str]] | None:
    """What differs first in a step, the two values, and the reasons if no others are possible; otherwise no reasons.

    If nothing differs, return ``None``, and note the largest difference in ``result``. Note in ``seen`` what the step shows.
    """
    if not _alike_parts(one, several):
        steps = (f"{each.optimizer} of {counted(len(each.sizes), 'parameter')}" for each in (one, several))
        return "the optimizer that steps", (next(steps), next(steps)), [OTHER_STEPS]
    found = _largest(one, one.before, several.before)
    if found and found[0] > tolerance:
        _note_apart(result, found)
        return f"{found[1]} before the first step", found[2:], [OTHER_START if number == 1 else OTHER_START_LATER]
    found = _after(one, several, seen, noise)
    _note_apart(result, found)
    if found and found[0] > tolerance:
        return found[1], found[2:], []
    if (grads := _other_gradient(one, several, seen, tolerance, noise)) is not None:
        return grads[0], grads[1:], []
    if found and found[0] >= result.largest:
        result.largest, result.name = found[0], found[1].partition("[")[0]
    result.no_numbers = sum(int((~each.isfinite()).sum()) for each in one.after)
    return None


def _alike_parts(one: Step, several: Step) -> bool:
    """Whether the same optimizer steps, with parameters of the same sizes."""
    return (one.number, one.optimizer, one.sizes) == (several.number, several.optimizer, several.sizes)


def _after(one: Step, several: Step, seen: _Seen, noise: float) -> _Apart | None:
    """The largest difference after a step, as :func:`_largest`, without values whose gradients are only rounding errors."""
    seen.noise += [torch.zeros(len(each), dtype=torch.bool) for each in one.after[len(seen.noise) :]]
    _note_noise(seen.noise, one, several, noise)
    return _largest(one, one.after, several.after, seen.noise)


def _note_apart(result: Comparison, found: _Apart | None) -> None:
    size = found[0] if found else 0.0
    result.by_step.append(size if math.isfinite(size) else None)


OTHER_STEPS = (
    "the runs take different branches: a number that was computed from a share, such as a count of correct samples, decides. Add it up "
    "first, `parwrap.reduce_sum(correct)`, or read a loss after its backward"
)
OTHER_START = (
    "the weights differ before anything is trained: they are drawn from a generator that the script seeds by the time, the process or the "
    "rank, or that it does not seed. Seed it alike on all ranks, or draw from torch, numpy or random"
)
OUTSIDE = (
    "DDP averages what goes through the forward of the module that it wraps, once for each forward, and leaves the loss this rank's: a "
    "method other than forward, several backwards for a forward, or a decision on the loss give other numbers"
)
OTHER_START_LATER = (
    "the weights of an optimizer differ before its first step: they were made of a share, such as features of a training pass, or drawn in "
    "one. Gather the share first, `torch.cat(parwrap.gather(features))`, or draw inside `with parwrap.same_draws():`"
)


def _error_in(said: str) -> str:
    """The text of the last error in ``said``, which a run has printed, without its traceback."""
    lines = said.splitlines()
    begins = [number for number, line in enumerate(lines) if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    text = lines[begins[-1] :] if begins else lines[-3:]
    return "\n     ".join([text[0].removeprefix("parwrap.errors.").removesuffix("."), *text[1:6]]) if text else "it said nothing"


def _largest(
    step: Step, one: Sequence[torch.Tensor], several: Sequence[torch.Tensor], left_out: Sequence[torch.Tensor] = ()
) -> _Apart | None:
    """The largest difference, relative to the largest value of its parameter or to 1 if that is larger: its size, place and both values."""
    best: _Apart | None = None
    for number, (a, b) in enumerate(zip(one, several, strict=True)):
        apart = (a.double() - b.double()).abs()
        apart[torch.isnan(a) & torch.isnan(b) | (a == b)] = 0.0
        apart = apart.nan_to_num(math.inf, math.inf)
        if left_out:
            apart[left_out[number]] = 0.0
        if not apart.numel():
            continue
        at = int(apart.argmax())
        size = float(apart[at]) / max(1.0, float(a.abs().nan_to_num(0, 0, 0).max()))
        if best is None or size > best[0]:
            name = step.names[number]
            best = size, f"{name}[{at * stride(step.sizes[number])}]" if a.numel() > 1 else name, float(a[at]), float(b[at])
    return best


def _other_gradient(one: Step, several: Step, seen: _Seen, tolerance: float, noise: float) -> tuple[str, float, float] | None:
    """The first gradient that differs by more than rounding, and both norms. At small learning rates, weights differ only later.

    A difference of up to 100 times ``tolerance`` times the norm, plus a tenth of ``tolerance`` times the largest norm so far, is rounding:
    late in training, gradients are small sums of large numbers.
    """
    norms = [0.0 if grad is None else float(grad.double().norm()) for grad in one.grads]
    seen.largest = max(seen.largest, *(norm for norm in norms if math.isfinite(norm)), 0.0)
    for name, a, b, norm in zip(one.names, one.grads, several.grads, norms, strict=True):
        if a is None or b is None or norm <= noise * max(norms) * len(a) ** 0.5 or not math.isfinite(norm):
            continue
        if float((a.double() - b.double()).norm()) > 100 * tolerance * norm + tolerance / 10 * seen.largest:
            return f"the norm of the gradient of {name}", norm, float(b.double().norm())
    return None


def _note_noise(left_out: list[torch.Tensor], one: Step, several: Step, noise: float) -> None:
    """Mark values in ``left_out`` whose gradients are only rounding errors in both runs, and not 0 in both: Adam turns them into steps."""
    largest = max((float(each.abs().max()) for each in one.grads if each is not None and each.numel()), default=0.0)
    for out, a, b in zip(left_out, one.grads, several.grads, strict=True):
        if a is not None and b is not None and a.shape == b.shape == out.shape:
            small = (a.abs() < noise * largest) & (b.abs() < noise * largest)
            out |= small & ((a != 0) | (b != 0))


def _reasons(
    one: Step, several: Step, ranks: int, own_statistics: bool, augmented: bool, half: bool, said: str, dropout: bool
) -> list[str]:
    """Why a step differs: first reasons that the records show, then reasons that they do not exclude.

    Args:
        one: the step on one process.
        several: the step on several ranks.
        ranks: the number of ranks.
        own_statistics: whether batch norms use the statistics of each rank's part.
        augmented: whether reading samples draws random numbers.
        half: whether a run has computed in half precision.
        said: what the run on several ranks has printed.
        dropout: whether dropout was on.
    """
    reasons, on_ranks = [], f"on {counted(ranks, 'rank')}"
    for mine, theirs in zip(one.options, several.options, strict=False):
        for name in sorted(mine.keys() & theirs.keys()):
            if mine[name] != theirs[name]:
                reasons.append(
                    f"{name} of {one.optimizer} is {mine[name]} on one process and {theirs[name]} {on_ranks}: a number that was computed "
                    "from a share decided it. Add it up first, `parwrap.reduce_sum(correct)`, or use a loss after its backward"
                )
    if WHOLE_WORK in said or (several.samples == ranks * one.samples > 0 and _alike([ranks * each for each in one.data], several.data)):
        reasons.append("all ranks do the same work, because no loader is read in shares: `parwrap.shard(loader)`, or --draws per_rank")
    elif (one.passes, one.read - one.batches) != (several.passes, several.read - several.batches):
        reasons.append(OTHER_STEPS)
    elif one.batches != several.batches:
        reasons.append(
            f"the step follows {counted(one.batches, 'batch')} on one process and {several.batches} {on_ranks}: a loss scale has skipped "
            "other steps, because float16 overflows elsewhere in parts of a batch, or a number that was computed from a share decides"
        )
    elif several.samples == ranks * one.samples:
        reasons.append(
            f"the step trains on {one.samples} samples on one process and on {several.samples} {on_ranks}: a decorator in the script says "
            'batch="per_rank". Leave that out, or compare with DDP: --against ddp'
        )
    elif one.samples != several.samples:
        reasons.append(
            f"the step trains on {one.samples} samples on one process and on {several.samples} {on_ranks}: the batch does not divide. "
            "--uneven join uses each sample once; or choose a batch size that the number of ranks divides"
        )
    elif not _alike(one.data, several.data):
        reasons.append(
            "samples are drawn at random while they are read (augmentation), by each rank for itself: this differs by design"
            if augmented
            else "the ranks read other samples than one process: workers augment them, which differs by design, or their order is drawn "
            "from a generator of the script's that is not seeded alike"
        )
    near = NEAR_OF_HALF if half else NEAR
    factor = _factor(one, several, near)
    if factor is not None and math.isclose(factor, 1 / ranks, rel_tol=near):
        reasons.append(f"every gradient is 1/{ranks} of that of one process: the loss is a sum over the samples. --loss sum adds them up")
    elif factor is not None and not math.isclose(factor, 1, rel_tol=near):
        reasons.append(
            f"every gradient is {factor:.4g} times that of one process: the loss is divided by a number other than that of its samples. "
            "Divide by the number over all ranks, `parwrap.mean_over_ranks(sum, count)`"
        )
    if one.draws_training or several.draws_training:
        drawn, remedy = ("dropout, noise", ". --no-dropout turns dropout off in both runs") if dropout else ("noise, random negatives", "")
        reasons.append(f"the batch trains with random numbers ({drawn}), which each rank draws for itself: this differs by design{remedy}")
    if own_statistics:
        reasons.append("batch norms use the statistics of each rank's part: --sync-bn synchronizes them")
    if not reasons and factor is not None:
        reasons.append("the gradients agree, and the optimizer enlarges their rounding: --tolerance allows larger differences")
    if not reasons and half:
        reasons.append(
            "half precision rounds sums over other parts of a batch in another way, which adds up over the steps: if the script is equal "
            "in float32, nothing else is wrong, and --tolerance allows larger differences"
        )
    return reasons or [
        "the loss is not a mean over samples: it is divided by a number of the rank's part (a masked mean: "
        "`parwrap.mean_over_ranks(sum, count)`), or it compares the samples of a batch (in-batch negatives: `parwrap.gather_with_grad`) or "
        "lets them decide together"
    ]


def _alike(one: Sequence[float], several: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in zip(one, several, strict=True))


def _factor(one: Step, several: Step, near: float) -> float | None:
    """The number by which all gradients on one process are multiplied on several ranks; ``None`` if they are not in proportion."""
    pairs = [(a.double(), b.double()) for a, b in zip(one.grads, several.grads, strict=True) if a is not None and b is not None]
    a, b = (torch.cat([pair[at] for pair in pairs]) if pairs else torch.zeros(0) for at in (0, 1))
    norm = float(a.norm())
    if not norm or not math.isfinite(norm):
        return None
    factor = float(a @ b) / norm**2
    return factor if float((b - factor * a).norm()) < near * float(b.norm()) else None
