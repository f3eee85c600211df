"""``parwrap verify train.py``: the user's own script on one process and on several ranks, compared after every step.

The second run has ``--batch global``, which promises the numbers of one process, and ``--sync-bn`` if the first one has met a batch norm.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from parwrap.decorators.distributed import distributed
from parwrap.decorators.inventory import reachable
from parwrap.decorators.scope import Call, ScopeDecorator, scoped
from parwrap.decorators.sync_bn import sync_bn
from parwrap.errors import ParwrapError, UsageError, counted
from parwrap.inline.launching import run_on_ranks
from parwrap.inline.rank_process import Task
from parwrap.insight.comparison import TOLERANCE, Comparison, compared, compared_with_ddp
from parwrap.insight.recording import Enough, Recorded, Settings, recorded, recorded_in
from parwrap.launching.command_line import UnknownOptionError, parse_options, split_at_script
from parwrap.launching.plan import command_parser, unknown_option
from parwrap.loop.random_streams import seed_all
from parwrap.rank_zero.files import IN_SCRATCH, files_in_scratch
from parwrap.ranks.group import world_size

__all__ = ["main", "verify"]

HELP = """\
usage: parwrap verify [options] train.py [its options]

  parwrap verify train.py                              20 steps on one process and on 2 ranks
  parwrap verify --steps 100 --no-dropout train.py     turns dropout off in both
  parwrap verify --nproc-per-node 4 --json train.py    4 ranks; prints JSON

Runs the script, unchanged, on one process and on several ranks, and compares what is trained after every step. Exits with 0 if the
weights are equal up to rounding, and with 1 if not: then it names the first parameter that differs, and likely reasons. What the script
writes and prints goes to scratch; programs that it starts write where they always do.

  --steps N           optimizer steps to compare; 20
  --nproc-per-node N  ranks of the second run; 2
  --tolerance X       the largest difference by rounding, beside a largest value of 1; 1e-5
  --no-dropout        turn dropout off in both runs, because each rank draws its own
  --against ddp       compare per-rank batches with torch's DDP, driven by hand on as many ranks, bit for bit
  --seed N            for scripts that set none; 0
  --json              print the result as JSON

and the options of `parwrap run` about training, for both runs; --strategy ddp or zero1.
"""


def verify(
    function: Callable[..., Any],
    /,
    *args: Any,
    steps: int = 20,
    nprocs: int = 2,
    tolerance: float = TOLERANCE,
    dropout: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> Comparison:
    """Call ``function(*args, **kwargs)`` in one process and on several ranks with ``batch="global"``, and compare every step.

    Both are started for it, so that nothing of the caller's changes. Batch norms are synchronized, and files that it writes go to scratch.

    Args:
        function: the training function. Its decorator sets the options of ``distributed``.
        args, kwargs: its arguments.
        steps: the number of optimizer steps to compare.
        nprocs: the number of ranks.
        tolerance: the largest difference by rounding, beside a largest value of 1.
        dropout: whether dropout is on; each rank draws its own.
        seed: the seed of torch, numpy and Python.

    Returns:
        The comparison: ``equal``, and as text what it found.

    Raises:
        UsageError: the function took no step in one process.

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
    _refuse_numbers(steps, nprocs)
    modules = reachable(nn.Module, Call(function, args, kwargs))
    before = os.environ.get(IN_SCRATCH)
    os.environ[IN_SCRATCH] = "1"
    try:
        with tempfile.TemporaryDirectory(prefix="parwrap-verify-") as folder:

            def run(name: str, size: int, scopes: Sequence[ScopeDecorator]) -> Recorded:
                Path(folder, name).mkdir()
                settings = Settings(str(Path(folder, name)), steps, seed, dropout)
                call = scoped(functools.partial(_called, settings, modules, function), scopes)
                run_on_ranks(Task(functools.partial(call, *args, **kwargs), [], dict), size, who="parwrap.verify")
                return recorded_in(Path(settings.folder))

            one = run("one", 1, [])
            if not one.steps:
                raise UsageError(f"{function.__name__} has taken no step of an optimizer in one process: there is nothing to compare.")
            around: list[ScopeDecorator] = [distributed(batch="global", seed=seed), *([sync_bn()] if one.batch_norms else [])]
            said = ""
            try:
                several = run("several", nprocs, around)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                several = recorded_in(Path(folder, "several"), failed=True)
    finally:
        del os.environ[IN_SCRATCH]
        if before is not None:
            os.environ[IN_SCRATCH] = before
    return compared(one, several, nprocs, True, said, tolerance)


def _called(settings: Settings, modules: Sequence[nn.Module], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call ``function`` on this rank, and record its steps."""
    with ExitStack() as alone:
        if world_size() == 1:
            seed_all(settings.seed)
            folder = alone.enter_context(tempfile.TemporaryDirectory(prefix="parwrap-"))
            alone.enter_context(files_in_scratch(Path(folder)))
        with recorded(settings, modules), suppress(Enough):
            function(*args, **kwargs)


def main(argv: Sequence[str]) -> int:
    """Run the command line ``argv``. Returns its exit code: 0 if the runs are equal, 1 if not, 2 if they cannot be compared."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    try:
        return _verify(argv)
    except ParwrapError as error:
        print(f"parwrap verify: {error}", file=sys.stderr)
        return 2


def _verify(argv: Sequence[str]) -> int:
    parser = command_parser()
    parser.set_defaults(nproc_per_node=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--against")
    parser.add_argument("--no-dropout", "--no_dropout", dest="dropout", action="store_false")
    parser.add_argument("--json", action="store_true")
    try:
        given, script = split_at_script(parser, argv)
    except UnknownOptionError as unknown:
        raise UsageError(unknown_option(str(unknown), parser)) from None
    asked = parse_options(parser, given, script)
    _refuse(asked)
    options = _of_run(given)
    ranks = asked.nproc_per_node or "2"
    settings = Settings("", asked.steps, getattr(asked, "seed", None) or 0, asked.dropout, asked.module)
    if asked.against:
        result = _against_ddp(["--nproc-per-node", ranks, "--seed", str(settings.seed), *options], settings, script, asked.tolerance or 0.0)
    else:
        result = _against_one(ranks, options, settings, script, asked)
    print(json.dumps(asdict(result)) if asked.json else result)
    return 0 if result.equal else 1


def _against_ddp(run: Sequence[str], settings: Settings, script: Sequence[str], tolerance: float) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="parwrap-verify-") as folder:
        by_hand, said = _run(run, replace(settings, by_hand=True), script, Path(folder, "by_hand"))
        if by_hand.failed or not by_hand.steps:
            raise UsageError(f"the script cannot run with DDP by hand: it ends after {counted(len(by_hand.steps), 'step')}:\n{_last(said)}")
        parwraps, said = _run(run, settings, script, Path(folder, "parwrap"))
    return compared_with_ddp(by_hand, parwraps, int(run[1]), said, tolerance)


def _against_one(ranks: str, options: Sequence[str], settings: Settings, script: Sequence[str], asked: argparse.Namespace) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="parwrap-verify-") as folder:
        one, said = _run(["--nproc-per-node", "1", *options], settings, script, Path(folder, "one"))
        if one.failed:
            raise UsageError(f"the script fails on one process after {counted(len(one.steps), 'step')}:\n{_last(said)}")
        if not one.steps:
            raise UsageError(f"{script[0]} has ended without a step of an optimizer on one process: there is nothing to compare.")
        synchronized = one.batch_norms or hasattr(asked, "sync_bn")
        around = ["--batch", "global", *(["--sync-bn"] if synchronized and not hasattr(asked, "sync_bn") else [])]
        run = ["--nproc-per-node", ranks, "--seed", str(settings.seed), *around, *options]
        several, said = _run(run, settings, script, Path(folder, "several"))
    return compared(one, several, int(ranks), synchronized, said, TOLERANCE if asked.tolerance is None else asked.tolerance)


def _refuse_numbers(steps: int, ranks: Any) -> None:
    if steps < 1:
        raise UsageError(f"verify compares a positive number of steps, not {steps}.")
    if not str(ranks).isdecimal() or int(ranks) < 2:
        raise UsageError(f"verify compares one process with a number of ranks above 1, not {ranks}.")


def _refuse(asked: argparse.Namespace) -> None:
    _refuse_numbers(asked.steps, asked.nproc_per_node or 2)
    if asked.against not in (None, "ddp"):
        raise UsageError(f"--against {asked.against}: verify compares with one process, or with --against ddp.")
    if asked.against and getattr(asked, "batch", "per_rank") != "per_rank":
        raise UsageError("--against ddp compares the batches that each rank takes for itself, as with DDP: remove --batch global.")
    if not asked.against and getattr(asked, "batch", "global") != "global":
        raise UsageError("--batch per_rank trains on larger batches than one process, so its numbers are others: remove it.")
    strategy = getattr(asked, "strategy", "ddp")
    if strategy not in ("ddp", "zero1"):
        raise UsageError(f"verify compares weights after each step, which --strategy {strategy} averages later or never: use ddp or zero1.")


OURS = {"--steps": True, "--tolerance": True, "--against": True, "--no-dropout": False, "--no_dropout": False, "--json": False}
OF_RUN = {"--nproc-per-node": True, "--nproc_per_node": True, "--seed": True, "-m": False, "--module": False}


def _of_run(given: Sequence[str]) -> list[str]:
    """The options of ``parwrap run`` among ``given`` that hold for both runs."""
    options, rest = [], list(given)
    while rest:
        name, equals, _ = rest[0].partition("=")
        takes_value = {**OURS, **OF_RUN}.get(name)
        width = 1 + (bool(takes_value) and not equals)
        if takes_value is None:
            options += rest[:1]
        del rest[:width]
    return options


def _run(options: Sequence[str], settings: Settings, script: Sequence[str], folder: Path) -> tuple[Recorded, str]:
    """Run the script with the ``options`` of ``parwrap run``. Returns what it has recorded, and said."""
    folder.mkdir()
    recorder = json.dumps(asdict(settings) | {"folder": str(folder)})
    command = [sys.executable, "-m", "parwrap.run", *options, "-m", "parwrap.insight.recording", recorder, *script]
    output = folder / "said"
    with output.open("wb") as said:
        environ = {**os.environ, IN_SCRATCH: "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        run = subprocess.run(command, env=environ, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    return recorded_in(folder, failed=run.returncode != 0), output.read_text(errors="replace")


def _last(said: str) -> str:
    return "\n".join(f"  {line}" for line in said.splitlines()[-12:])
