"""A search for scripts that break parwrap: random small training programs, on one rank and on three.

``PARWRAP_PROGRAMS=300 pytest tests/test_programs.py`` looks at more of them, at others each time.
"""

import math
import os

import pytest
from hypothesis import HealthCheck, example, given, settings

from parwrap.testing.rank_launcher import start_fork_server
from programs import Program, programs, run

MORE = os.environ.get("PARWRAP_PROGRAMS")
FACTOR = int(os.environ.get("PARWRAP_PROGRAMS_FACTOR", "1"))  # more with --runslow

search = settings(
    max_examples=int(MORE or 6 * FACTOR),
    derandomize=not MORE,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


LEAVES_BEFORE_MORE_IS_TRAINED = Program(
    widths=(9, 3, 2),
    norm=True,
    dropout=False,
    owners=(2, 1, 0, 2),
    kinds=("sgd", "sgd", "sgd"),
    samples=14,
    batch_size=3,
    shuffle=True,
    drop_last=True,
    handmade=False,
    branch="data",
    epochs=4,
    leave="training",
    good=0.9654137793192669,
    accumulate=1,
    losses=1,
    clip=False,
    frozen=0,
    evaluate="never",
    scheduler="epochs",
    save="never",
    late=True,
)
"""A rank has left while a layer was frozen and another had no optimizer: sizes of buckets differed."""

LEAVES_WHILE_AN_AVERAGER_IS_GIVEN_UP = Program(
    widths=(8, 2, 5),
    norm=True,
    dropout=True,
    owners=(0, 1, 1, 2),
    kinds=("sgd", "adam", "sgd"),
    samples=20,
    batch_size=9,
    shuffle=False,
    drop_last=False,
    handmade=True,
    branch="chance",
    epochs=4,
    leave="epoch",
    good=1.217679706250979,
    accumulate=3,
    losses=1,
    clip=False,
    frozen=2,
    evaluate="no_grad",
    scheduler="loss",
    save="never",
    late=True,
)
"""One rank let go of an averager that the others, who had left, took again."""

LEAVES_BEFORE_A_LAYER_IS_UNFROZEN = Program(
    widths=(2, 2),
    norm=False,
    dropout=False,
    owners=(0, 0, 0),
    kinds=("sgd",),
    samples=44,
    batch_size=4,
    shuffle=False,
    drop_last=False,
    handmade=False,
    branch="chance",
    epochs=2,
    leave="training",
    good=1.0,
    accumulate=1,
    losses=1,
    clip=False,
    frozen=0,
    evaluate="never",
    scheduler="none",
    save="never",
    late=False,
)
"""Two ranks had left while a layer was frozen, which the third then trained now and then: sizes of buckets differed."""


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    start_fork_server()


def ended_well(results):
    """Whether all ranks ended with a model; errors of parwrap's own are allowed, by name."""
    assert [] == [result.stacks for result in results if result.stacks], "a rank hangs"
    errors = [result.error for result in results if result.error]

    assert [] == [error for error in errors if "ParwrapError" not in error[0]]
    return not errors


def largest(one, other):
    """The largest difference of two nested lists of numbers."""
    if isinstance(one, list):
        return max((largest(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else abs(one - other)


@pytest.mark.slow
@search
@given(programs())
def test_a_program_on_one_rank_does_what_it_does_without_parwrap(program):
    (plain,), (wrapped,) = run(program, 0), run(program, 1)

    assert plain == wrapped


@search
@example(LEAVES_BEFORE_MORE_IS_TRAINED)
@example(LEAVES_WHILE_AN_AVERAGER_IS_GIVEN_UP)
@example(LEAVES_BEFORE_A_LAYER_IS_UNFROZEN)
@given(programs())
def test_a_program_on_three_ranks_ends_and_the_ranks_agree(program):
    results = run(program, 3)
    if ended_well(results):
        for name in results[0].parameters:
            assert results[0].state[name] == results[1].state[name] == results[2].state[name], name


@pytest.mark.slow
@search
@given(programs().filter(lambda program: program.same_by_theory))
def test_ranks_that_split_each_batch_come_to_the_weights_of_a_single_process(program):
    (plain,), results = run(program, 0), run(program, 3, batch="global")

    assert ended_well(results)
    for name, value in plain.state.items():
        assert largest(value, results[0].state[name]) < 1e-4, name
