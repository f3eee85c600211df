"""The means over ranks of weights that each has trained separately, in few collectives.

Ranks that average together usually have trained the same parameters; this is checked, and then all of them are sent in one go. If a rank
has left the common path, the ranks first exchange what they have. The caller decides when to average.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch

from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop

__all__ = ["AVERAGED", "Averaging"]

AVERAGED = "weights to be averaged"

LEAST = 1e-9
"""The weight of a rank that has seen no sample: enough to divide by, if no other rank has."""

Number = tuple[int, int]
Kinds = dict[Number, tuple[tuple[int, ...], torch.dtype]]
"""The shape and the dtype of each parameter."""


class Averaging:
    """Averages over the ranks of ``group``.

    Args:
        group: the ranks.
        loop: the loop state, which numbers the parameters.
        answered: called if the others have averaged while this rank waits for something else: with the means, and whether it has run as
            many backwards as they.

    Attributes:
        others_backwards: the number of backwards of others whose result this rank has copied.
    """

    def __init__(self, group: Group, loop: Loop, answered: Callable[[dict[Number, torch.Tensor], bool], None]) -> None:
        self._group, self._loop, self._answered = group, loop, answered
        self.others_backwards = 0
        group.coordinator.answer(AVERAGED, lambda detail, present: self._answer(present))

    @property
    def backwards(self) -> int:
        """The number of backwards behind this rank's state."""
        return self._loop.backwards + self.others_backwards

    def means(self, trained: Mapping[Number, float], present: Sequence[int]) -> dict[Number, torch.Tensor]:
        """The means of all parameters that a rank has trained, in single precision or better.

        Args:
            trained: this rank's trained parameters, with its weight for each.
            present: the ranks that average; all of them call this.
        """
        parameters = self._loop.once_owned()
        mine: Kinds = {number: (tuple(p.shape), p.dtype) for number in sorted(trained) if (p := parameters.get(number)) is not None}
        everybodys = len(present) == self._group.world.size and self._same(mine)
        kinds = mine if everybodys else self._union(mine, present)[0]
        return self._means(kinds, {number: max(weight, LEAST) for number, weight in trained.items()})

    def _answer(self, present: Sequence[int]) -> None:
        kinds, backwards = self._union(None, present)
        if kinds:
            self._answered(self._means(kinds, {}), self.backwards >= backwards)

    def _same(self, mine: Kinds) -> bool:
        """Whether all ranks have trained the same parameters; sums of halves of a checksum and of their squares are exact."""
        halves = divmod(zlib.crc32(repr(mine).encode()), 1 << 16)
        gathered = torch.tensor([*halves, *(half**2 for half in halves)], dtype=torch.float64)
        sums = [int(each) for each in all_reduced([gathered], self._group)[0].tolist()]
        return all(total**2 == squares * self._group.world.size for total, squares in zip(sums[:2], sums[2:], strict=True))

    def _union(self, mine: Kinds | None, present: Sequence[int]) -> tuple[Kinds, int]:
        """The parameters that any present rank has trained, in the same order on all ranks, and the most backwards that one has run."""
        gathered = self._group.share(AVERAGED, (mine or {}, self.backwards), present).values()
        kinds = {number: kind for each, _ in gathered for number, kind in each.items()}
        return dict(sorted(kinds.items())), max(backwards for _, backwards in gathered)

    def _means(self, kinds: Kinds, weights: Mapping[Number, float]) -> dict[Number, torch.Tensor]:
        if not kinds:
            return {}
        parameters, counts, leaves = self._loop.once_owned(), [], []
        for number, (shape, dtype) in kinds.items():
            p, wide = parameters.get(number), torch.promote_types(dtype, torch.float32)
            counts.append(weights.get(number, 0.0) if p is not None and tuple(p.shape) == shape else 0.0)
            if p is None or not counts[-1]:
                leaves.append(torch.zeros(shape, dtype=wide, device=self._group.device))
            else:
                leaves.append(p.detach().to(wide) * counts[-1] if counts[-1] != 1.0 else p.detach().to(wide))
        *sums, totals = all_reduced([*leaves, torch.tensor(counts, dtype=torch.float32)], self._group)
        return {number: total / count for number, total, count in zip(kinds, sums, totals.tolist(), strict=True)}
