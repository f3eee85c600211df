"""What every test starts from, whatever shell or CI has started pytest."""

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard():
    """A shell starts background jobs with SIGINT ignored, and processes started by a test would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _pytest_is_as_brief_as_by_hand():
    """On a CI machine pytest shows longer differences, also the one that a test has started."""
    with pytest.MonkeyPatch.context() as patch:  # a test's own must pickle
        patch.delenv("CI", raising=False)
        patch.delenv("BUILD_NUMBER", raising=False)
        yield
