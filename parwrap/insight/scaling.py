"""``parwrap scaling --ranks 1,2,4 train.py``: measures samples per second on more and more ranks, and predicts them for twice as many."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parwrap.errors import LaunchError, UsageError, counted
from parwrap.insight.plots import draw_speed, refuse_plot
from parwrap.insight.recording import WARM_UP, Settings
from parwrap.insight.runs import Asked, answered, asked_for, run_in_scratch
from parwrap.ranks.device import gpu_count

__all__ = ["Point", "expected", "main", "serial_part"]

HELP = """\
usage: parwrap scaling [options] train.py [its options]

  parwrap scaling --ranks 1,2,4 train.py
  parwrap scaling --ranks 1,8 --steps 200 --plot scaling.svg train.py

Runs the script, unchanged, on each number of ranks, ends each run after --steps, and prints samples per second, the efficiency, and
the part of a step that more ranks do not make shorter. What the script writes and prints goes to scratch.

  --ranks N,N,...     numbers of ranks, in ascending order; 1,2
  --steps N           optimizer steps to time, after 5 to warm up; 100
  --plot FILE         draw speed and efficiency, as .png, .svg or .pdf; needs matplotlib: pip install 'parwrap[report]'
  --json              print the result as JSON

and the options of `parwrap run` about training, such as --batch global.
"""


@dataclass
class Point:
    """How fast a number of ranks trains.

    Attributes:
        ranks: the number of ranks.
        samples_per_second: of all ranks together.
        step: how long a step takes, in seconds.
        spread: of 10 steps, 8 are between these two speeds, in samples per second.
        efficiency: the speed per rank, divided by the speed per rank of the first point.
        serial: the part of the work that more ranks do not make shorter; ``None`` for the first point.
    """

    ranks: int
    samples_per_second: float
    step: float
    spread: tuple[float, float] = (0.0, 0.0)
    efficiency: float = 1.0
    serial: float | None = None


MOST = 1.1
"""An efficiency above this shows that something else has slowed the first run down."""


def serial_part(speedup: float, ranks: float) -> float:
    """The part of the work that more ranks do not make shorter, from a measured ``speedup`` on ``ranks`` times as many ranks.

    It is the experimentally determined serial fraction of Karp and Flatt, "Measuring parallel processor performance", 1990.

    >>> serial_part(4, 4), round(serial_part(1.6, 2), 3), serial_part(1, 2)
    (0.0, 0.25, 1.0)
    """
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


def expected(serial: float, ranks: float) -> float:
    """The speedup on ``ranks`` times as many ranks if the ``serial`` part does not change: Amdahl's law.

    >>> expected(0.25, 2), expected(0, 8)
    (1.6, 8.0)
    """
    return 1 / (serial + (1 - serial) / ranks)


def main(argv: Sequence[str]) -> int:
    """Run the command line ``argv``. Returns its exit code, 2 if nothing can be measured."""
    return answered("scaling", HELP, _measure, argv)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.prog = "parwrap scaling"
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot")
    parser.add_argument("--json", action="store_true")


def _measure(argv: Sequence[str]) -> int:
    asked = asked_for(argv, _add_options)
    given = asked.arguments
    sizes, gpus = _sizes(given.ranks), gpu_count()
    if 0 < gpus < sizes[-1] and not hasattr(given, "backend"):
        raise UsageError(
            f"--ranks {given.ranks} is more than the GPUs that torch can use here ({gpus}), and ranks that share a GPU are no faster than "
            f"one: give at most {gpus}, or add --backend gloo to time them nevertheless."
        )
    if given.steps < 1:
        raise UsageError(f"--steps {given.steps} is not a positive number of steps: pass 1 or more.")
    refuse_plot(given.plot)
    points = [_point(ranks, asked) for ranks in sizes]
    first = points[0]
    for point in points[1:]:
        speedup, times = point.samples_per_second / first.samples_per_second, point.ranks / first.ranks
        point.efficiency, point.serial = speedup / times, serial_part(speedup, times)
    if given.plot:
        times = points[-1].samples_per_second / first.samples_per_second
        ranks = counted(points[-1].ranks, "rank")
        draw_speed(
            [point.ranks for point in points],
            [point.samples_per_second for point in points],
            [point.spread for point in points],
            [point.efficiency for point in points],
            f"{Path(asked.script[0]).name}: {times:.2f} times as fast on {ranks} as on {first.ranks}",
            given.plot,
        )
    print(json.dumps([asdict(point) for point in points]) if given.json else _told(points))
    return 0


def _sizes(ranks: str) -> list[int]:
    sizes = [int(each) if each.strip().isdecimal() else 0 for each in ranks.split(",")]
    if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise UsageError(f"--ranks {ranks} is not a list of two or more numbers of ranks in ascending order, such as 1,2,4.")
    return sizes


def _point(ranks: int, asked: Asked) -> Point:
    with tempfile.TemporaryDirectory(prefix="parwrap-scaling-") as folder:
        settings = Settings("", asked.arguments.steps, is_module=asked.arguments.module, timed=True)
        run = run_in_scratch(ranks, asked.options, settings, asked.script, Path(folder, "run"))
        file = run.folder / "timed.json"
        if run.failed:
            raise LaunchError(f"the script fails on {counted(ranks, 'rank')}:\n{run.last()}")
        if not file.exists():
            raise UsageError(
                f"{asked.script[0]} takes at most {WARM_UP} steps of an optimizer on {counted(ranks, 'rank')}, and the first {WARM_UP} "
                "warm up and are not timed: let the script train longer."
            )
        timed: dict[str, Any] = json.loads(file.read_text())
    if not timed["samples"]:
        raise UsageError(f"{asked.script[0]} reads no DataLoader, so its samples cannot be counted: read them with a torch DataLoader.")
    seconds, times, samples = sum(timed["times"]), sorted(timed["times"]), timed["samples"]
    each, tenth = samples / len(times), len(times) // 10
    return Point(ranks, samples / seconds, seconds / len(times), (each / times[-1 - tenth], each / times[tenth]))


def _told(points: Sequence[Point]) -> str:
    lines = [f"{'ranks':>5}  {'samples/s':>12}  {'ms a step':>10}  {'efficiency':>10}  does not shrink"]
    for each in points:
        serial = "" if each.serial is None else f"{each.serial:15.1%}"
        lines.append(
            f"{each.ranks:5}  {each.samples_per_second:12,.0f}  {1000 * each.step:10.2f}  {each.efficiency:10.0%}  {serial}".rstrip()
        )
    first, last = points[0], points[-1]
    if last.efficiency > MOST:
        lines.append(f"{last.efficiency:.0%} is more than ranks can give: something else has slowed the first run down. Measure again.")
        return "\n".join(lines)
    times = 2 * last.ranks / first.ranks
    speedup = expected(max(last.serial or 0.0, 0.0), times)
    lines.append(
        f"at {2 * last.ranks} ranks expect {speedup * first.samples_per_second:,.0f} samples/s ({speedup / times:.0%}), if that part stays"
    )
    return "\n".join(lines)
