"""Experiment trackers on ranks above 0 stay silent, by their own switches: there is one run, rank 0's (contract, rule 8).

wandb has a mode for this. mlflow has none, so such a rank logs to a temporary directory. A tracker that is imported later is silenced then.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from parwrap.intercept.import_hooks import imports_watched
from parwrap.intercept.patch import Patch, installed
from parwrap.ranks.environment import environment

__all__ = ["trackers_silent"]

ON_A_SERVER = ("run_id", "experiment_id", "parent_run_id")
"""Arguments of mlflow that name something which exists only on the server of rank 0."""

VARIABLES = {"WANDB_MODE": "disabled", "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_RUN_ID": None, "MLFLOW_EXPERIMENT_ID": None}
"""The variables of a silent rank and its child processes; those with ``None`` are unset."""


@contextmanager
def trackers_silent() -> Iterator[None]:
    """Inside the block, nothing that this process logs with wandb or mlflow reaches a server or the directory of the script."""
    with ExitStack() as stack:
        stack.enter_context(environment({**VARIABLES, "MLFLOW_TRACKING_URI": os.environ.get("MLFLOW_TRACKING_URI")}))
        for name, silent in {"wandb": _wandb, "mlflow": _mlflow}.items():
            begin = partial(_begin, stack, silent)
            if name in sys.modules:
                begin(sys.modules[name])
            else:
                stack.enter_context(imports_watched(name, begin))
        yield


def _begin(stack: ExitStack, silent: Callable[[Any], AbstractContextManager[None]], module: Any) -> None:
    stack.enter_context(silent(module))


def _wandb(wandb: Any) -> AbstractContextManager[None]:
    """``wandb.init`` is disabled. Its argument ``mode`` would win over the variable."""

    def init(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return wrapped(*args, **{**kwargs, "mode": "disabled"})

    return installed([Patch(wandb, "init", init)])


@contextmanager
def _mlflow(mlflow: Any) -> Iterator[None]:
    """mlflow logs to a temporary directory, whatever the script sets. A run that the script resumes is a new one there."""

    def set_tracking_uri(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        pass

    def start_run(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return wrapped(**{name: value for name, value in kwargs.items() if name not in ON_A_SERVER})

    def set_experiment(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return wrapped(args[0] if args else kwargs.get("experiment_name") or "Default")

    patches = [Patch(mlflow, each.__name__, each) for each in (set_tracking_uri, start_run, set_experiment)]
    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    with tempfile.TemporaryDirectory(prefix="parwrap-mlflow-", ignore_cleanup_errors=True) as folder:
        mlflow.set_tracking_uri(Path(folder).as_uri())
        try:
            with installed(patches):
                yield
        finally:
            mlflow.set_tracking_uri(before)
