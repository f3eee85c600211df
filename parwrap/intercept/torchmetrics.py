"""torchmetrics, once it is imported: the batches that update a metric, and whether its states are summed over ranks.

A metric, and each clone of it, has its ``update`` as an instance attribute. So this file patches the private method that creates the
attribute, as of version 1.9.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, when_imported
from parwrap.torch_private.modules import registered_modules

__all__ = ["collection_patches", "sync_patches", "update_patches"]

MODULE, COLLECTIONS = "torchmetrics.metric", "torchmetrics.collections"


def update_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def make_update(wrapped: Callable, metric: Any, args: tuple, kwargs: dict) -> Callable:
        update = wrapped(*args, **kwargs)

        @functools.wraps(update)
        def noted(*args: Any, **kwargs: Any) -> Any:
            interceptor.update_metric(metric)
            return update(*args, **kwargs)

        return noted

    return [when_imported(MODULE, lambda module: [Patch(module.Metric, "_wrap_update", make_update)])]


def collection_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def compute(wrapped: Callable, collection: Any, args: tuple, kwargs: dict) -> Any:
        for names in collection.compute_groups.values():
            interceptor.share_states([registered_modules(collection)[name] for name in names])
        return wrapped(*args, **kwargs)

    return [when_imported(COLLECTIONS, lambda module: [Patch(module.MetricCollection, "compute", compute)])]


def sync_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def sync(wrapped: Callable, metric: Any, args: tuple, kwargs: dict) -> None:
        if interceptor.syncs_metric(metric):
            return wrapped(*args, **kwargs)
        return wrapped(*args[:3], **{**kwargs, "distributed_available": lambda: False})

    return [when_imported(MODULE, lambda module: [Patch(module.Metric, "sync", sync)])]
