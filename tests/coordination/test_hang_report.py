"""The report of a hang."""

import contextlib
import io
import time

import pytest

import parwrap
from parwrap.group.group import current


def stuck_in_the_script(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.ranks(2, timeout=30)
def test_a_long_wait_is_reported_once_with_the_place_of_every_rank():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), parwrap.distributed(hang_after=0.4):
        if parwrap.rank() == 1:
            stuck_in_the_script(2)
        parwrap.barrier()
    if parwrap.rank() == 0:
        assert 1 == said.getvalue().count("has waited for more than 0.4 s")
        assert f"Rank 0 has been in parwrap.barrier ({__file__}:" in said.getvalue()
        assert "Rank 1 has left random state" in said.getvalue()
        assert f"is in the script at {__file__}:" in said.getvalue()


@pytest.mark.ranks(2)
def test_a_run_that_goes_on_reports_nothing():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), parwrap.distributed(hang_after=0.3):
        for _ in range(20):
            parwrap.barrier()
            stuck_in_the_script(0.03)
    current()

    assert "waited" not in said.getvalue()
