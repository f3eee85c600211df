"""``parwrap verify train.py``: the user's own script on one process and on several ranks, compared after every step.

The second run has ``--batch global``, which promises the numbers of one process, and ``--sync-bn`` if the first one has met a batch norm.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from parwrap.decorators.distributed import distributed
from parwrap.decorators.scope import Call, ScopeDecorator, describe, scoped, undecorated
from parwrap.decorators.sync_bn import sync_bn
from parwrap.errors import UsageError, counted
from parwrap.inline.launching import run_on_ranks
from parwrap.inline.rank_process import Task
from parwrap.insight.comparison import Comparison, compared, compared_with_ddp, with_prints
from parwrap.insight.plots import draw_differences, refuse_plot
from parwrap.insight.recording import PRECISELY, Enough, Recorded, Settings, recorded, recorded_in
from parwrap.insight.runs import Asked, answered, asked_for, run_in_scratch
from parwrap.options import STRATEGIES
from parwrap.ranks.environment import environment
from parwrap.ranks.rendezvous import job_folder
from parwrap.ranks.world import IN_SCRATCH

__all__ = ["main", "verify"]

HELP = """\
usage: parwrap verify [options] train.py [its options]

  parwrap verify train.py                              20 steps on one process and on 2 ranks
  parwrap verify --steps 100 --no-dropout train.py     turns dropout off in both
  parwrap verify --nproc-per-node 4 --json train.py    4 ranks; prints JSON

Runs the script, unchanged, on one process and on several ranks, and compares what is trained after every step, and the numbers that
rank 0 prints to the end of the epoch. Exits with 0 if they are equal up to rounding, and with 1 if not: then it names the first parameter
or the first printed line that differs, and likely reasons. What the script writes and prints goes to scratch; programs that it starts
write where they always do.

  --steps N           optimizer steps to compare; 20
  --nproc-per-node N  ranks of the second run; 2
  --tolerance X       the largest difference by rounding in a step, beside a largest value of 1; 1e-5, in half precision 1e-3
  --no-dropout        turn dropout off in both runs, because each rank draws its own
  --against ddp       compare per-rank batches with torch's DDP, driven by hand on as many ranks, bit for bit
  --seed N            for scripts that set none; 0
  --plot FILE         draw the largest difference over the steps, as .png, .svg or .pdf; pip install 'parwrap[report]'
  --json              print the result as JSON

and the options of `parwrap run` about training, for both runs; --strategy ddp or zero1.
"""


def verify(
    function: Callable[..., Any],
    /,
    *args: Any,
    steps: int = 20,
    nprocs: int = 2,
    tolerance: float | None = None,
    dropout: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> Comparison:
    """Call ``function(*args, **kwargs)`` in one process and on several ranks, and compare every step.

    Both runs use new processes, so that they change nothing in this one. On several ranks ``batch`` is ``"global"`` unless the decorator of
    the function sets it, and batch norms are synchronized. Files that the function writes go to scratch, and what it prints is shown. If
    the function has a parameter with the name of one below, such as ``steps``, pass a ``functools.partial``.

    Args:
        function: the training function. Its decorator sets the options of ``distributed``.
        args, kwargs: arguments of the function.
        steps: the number of optimizer steps to compare.
        nprocs: the number of ranks.
        tolerance: how much a value may differ by rounding after the first step, as a fraction of the largest value of its tensor, or of 1
            if that is larger. The norm of a gradient's difference may be 100 times this fraction of the gradient's norm, plus a tenth of
            this fraction of the largest norm so far. Each further step adds as much. By default 1e-5, or 1e-3 if the function computes in
            half precision.
        dropout: whether dropout is on; each rank draws its own.
        seed: the seed of torch, numpy and Python.

    Returns:
        The comparison. ``equal`` says whether weights and printed numbers agree; as text it shows the first difference and its reasons.

    Raises:
        UsageError: ``steps``, ``nprocs`` or ``tolerance`` is out of range; or the function took no step in one process.

    >>> import parwrap, torch
    >>> def train():
    ...     model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=4)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     for x in loader:
    ...         optimizer.zero_grad()
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    >>> parwrap.verify(train).equal
    True
    """
    _refuse_numbers(steps, nprocs, tolerance)
    plain, decorators = undecorated(function)
    given = next((each.given for each in decorators if isinstance(each, distributed)), {})
    options = {name: value for name, value in given.items() if name not in ("nprocs", "start_method")}
    others = [each for each in decorators if not isinstance(each, distributed)]
    said: list[str] = []
    with environment({IN_SCRATCH: "1", **PRECISELY}), job_folder() as folder:

        def run(name: str, size: int, scopes: Sequence[ScopeDecorator], end: Sequence[int] = ()) -> Recorded:
            (folder / name).mkdir()
            settings = Settings(str(folder / name), steps, seed, dropout, prints=True, end=list(end))
            call = scoped(plain, [*scopes, *others, _Recording(settings)])
            failed = False
            try:
                task = Task(functools.partial(_until_enough, call, args, kwargs), [], dict)
                run_on_ranks(task, size, options.get("backend"), who="parwrap.verify")
            except Exception as error:
                if size == 1:
                    raise
                failed = True
                said.append(f"{type(error).__name__}: {error}")
            return recorded_in(folder / name, failed)

        one = run("one", 1, [])
        if not one.steps:
            raise UsageError(
                f"{describe(plain)} has taken no step of an optimizer in one process: there is nothing to compare. Step with an optimizer "
                "of torch.optim."
            )
        options = {"batch": "global", "seed": seed, **options}
        asks = any(isinstance(each, sync_bn) for each in others)
        synchronized = [sync_bn()] if one.batch_norms and not asks and options["batch"] != "whole" else []
        several = run("several", nprocs, [distributed(**options), *synchronized], one.end or [len(one.steps)])
        result = compared(one, several, nprocs, said="".join(said), tolerance=tolerance, dropout=dropout)
        result.mode = f"--batch {options['batch']}"
        with_prints(result, one, several, lambda: run("again", 1, [], one.end or [len(one.steps)]), tolerance)
        return result


def _until_enough(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    with suppress(Enough):
        call(*args, **kwargs)


class _Recording(ScopeDecorator):
    """Records the steps of a function, inside all other scopes."""

    layer = 1000

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def scope(self, call: Call) -> AbstractContextManager[None]:
        return recorded(self._settings)


def main(argv: Sequence[str]) -> int:
    """Run the command line ``argv``. Returns its exit code: 0 if the runs are equal, 1 if not, 2 if they cannot be compared."""
    return answered("verify", HELP, _verify, argv)


def _verify(argv: Sequence[str]) -> int:
    asked = asked_for(argv, _add_options)
    given = asked.arguments
    _refuse(given)
    settings = Settings("", given.steps, getattr(given, "seed", None) or 0, given.dropout, given.module)
    ranks = int(given.nproc_per_node or 2)
    with job_folder() as folder:
        result = (_against_ddp if given.against else _against_one)(ranks, asked, settings, folder)
    if given.plot:
        _draw(result, Path(asked.script[0]).name, given.plot)
    print(json.dumps(asdict(result)) if given.json else result)
    return 0 if result.equal else 1


def _draw(result: Comparison, script: str, file: str) -> None:
    first, on_ranks = result.difference, f"{result.reference} on {counted(result.ranks, 'rank')}"
    title = f"{script} differs from {on_ranks}" if first else f"{script}: equal to {on_ranks}"
    if not first and not result.equal:
        title = f"{script}: weights are equal to {on_ranks}, printed numbers are not"
    draw_differences(result.by_step, result.tolerance, (first.step, first.what) if first else None, title, file)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.prog = "parwrap verify"
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--against")
    parser.add_argument("--no-dropout", "--no_dropout", dest="dropout", action="store_false")
    parser.add_argument("--plot")
    parser.add_argument("--json", action="store_true")


def _against_ddp(ranks: int, asked: Asked, settings: Settings, folder: Path) -> Comparison:
    run = run_in_scratch(ranks, asked.options, replace(settings, by_hand=True), asked.script, folder / "by_hand")
    by_hand = recorded_in(run.folder, run.failed)
    if by_hand.failed or not by_hand.steps:
        raise UsageError(f"the script cannot run with DDP by hand: it ends after {counted(len(by_hand.steps), 'step')}:\n{run.last()}")
    run = run_in_scratch(ranks, asked.options, settings, asked.script, folder / "parwrap")
    return compared_with_ddp(by_hand, recorded_in(run.folder, run.failed), ranks, run.said, asked.arguments.tolerance or 0.0)


def _against_one(ranks: int, asked: Asked, settings: Settings, folder: Path) -> Comparison:
    settings = replace(settings, prints=True)
    run = run_in_scratch(1, asked.options, settings, asked.script, folder / "one")
    one = recorded_in(run.folder, run.failed)
    if one.failed:
        raise UsageError(f"the script fails on one process after {counted(len(one.steps), 'step')}:\n{run.last()}")
    if not one.steps:
        raise UsageError(
            f"{asked.script[0]} has ended without a step of an optimizer on one process: there is nothing to compare. Step with an "
            "optimizer of torch.optim."
        )
    given, settings = asked.arguments, replace(settings, end=one.end or [len(one.steps)])
    whole = getattr(given, "batch", "global") == "whole"
    asks = hasattr(given, "sync_bn") or whole
    around = ["--batch", "global", *(["--sync-bn"] if one.batch_norms and not asks else [])]
    run = run_in_scratch(ranks, [*around, *asked.options], settings, asked.script, folder / "several")
    several = recorded_in(run.folder, run.failed)
    synchronized = one.batch_norms or asks
    result = compared(one, several, ranks, synchronized=synchronized, said=run.said, tolerance=given.tolerance, dropout=settings.dropout)

    result.mode = "--batch whole" if whole else result.mode

    def again() -> Recorded:
        return recorded_in(run_in_scratch(1, asked.options, settings, asked.script, folder / "again").folder)

    with_prints(result, one, several, again, given.tolerance)
    return result


def _refuse_numbers(steps: int, ranks: Any, tolerance: float | None) -> None:
    if steps < 1:
        raise UsageError(f"verify compares a positive number of steps, not {steps}.")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(
            f"tolerance={tolerance} must be 0 or a finite positive number: verify takes differences up to it for rounding. Leave it out "
            "for the default."
        )
    if not str(ranks).isdecimal() or int(ranks) < 2:
        raise UsageError(f"verify compares one process with a number of ranks above 1, not {ranks}.")


def _refuse(asked: argparse.Namespace) -> None:
    _refuse_numbers(asked.steps, asked.nproc_per_node or 2, asked.tolerance)
    refuse_plot(asked.plot)
    if asked.against not in (None, "ddp"):
        raise UsageError(f"--against {asked.against} is not possible: verify compares with one process, or with DDP by --against ddp.")
    if asked.against and getattr(asked, "batch", "per_rank") != "per_rank":
        raise UsageError("--against ddp compares the batches that each rank takes for itself, as with DDP: remove --batch global.")
    if not asked.against and getattr(asked, "batch", "global") == "per_rank":
        raise UsageError("--batch per_rank trains on larger batches than one process, so the numbers differ: remove it.")
    chosen, able = getattr(asked, "strategy", "ddp"), [name for name, traits in STRATEGIES.items() if traits.same_weights]
    if chosen not in able:
        raise UsageError(
            f"verify compares weights after each step, so all ranks need the same whole weights: use {' or '.join(able)}, not --strategy "
            f"{chosen}."
        )
