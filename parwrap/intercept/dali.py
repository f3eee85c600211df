"""NVIDIA DALI, once it is imported: forward the calls of its readers, pipelines and iterators to an interceptor.

DALI documents no common base class of ``fn.readers`` and ``ops.readers``, and no way to change a pipeline before it is built. So this file,
and no other, uses some of DALI's private names, as of version 2.4.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, when_imported

__all__ = ["build_patches", "iterate_patches", "iterator_patches", "length_patches", "pipelines_of", "readers_of", "shard_patches"]

OPERATORS, PIPELINES, ITERATORS = "nvidia.dali.ops", "nvidia.dali.pipeline", "nvidia.dali.plugin.base_iterator"
"""The modules to patch. DALI imports the last one only with a plugin, such as the one for torch."""


def shard_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    """Calls ``shard_reader`` for readers that can be sharded, with the arguments ``given``."""

    def patches(ops: ModuleType) -> list[Patch]:
        def init(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
            inputs, named_inputs, arguments, made_with, operator = args
            if not operator.schema.HasArgument("num_shards"):
                return wrapped(*args)
            instead = interceptor.shard_reader(instance, {**made_with, **arguments})
            if not instead:
                return wrapped(*args)
            kept = {name: value for name, value in arguments.items() if name not in instead}
            return wrapped(inputs, named_inputs, kept, made_with, _made_anew(ops, operator, {**made_with, **instead}))

        return [Patch(ops._OperatorInstance, "__init__", init)]

    return [when_imported(OPERATORS, patches)]


def _made_anew(ops: Any, operator: Any, arguments: dict[str, Any]) -> Any:
    """A copy of ``operator`` with other ``arguments``, because its specification accepts each argument only once."""
    made = copy.copy(operator)
    made._spec = ops._b.OpSpec(operator._internal_schema_name or ops._schema_name(type(operator)))
    made._spec.AddArg("device", operator.device)
    ops._process_arguments(operator.schema, made._spec, arguments, operator._operator_name())
    return made


def build_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def patches(module: ModuleType) -> list[Patch]:
        def build(wrapped: Callable, pipeline: Any, args: tuple, kwargs: dict) -> None:
            own = pipeline._seed
            pipeline._seed, pipeline._max_batch_size = interceptor.build_pipeline(pipeline, pipeline._ops, own)
            try:
                wrapped(*args, **kwargs)
            finally:
                pipeline._seed = own

        return [Patch(module.Pipeline, "_init_pipeline_backend", build)]

    return [when_imported(PIPELINES, patches)]


def iterator_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def patches(module: ModuleType) -> list[Patch]:
        signature = inspect.signature(module._DaliBaseIterator.__init__)

        def init(wrapped: Callable, iterator: Any, args: tuple, kwargs: dict) -> None:
            given = signature.bind(iterator, *args, **kwargs)
            given.apply_defaults()
            pipelines = given.arguments["pipelines"]
            pipelines = pipelines if isinstance(pipelines, list) else [pipelines]
            for pipeline in pipelines:
                pipeline.build()
            size = interceptor.make_iterator(pipelines, given.arguments["size"])
            if size is None:
                return wrapped(*args, **kwargs)
            if size > 0:
                given.arguments.update(size=size, last_batch_padded=True)
            with _alike(pipelines):
                return wrapped(*given.args[1:], **given.kwargs)

        return [Patch(module._DaliBaseIterator, "__init__", init)]

    return [when_imported(ITERATORS, patches)]


@contextmanager
def _alike(pipelines: Sequence[Any]) -> Iterator[None]:
    """Inside the block, make all readers' parts as long as the longest. They are padded, so an iterator may rely on this.

    Otherwise, DALI's iterators return empty batches, and do not skip what they drop.
    """

    def described(describe: Callable) -> Callable:
        def reader_meta(name: str) -> dict[str, Any]:
            meta = describe(name)
            parts = meta["number_of_shards"]
            return {**meta, "epoch_size": math.ceil(meta["epoch_size"] / parts) * parts}

        return reader_meta

    for pipeline in pipelines:
        pipeline.reader_meta = described(pipeline.reader_meta)
    try:
        yield
    finally:
        for pipeline in pipelines:
            del pipeline.reader_meta


def iterate_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    """Like :func:`parwrap.intercept.loader.iterate_patches`, for DALI's iterators."""
    return _iterator_method("__iter__", interceptor.iterate_pipelines)


def length_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    """Like :func:`parwrap.intercept.loader.length_patches`, for DALI's iterators."""
    return _iterator_method("__len__", interceptor.length_of_pipelines)


def _iterator_method(name: str, instead: Callable[[Any, Callable], Any]) -> list[AbstractContextManager]:
    """Make the method ``name`` of an iterator call ``instead(iterator, original)``."""

    def patches(module: ModuleType) -> list[Patch]:
        original = getattr(module._DaliBaseIterator, name)

        def method(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            return instead(instance, original)

        return [Patch(module._DaliBaseIterator, name, method)]

    return [when_imported(ITERATORS, patches)]


def pipelines_of(iterator: Any) -> list[Any]:
    """The pipelines that ``iterator`` reads."""
    return iterator._pipes


def readers_of(pipelines: Iterable[Any]) -> dict[str, list[dict[str, Any]]]:
    """DALI's metadata of each reader in ``pipelines``, by the reader's name, for each pipeline that has it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for pipeline in pipelines:
        for name, meta in pipeline.reader_meta().items():
            found.setdefault(name, []).append(meta)
    return found
