"""What the feature decorators cost or save: ``python benchmarks/features.py`` prints a table and writes it as JSON.

Each row is the time of a training step with a feature over that of a reference without, on 2 gloo ranks with a thread each, measured in
turns as in ``overhead.py``, which tells how to read the table:

- ``sync_bn``: BatchNorm over all ranks on the small ResNet, over ``DistributedDataParallel`` written by hand with plain BatchNorm.
- ``accumulate``: a step every 4 batches on the wide MLP, over ``DistributedDataParallel`` and accumulation written by hand, which sends
  gradients after each batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from overhead import BLOCK, HEADER, PAIRS_OF_A_TEAM, line, warm
from teams import Team, start_fork_server
from timing import Row, alternated, compared


@dataclass(frozen=True)
class Comparison:
    """A feature beside what one would do without: ways to train in ``teams.py``, on a case of ``models.py``."""

    case: str
    way: str
    reference: str
    limit: float


COMPARISONS = {
    "sync_bn": Comparison(case="resnet", way="sync_bn", reference="by hand", limit=1.3),
    "accumulate": Comparison(case="wide", way="accumulate", reference="sending each batch", limit=0.8),
}


def rows(feature: str, pairs: int) -> Iterator[Row]:
    """The rows of ``feature``: against its reference, and the reference against itself."""
    comparison = COMPARISONS[feature]
    ways = {
        comparison.reference: comparison.reference,
        comparison.way: comparison.way,
        f"{comparison.reference} again": comparison.reference,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for begin in range(0, pairs, PAIRS_OF_A_TEAM):
        with ExitStack() as opened:
            teams = {name: opened.enter_context(Team(way, comparison.case)) for name, way in ways.items()}
            block = max(1, round(BLOCK / min(warm(team) for team in teams.values())))
            turns = alternated({name: partial(team.train, block) for name, team in teams.items()}, min(PAIRS_OF_A_TEAM, pairs - begin))
            for name, team in teams.items():
                taken[name] += [1e3 * seconds for seconds in turns[name]]
                team.end()
    yield from compared(comparison.case, "ms", taken, comparison.reference, {comparison.way: comparison.limit})


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="blocks of steps that each team trains")
    parser.add_argument("--only", choices=list(COMPARISONS), help="measure one feature; the JSON keeps the others")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the rows are written")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    start_fork_server()
    print(HEADER)
    for feature in [arguments.only] if arguments.only else COMPARISONS:
        measured = []
        for row in rows(feature, arguments.pairs):
            print(line(feature, row), flush=True)
            measured.append(asdict(row))
        results[feature] = {"torch": version("torch"), "python": platform.python_version(), "cores": os.cpu_count(), "rows": measured}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
