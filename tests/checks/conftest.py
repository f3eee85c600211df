"""The pages of a node with two ranks, both opened by the test's process."""

from __future__ import annotations

from collections import Counter

import pytest

from parwrap.checks.positions import Positions


@pytest.fixture
def pages(tmp_path, monkeypatch):
    both = []
    for rank in (0, 1):
        monkeypatch.setattr("parwrap.checks.positions._openings", Counter())  # as in a process of its own
        both.append(Positions(tmp_path, rank, range(2)))
    yield both
    for each in both:
        each.close()
