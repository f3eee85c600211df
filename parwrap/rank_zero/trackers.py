"""wandb and mlflow are silent on ranks above 0, by their own switches: there is one run, rank 0's (contract, rule 8).

wandb has a mode for this. mlflow has none, so such a rank logs to a temporary directory. A tracker that is imported later is silenced then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from parwrap.intercept.patch import Patch, when_imported
from parwrap.ranks.environment import environment

__all__ = ["trackers_silent"]

ON_A_SERVER = ("run_id", "experiment_id", "parent_run_id")
"""Arguments of mlflow that name something which exists only on the server of rank 0."""

VARIABLES = {"WANDB_MODE": "disabled", "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_RUN_ID": None, "MLFLOW_EXPERIMENT_ID": None}
"""The variables of a silent rank and its child processes; those with ``None`` are unset."""


@contextmanager
def trackers_silent() -> Iterator[None]:
    """Inside the block, wandb and mlflow log neither to a server nor to the script's directory.

    Only an ``MlflowClient`` that the script builds with a server's address still logs there.
    """
    variables = {**VARIABLES, "MLFLOW_TRACKING_URI": os.environ.get("MLFLOW_TRACKING_URI")}
    with environment(variables), when_imported("wandb", _wandb), when_imported("mlflow", _mlflow):
        yield


def _wandb(wandb: Any) -> list[Patch]:
    """Patch ``wandb.init`` to run with ``mode="disabled"``: a ``mode`` of the script would win over the variable."""

    def init(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return wrapped(*args, **{**kwargs, "mode": "disabled"})

    return [Patch(wandb, "init", init)]


def _mlflow(mlflow: Any) -> list[Patch | AbstractContextManager]:
    """mlflow logs to a temporary directory, whatever the script sets. A run that the script resumes is a new one there."""

    def set_tracking_uri(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        pass

    def start_run(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return wrapped(**{name: value for name, value in kwargs.items() if name not in ON_A_SERVER})

    def set_experiment(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return wrapped(args[0] if args else kwargs.get("experiment_name") or "Default")

    return [_elsewhere(mlflow), *(Patch(mlflow, each.__name__, each) for each in (set_tracking_uri, start_run, set_experiment))]


@contextmanager
def _elsewhere(mlflow: Any) -> Iterator[None]:
    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    with tempfile.TemporaryDirectory(prefix="parwrap-mlflow-", ignore_cleanup_errors=True) as folder:
        mlflow.set_tracking_uri((Path(folder) / "mlruns").as_uri())  # mlflow makes its default experiment only in a new folder
        try:
            yield
        finally:
            mlflow.set_tracking_uri(before)
