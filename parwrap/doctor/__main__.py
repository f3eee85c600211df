"""``parwrap doctor [--json]``: examines this process, or all ranks under a launcher; ends in time even if something hangs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import active_children
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from parwrap.doctor.exam import Exam

__all__ = ["examine", "main"]


def main() -> int:
    """Run the command and return its exit code."""
    options = _options()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # suppresses torch's stack traces of failures that are reported here in one line
    try:
        from parwrap.doctor.exam import examination  # noqa: F401 - it imports torch
    except ImportError as error:
        print(f"parwrap doctor: {error}: install parwrap, with torch, into the environment of {sys.executable}.", file=sys.stderr)
        return 2
    from parwrap.errors import UsageError
    from parwrap.options import Options

    try:
        Options(backend=options.backend)
    except UsageError as error:
        print(f"parwrap doctor: {error}", file=sys.stderr)
        return 2
    return examine(options.timeout, options.backend, options.json)


def examine(timeout: float, backend: str | None, as_json: bool) -> int:
    """Examine this process, or all ranks if it is one of several.

    Args:
        timeout: the time limit in seconds.
        backend: the backend of the self test; ``None`` for the default.
        as_json: print JSON.

    Returns:
        0 without a serious problem, 1 with one, 2 if the report cannot be written; on ranks above 0, 1 if their examination failed. After a
        failure, this ends the process with that code instead.
    """
    from parwrap.doctor.exam import examination, in_time
    from parwrap.doctor.gather import gather, place

    with examination(gather(os.environ, backend), place(os.environ)[0], timeout, backend) as exam:

        def give_up() -> NoReturn:
            _leave(_report(exam, as_json))

        with in_time(exam, give_up):
            exam.run()
        status = _report(exam, as_json)
        if exam.failure:
            exam.wait_until_reported()
        for process in active_children():
            process.join(1)
        if exam.failure or active_children():  # joining a rank that hangs in a GPU driver would hang too, because no signal ends it
            _leave(status)
    return status


def _report(exam: Exam, as_json: bool) -> int:
    """Print the results so far (on rank 0, those of all ranks) and return the exit code."""
    from parwrap.doctor.findings import find
    from parwrap.doctor.report import report

    if exam.world.rank > 0:
        if exam.failure:
            here = f"rank {exam.world.rank} on {exam.facts.host}"
            print(
                f"parwrap doctor: {here} failed at '{exam.stage}': {exam.failure}. The report of rank 0 has all ranks.",
                file=sys.stderr,
                flush=True,
            )
        return int(bool(exam.failure))
    outcome = exam.outcome()
    findings = find(outcome)
    status = int(any(finding.serious for finding in findings))
    if as_json:
        text = json.dumps({**asdict(outcome), "findings": [asdict(finding) for finding in findings], "exit_code": status}, indent=2)
    else:
        text = report(outcome, findings)
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        if not isinstance(error, BrokenPipeError):  # the reader has read enough, as head does
            print(
                f"parwrap doctor: the report cannot be written: {error.strerror}. Free some space, or write it elsewhere.", file=sys.stderr
            )
            return 2
    return status


def _leave(status: int) -> NoReturn:
    """End this process immediately, because a regular shutdown after a failure may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    for process in active_children():
        process.kill()
    os._exit(status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="parwrap doctor",
        description="Show what runs here, what a launch would do, and each problem with its remedy. Under a launcher, it examines all "
        "ranks together: srun parwrap doctor. The exit code is 0 if there is no problem, 1 if there is one, and 2 if it cannot "
        "run.",
    )
    parser.add_argument("--json", action="store_true", help="Print everything as JSON.")
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="Report a hang after this many seconds; by default 60.")
    parser.add_argument("--backend", help="Backend of the self test; by default the one that a launch would choose.")
    return parser.parse_args()


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of seconds between 0 and 1000000")


if __name__ == "__main__":
    sys.exit(main())
