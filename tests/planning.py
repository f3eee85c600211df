"""A directory with something to run, and the plan for a command line in it."""

import pytest

from parwrap.launching.command.plan import LaunchPlan, plan_launch


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A directory with a script and a package, no settings of torchrun's and none of OpenMP's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "digits.py").touch()


def plan(*argv: str, gpus: int = 0, cores: int = 8, **environ: str) -> LaunchPlan:
    return plan_launch(argv, environ, gpus, cores)
