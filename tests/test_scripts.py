"""Plain scripts that have never heard of parwrap, on 1, 2 and 3 ranks: they end, ranks agree, the result is as good."""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def run(script, scope):
    """What the script leaves behind and the name and value that it prints last, on its own directory and arguments."""
    printed = io.StringIO()
    sys.argv = [str(script)]
    with contextlib.redirect_stdout(printed), scope:
        left = runpy.run_path(str(script), run_name="__main__")
    return left, printed.getvalue().rstrip().rpartition("\n")[2].split()


def by_itself(script, known):
    """The keys of what the script trains without parwrap, and what it prints last; run once for all numbers of ranks."""
    if not known.exists():
        from parwrap.intercept.table import intercepting
        from parwrap.session.hidden_launch import HiddenGroup

        left, last_line = run(script, intercepting([HiddenGroup()]))  # the test's own group is none of the script's
        known.write_text(json.dumps([list(state(left["model"])), *last_line]))
    return json.loads(known.read_text())


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    return tmp_path_factory.mktemp("references")


def state(model):
    return model if isinstance(model, dict) else model.state_dict()


def as_good(name, value, reference):
    return value >= reference - 0.05 if name == "accuracy" else value <= 2 * reference + 0.02


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=[pytest.mark.ranks(1), pytest.mark.slow]),
        pytest.param(2, marks=pytest.mark.ranks(2)),
        pytest.param(3, marks=[pytest.mark.ranks(3), pytest.mark.slow]),
    ],
)
def test_a_plain_script_trains_as_well_on_several_ranks(size, script, tmp_path, references):
    import torch

    import parwrap
    from parwrap.group.group import alone

    for place in ("together", "by_itself"):
        (tmp_path / place).mkdir(exist_ok=True)
    os.chdir(tmp_path / "together")
    left, last_line = run(script, parwrap.distributed.script_scope())
    trained = state(left["model"])
    parameters = {key: value for key, value in trained.items() if not key.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    for rank, others in enumerate(parwrap.gather(parameters)):
        different = [key for key, value in others.items() if not torch.equal(value, parameters[key])]

        assert (rank, []) == (rank, different)

    if parwrap.rank() == 0:
        os.chdir(tmp_path / "by_itself")
        with alone():
            keys, name, value = by_itself(script, references / f"{script.stem}.json")

        assert keys == list(trained)
        assert name == last_line[0]
        assert as_good(name, float(last_line[1]), float(value)), f"{name} {last_line[1]} on {size} ranks, {value} on one"
