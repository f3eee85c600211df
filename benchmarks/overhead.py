"""What parwrap costs beside torch's own tools: ``python benchmarks/overhead.py`` prints a table and writes it as JSON.

How to read the table. Each row compares one thing with a reference, and ``value`` is what the limit is for:

- ``steps``: time of a training step inside ``parwrap.distributed`` over that of the same loop with ``DistributedDataParallel`` written
  by hand, on 2 gloo ranks with a thread each. Both teams are kept ready and train blocks of steps in turns; the value is the median
  ratio of neighbouring blocks. That all teams end with the same weights, bit for bit, is checked.
- ``memory``: the same for the peak resident memory of rank 0, with new processes each time.
- ``import``: milliseconds that are added to ``import torch``, in new interpreters.

The interval is the 95 % bootstrap interval of the median. Rows without a limit are the reference against itself: they show what is
noise. A limit is met when the value keeps to it, or when the interval contains it and reaches no more than 3 % each way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from imports import IMPORTS, import_times
from teams import Team, start_fork_server
from timing import Row, alternated, compared, judged

STEP_LIMITS = {"tiny": 1.05, "deep": 1.02, "wide": 1.02, "resnet": 1.02, "transformer": 1.02}
MEMORY_LIMIT = 1.02
IMPORT_LIMIT = 30.0

WARM_UP = 20
BLOCK = 0.3
"""About how many seconds a block of steps takes."""
PAIRS_OF_A_TEAM = 10
"""Then there are new teams: by where its memory happens to lie, one process can be faster than its twin throughout."""

HEADER = f"{'part':13}{'case':13}{'compared':33}{'measured':>12}{'reference':>12}{'value':>10}  {'95 % interval':20}limit"

TEAMS = {"by hand": "by hand", "parwrap": "parwrap", "by hand again": "by hand"}


def steps(cases: list[str], pairs: int) -> Iterator[Row]:
    """Times of a step."""
    for case in cases:
        taken: dict[str, list[float]] = {name: [] for name in TEAMS}
        for begin in range(0, pairs, PAIRS_OF_A_TEAM):
            for name, times in _turns(case, min(PAIRS_OF_A_TEAM, pairs - begin)).items():
                taken[name] += times
        yield from compared(case, "ms", taken, "by hand", {"parwrap": STEP_LIMITS[case]})


def _turns(case: str, pairs: int) -> dict[str, list[float]]:
    """The milliseconds of a step of each of ``TEAMS`` in each of its blocks."""
    with ExitStack() as opened:
        teams = {name: opened.enter_context(Team(way, case)) for name, way in TEAMS.items()}
        block = max(1, round(BLOCK / min(warm(team) for team in teams.values())))
        taken = alternated({name: partial(team.train, block) for name, team in teams.items()}, pairs)
        if len({team.end().weights for team in teams.values()}) > 1:
            raise RuntimeError(f"{case}: the teams did not train the same weights, so their times cannot be compared")
    return {name: [1e3 * seconds for seconds in times] for name, times in taken.items()}


def memory(cases: list[str], pairs: int) -> Iterator[Row]:
    """Peak memory of a rank."""

    def peak(way: str, case: str) -> float:
        with Team(way, case) as team:
            warm(team)
            return team.end().peak_memory

    for case in cases:
        taken = alternated({name: partial(peak, way, case) for name, way in TEAMS.items()}, pairs)
        yield from compared(case, "MB", taken, "by hand", {"parwrap": MEMORY_LIMIT})


def imports(pairs: int) -> Iterator[Row]:
    """Time of an import."""
    import_times(IMPORTS["all it needs"])  # compiles and caches what has changed
    for name, statement in IMPORTS.items():
        torch, added = zip(*(import_times(statement) for _ in range(pairs)), strict=True)
        yield judged(
            name, "added to import torch", "ms", torch, [sum(both) for both in zip(torch, added, strict=True)], list(added), IMPORT_LIMIT
        )


def warm(team: Team) -> float:
    """Train until nothing is new any more; returns the seconds of a step."""
    team.train(WARM_UP)
    return team.train(WARM_UP)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="blocks of steps that each team trains")
    parser.add_argument("--cases", type=_cases, default=list(STEP_LIMITS), help="some of " + ",".join(STEP_LIMITS))
    parser.add_argument("--only", choices=["steps", "memory", "import"], help="measure one part; the JSON keeps the others")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the rows are written")
    return parser.parse_args()


def _cases(names: str) -> list[str]:
    cases = names.split(",")
    if unknown := set(cases) - STEP_LIMITS.keys():
        raise argparse.ArgumentTypeError(f"there is no case {', '.join(sorted(unknown))}: name some of {','.join(STEP_LIMITS)}.")
    return cases


def line(part: str, row: Row) -> str:
    value, low, high = (f"{number:.3f}" if part != "import" else f"{number:.1f} ms" for number in (row.value, row.low, row.high))
    verdict = "" if row.limit is None else f"{row.limit:g}  {'met' if row.met else 'NOT MET'}"
    measured, reference = f"{row.measured:.2f} {row.unit}", f"{row.reference:.2f} {row.unit}"
    return f"{part:13}{row.case:13}{row.compared:33}{measured:>12}{reference:>12}{value:>10}  {f'{low} to {high}':20}{verdict}"


def main() -> None:
    """Measure what the command line asks for."""
    arguments = _arguments()
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "steps": lambda: steps(arguments.cases, arguments.pairs),
        "memory": lambda: memory(arguments.cases, pairs=5),
        "import": lambda: imports(pairs=7),
    }
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    start_fork_server()
    print(HEADER)
    for part in [arguments.only] if arguments.only else parts:
        rows = []
        for row in parts[part]():
            print(line(part, row), flush=True)
            rows.append(asdict(row))
        results[part] = {"torch": version("torch"), "python": platform.python_version(), "cores": os.cpu_count(), "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
