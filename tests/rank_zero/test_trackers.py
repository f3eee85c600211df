"""Experiment trackers: only rank 0's run exists, whatever the script asks for, and after the block the library is as before."""

import os
import sys
from types import FunctionType

import pytest

from parwrap.rank_zero.output import output_of
from parwrap.rank_zero.trackers import trackers_silent
from parwrap.ranks.collectives import barrier
from parwrap.ranks.group import rank


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a module that the test imports."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("early", [True, False])
def test_a_mode_of_wandb_that_the_script_passes_is_disabled_too(library, early):
    library("wandb", "def init(project=None, mode=None): return project, mode")
    if early:
        import wandb
    with trackers_silent():
        import wandb

        inside = wandb.init("p"), wandb.init("p", mode="online"), os.environ["WANDB_MODE"]

    assert (("p", "disabled"), ("p", "disabled"), "disabled") == inside
    assert ("p", "online") == wandb.init("p", mode="online")
    assert FunctionType is type(wandb.init)


@pytest.mark.parametrize("before", [None, "offline"])
def test_variables_are_put_back_after_an_error(before, monkeypatch):
    values = {"WANDB_MODE": before, "MLFLOW_RUN_ID": "7", "MLFLOW_TRACKING_URI": "http://server"}
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(KeyError, match="disabled, None"), trackers_silent():
        raise KeyError(f"{os.environ['WANDB_MODE']}, {os.environ.get('MLFLOW_RUN_ID')}")

    assert values == {name: os.environ.get(name) for name in values}


def test_a_program_without_trackers_imports_none():
    with trackers_silent():
        assert not {"wandb", "mlflow"} & sys.modules.keys()


@pytest.mark.ranks(2, fresh=True)
def test_a_real_run_of_mlflow_is_rank_zeros(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = (tmp_path / "runs").as_uri()
    mlflow.set_tracking_uri(place)
    if rank() == 0:
        with mlflow.start_run() as earlier:
            pass
        (tmp_path / "earlier").write_text(earlier.info.run_id)
    barrier()

    def script():
        mlflow.set_tracking_uri(place)
        mlflow.set_experiment("digits")
        with mlflow.start_run(run_name="first"):
            mlflow.log_metric("loss", 1.0 + rank())
        mlflow.set_experiment(experiment_id="0")
        with mlflow.start_run(run_id=(tmp_path / "earlier").read_text()):
            mlflow.log_metric("loss", 10.0 + rank())
        return mlflow.get_tracking_uri()

    if rank() == 0:
        assert place == script()
    else:
        with trackers_silent():
            assert place != script()
    barrier()

    if rank() > 0:
        with trackers_silent(), mlflow.start_run():  # in the default experiment
            mlflow.log_metric("loss", 5.0)

    assert place == mlflow.get_tracking_uri()
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert {"first": 1.0, "resumed": 10.0} == {
        "resumed" if run.info.experiment_id == "0" else run.info.run_name: run.data.metrics["loss"] for run in runs
    }


@pytest.mark.ranks(2, fresh=True)
def test_a_real_run_of_wandb_is_rank_zeros(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / str(rank())
    folder.mkdir()
    with output_of(rank()):
        run = wandb.init(project="p", mode="offline", dir=str(folder), settings=wandb.Settings(silent=True))
        wandb.log({"loss": 1.0})
        wandb.finish()

    assert (rank() > 0) == bool(run.disabled)
    assert (rank() == 0) == any(folder.glob("wandb/offline-run-*"))
