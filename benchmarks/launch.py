"""How fast ranks start, and what they take: ``python benchmarks/launch.py`` prints a table and writes it as JSON.

- ``time``: seconds from the command until every rank has imported torch and done its first all-reduce.
- ``memory``: of all processes of the job at that point, with pages that several share counted once (Linux's ``Pss``).

``torchrun --standalone`` is the reference; ``accelerate launch`` is measured too where it is installed. All take turns. The table is
read as that of ``overhead.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from overhead import HEADER, line
from timing import Row, alternated, compared

PROBES = Path(__file__).parent / "probes"

LIMITS = {2: 0.6, 4: 0.4, 8: 0.25}
"""How much of torchrun's time is to be taken, by the number of ranks."""


class Launched(NamedTuple):
    """What one launch took.

    Attributes:
        seconds: until all ranks have done an all-reduce.
        memory: of all its processes then, in MB.
    """

    seconds: float
    memory: float


def launchers(ranks: int) -> dict[str, Callable[[], Launched]]:
    """What measures a launch of so many ranks, by launcher."""
    by_hand, in_scope = str(PROBES / "all_reduce_by_hand.py"), str(PROBES / "all_reduce_in_scope.py")
    number = f"--nproc-per-node={ranks}"
    torchrun = [_script("torchrun"), "--standalone", number, by_hand]
    accelerate = [_script("accelerate"), "launch", "--multi_gpu", "--num_machines=1", f"--num_processes={ranks}"]
    accelerate += ["--mixed_precision=no", "--dynamo_backend=no", by_hand]
    parwrap = [sys.executable, "-m", "parwrap.run", number]
    commands = {
        "torchrun": torchrun,
        "parwrap.run": [*parwrap, in_scope],
        "parwrap.run --plain": [*parwrap, "--plain", by_hand],
        **({"accelerate launch": accelerate} if importlib.util.find_spec("accelerate") else {}),
        "torchrun again": torchrun,
    }
    return {name: partial(_launched, command, ranks) for name, command in commands.items()}


def rows(ranks: int, pairs: int) -> Iterator[tuple[str, Row]]:
    """The rows of the table, with the part that each belongs to."""
    taken = alternated(launchers(ranks), pairs)
    limits = dict.fromkeys(("parwrap.run", "parwrap.run --plain"), LIMITS.get(ranks))
    for row in compared(f"{ranks} ranks", "s", {name: [each.seconds for each in runs] for name, runs in taken.items()}, "torchrun", limits):
        yield "time", row
    for row in compared(f"{ranks} ranks", "MB", {name: [each.memory for each in runs] for name, runs in taken.items()}, "torchrun", {}):
        yield "memory", row


def _launched(command: Sequence[str], ranks: int) -> Launched:
    with tempfile.TemporaryDirectory() as directory:
        stays = Path(directory, "stays")
        stays.touch()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PROBE_STAYS": str(stays)}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users have what they use compiled, and so are torch and torchrun
        begin = time.monotonic()
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as job:
            times: list[float] = []
            while len(times) < ranks and (printed := job.stdout.readline()):
                times += map(float, re.findall(r"reduced at (\S+)", printed))
            memory = sum(map(_proportional_memory, _descendants(job.pid)))
            stays.unlink()
    if job.returncode or len(times) != ranks:
        raise RuntimeError(f"{' '.join(command)}: exit code {job.returncode}, {len(times)} of {ranks} ranks have reported")
    return Launched(max(times) - begin, memory)


def _descendants(process: int) -> Iterator[int]:
    """``process`` and all that it and they have started."""
    yield process
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _descendants(int(child))


def _proportional_memory(process: int) -> float:
    """The MB that ``process`` takes, with its part of what it shares."""
    return int(re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)[1]) * 1024 / 1e6


def _script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts"), name))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LIMITS), help="how many ranks are started")
    parser.add_argument("--pairs", type=int, default=5, help="turns that each launcher has")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the rows are written")
    arguments = parser.parse_args()
    for warm_up in launchers(ranks=min(arguments.ranks)).values():
        warm_up()
    print(HEADER)
    measured = []
    for ranks in arguments.ranks:
        for part, row in rows(ranks, arguments.pairs):
            print(line(part, row), flush=True)
            measured.append({"part": part, **asdict(row)})
    results = {"torch": version("torch"), "python": platform.python_version(), "cores": os.cpu_count(), "rows": measured}
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
