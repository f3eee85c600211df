"""What a launched rank has as stdin. That reading it is an error is shown with the launcher."""

from __future__ import annotations

import os

from parwrap.ranks.stdin import _is_null


def test_an_empty_stdin_is_left_to_programs_that_a_rank_starts():
    reading, writing = os.pipe()
    with open(os.devnull) as null, open(reading), open(writing, "w"):
        assert (True, False) == (_is_null(null.fileno()), _is_null(reading))
