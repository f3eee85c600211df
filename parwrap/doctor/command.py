"""The command: runs the examination, prints on rank 0, and ends with an exit code, in time even if something hangs."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from multiprocessing import active_children
from typing import NoReturn

from parwrap.doctor.exam import Exam, ForkedExam, LaunchedExam, in_time
from parwrap.doctor.findings import find
from parwrap.doctor.gather import gather, place
from parwrap.doctor.report import report
from parwrap.errors import UsageError
from parwrap.inline.forking import refuse_unforkable
from parwrap.options import Options

__all__ = ["examine"]


def examine(timeout: float, backend: str | None, as_json: bool) -> int:
    """Examine this process, or all ranks if it is one of several.

    Args:
        timeout: the time limit in seconds.
        backend: the backend of the self test; ``None`` for the default.
        as_json: print JSON.

    Returns:
        0 if there is no problem, 1 if there is one, 2 if the command cannot run.
    """
    world, half_set = place(os.environ)
    try:
        Options(backend=backend)
        if world.size == 1 and half_set is None:
            refuse_unforkable("parwrap.doctor")
    except UsageError as error:
        print(f"parwrap.doctor: {error}", file=sys.stderr)
        return 2
    facts = gather(os.environ, backend)
    exam: ForkedExam | LaunchedExam
    if world.size > 1:
        exam = LaunchedExam(facts, timeout, world)
    else:
        gc.unfreeze()  # what a fork server has loaded: forked ranks change none of these objects
        exam = ForkedExam(facts, timeout, backend)

    def give_up() -> NoReturn:
        _leave(_report(exam, as_json))

    with in_time(exam, give_up):
        exam.run()
    status = _report(exam, as_json)
    if exam.failure:
        exam.wait_until_reported()
    if exam.failure or active_children():  # joining a rank that hangs in a GPU driver would hang too, because no signal ends it
        _leave(status)
    return status


def _report(exam: Exam, as_json: bool) -> int:
    """Print the results so far (on rank 0, those of all ranks) and return the exit code."""
    launch = exam.facts.launch
    if launch.rank > 0:
        if exam.failure:
            print(f"parwrap.doctor: rank {launch.rank} on {exam.facts.host}, at: {exam.stage}: {exam.failure}", file=sys.stderr, flush=True)
        return int(bool(exam.failure))
    outcome = exam.outcome()
    findings = find(outcome)
    status = int(any(finding.serious for finding in findings))
    if as_json:
        print(json.dumps({**asdict(outcome), "findings": [asdict(finding) for finding in findings], "exit_code": status}, indent=2))
    else:
        print(report(outcome, findings))
    return status


def _leave(status: int) -> NoReturn:
    """End this process immediately, because a regular shutdown after a failure may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
