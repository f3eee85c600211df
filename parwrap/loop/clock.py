"""How long the loop has trained and waited, and the line that says so at the end of a script."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from parwrap.errors import counted
from parwrap.places import Place
from parwrap.ranks.device import most_allocated
from parwrap.ranks.group import Group

__all__ = ["Clock", "summary"]


@dataclass
class Clock:
    """The times of this rank, in seconds of ``time.perf_counter()``, and how much it has trained on.

    Attributes:
        begin: when the first training pass began; 0 before.
        end: when the last backward ended.
        data: how long training passes have waited for their batches.
        averages: how long backwards have waited for the average gradients since the first training pass began; 0 on a GPU.
        samples: the number of samples in this rank's parts of training batches.
        epochs: how many passes of each line have trained, without those of a single batch that a loop begins for every step.
    """

    begin: float = 0.0
    end: float = 0.0
    data: float = 0.0
    averages: float = 0.0
    samples: int = 0
    epochs: Counter[Place] = field(default_factory=Counter)

    def began_pass(self) -> None:
        """Note that a training pass begins."""
        if not self.begin:
            self.begin, self.averages = time.perf_counter(), 0.0


def summary(group: Group, clock: Clock, steps: int, warned: int) -> str | None:
    """The line that rank 0 prints when a script ends, for ``steps`` optimizer steps and ``warned`` warnings of parwrap;
    ``None`` if no loader was trained on.

    All ranks call it: it sends two messages of constant size.
    """
    seconds, size = clock.end - clock.begin, group.world.size
    own = seconds if clock.begin and seconds > 0 else 1.0  # each rank's waits are a part of its own time: ranks begin at different times
    waited = round(clock.averages * 1e6)
    # the sum over ranks, and the largest: the rank that waits least is the one that the others wait for
    sums = torch.tensor([float(clock.samples), clock.averages / own], dtype=torch.float64)
    largest = torch.tensor([float(_peak_memory(group)), clock.data / own, -float(waited * size + group.world.rank)], dtype=torch.float64)
    with group.control_message("the summary"):
        dist.all_reduce(sums, group=group.control)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.control)
    if not clock.begin or seconds <= 0:
        return None
    samples, averages = sums.tolist()
    memory, data, least = largest.tolist()
    epochs = max(clock.epochs.values(), default=0)
    waits = [f"data {data:.0%}"]
    if averages:
        waits.append(f"other ranks {averages / size:.0%} (most for rank {int(-least) % size})")
    work = counted(steps, "step") + (f", {epochs} epoch{'s' * (epochs > 1)}" if epochs else "")
    return (
        f"{work} in {seconds:.3g} s, {samples / seconds:,.0f} samples/s on {size} ranks; waiting: {', '.join(waits)}; "
        f"peak memory {memory / 1e9:.2g} GB a rank" + (f"; {counted(warned, 'warning')}" if warned else "")
    )


def _peak_memory(group: Group) -> int:
    """The most memory that this rank has had, in bytes: that of its tensors on its GPU, or of the process if it has put none there."""
    if on_accelerator := most_allocated(group.device):
        return on_accelerator
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
