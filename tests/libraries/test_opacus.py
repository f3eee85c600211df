import sys

import pytest

from conftest import SCRIPTS, run

pytest.importorskip("opacus")


def test_gradients_that_its_optimizer_makes_are_refused(tmp_path):
    command = [sys.executable, "-m", "parwrap", "run", "--nproc-per-node", "2", str(SCRIPTS / "opacus_private.py")]
    with pytest.raises(AssertionError, match="by numbers that no backward averaged"):
        run(command, tmp_path / "together")
