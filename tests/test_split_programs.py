"""A search for programs whose ranks arrange different things: no row may be trained on by one rank and validated on by another.

``PARWRAP_PROGRAMS=300 pytest tests/test_split_programs.py`` looks at more of them, at others each time.
"""

import contextlib
import io
import os
import random

import pytest
from hypothesis import HealthCheck, example, given, seed, settings

import parwrap
from split_programs import DRAWS_FOR_EACH_STEP, Fold, programs, run

MORE = os.environ.get("PARWRAP_PROGRAMS")
FACTOR = int(os.environ.get("PARWRAP_PROGRAMS_FACTOR", "1"))  # more with --runslow

search = settings(
    max_examples=int(MORE or 3 * FACTOR),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)

PLAIN = Fold("sklearn", "whole", 7, 1, "none", False, "none", "none", True, False, "none")
EACH_STEP = Fold("numpy", "numpy", 7, 1, "module", True, "numpy", "none", False, False, "no_grad")
LEFT_OPEN = Fold("python", "loader by next", 7, 1, "function", True, "torch", "none", True, True, "bootstrap")
KNOWN_AFTER = 4
"""Steps after which a line that draws for each of them is known; those before draw the same on all ranks."""


def differ(sequences):
    """Whether ranks have drawn different values, as soon as it is known that they do so for every step."""
    drawn = [sequence[KNOWN_AFTER:] for sequence in sequences]
    return not drawn[0] or all(one != other for place, one in enumerate(drawn) for other in drawn[:place])


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size, timeout=3600 if MORE else 120)) for size in (2, 3)])
def test_what_is_arranged_is_the_same_on_all_ranks_and_what_is_drawn_for_every_step_differs(size):
    @seed(parwrap.broadcast(random.SystemRandom().randrange(2**32)) if MORE else 0)
    @search
    @example([PLAIN] * 4)
    @example([EACH_STEP] * 3)
    @example([LEFT_OPEN] * 3)
    @example([EACH_STEP, LEFT_OPEN, PLAIN])
    @given(programs())
    def check(folds):
        with contextlib.redirect_stderr(io.StringIO()):
            drawn = parwrap.distributed(run)(folds)
        for fold, ranks in zip(folds, zip(*parwrap.gather(drawn), strict=True), strict=True):
            for rank in ranks:
                assert ranks[0].arranged == rank.arranged
                assert set() == {*ranks[0].validation} & rank.trained
            if fold.batches in DRAWS_FOR_EACH_STEP:
                assert differ([rank.batches for rank in ranks])
            assert differ([rank.noise for rank in ranks])

    check()
