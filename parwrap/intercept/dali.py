"""NVIDIA DALI, once it is imported: forwards what its readers, pipelines and iterators do to a ``PipelineInterceptor``.

DALI documents no common base of its readers and no way to change a pipeline before it is built. So this file, and no other, uses private
names of DALI, as of version 2.4.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Protocol

from parwrap.intercept.patch import Patch, when_imported

__all__ = ["PipelineInterceptor", "intercepting_pipelines", "pipelines_of", "readers_of"]


class PipelineInterceptor(Protocol):
    """The interceptor that decides how the ranks read pipelines."""

    def shard_reader(self, operator: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The reader ``operator`` is being made with the arguments ``given``. Returns those to change, with their new values."""

    def build_pipeline(self, pipeline: Any, operators: Collection[Any], seed: int | None) -> tuple[int | None, int]:
        """``pipeline``, which has these ``operators`` and this ``seed``, is about to be built. Returns this rank's seed and batch size."""

    def make_iterator(self, pipelines: Collection[Any], size: int) -> int | None:
        """An iterator of ``size`` samples of ``pipelines`` is made. Returns this rank's size; ``None`` if its readers got no shard."""

    def iterate_pipelines(self, iterator: Any, original: Callable[[Any], Iterator]) -> Iterator:
        """``iter(iterator)`` was called. Returns the iterator over its batches."""

    def length_of_pipelines(self, iterator: Any, original: Callable[[Any], int]) -> int:
        """``len(iterator)`` was called. Returns the length."""


@contextmanager
def intercepting_pipelines(interceptor: PipelineInterceptor) -> Iterator[None]:
    """Install ``interceptor`` inside the block, once the script imports DALI."""
    modules: dict[str, Callable[[ModuleType], list[Patch]]] = {
        "nvidia.dali.ops": lambda ops: [_readers(ops, interceptor)],
        "nvidia.dali.pipeline": lambda pipeline: [_builds(pipeline, interceptor)],
        "nvidia.dali.plugin.base_iterator": lambda plugin: _iterators(plugin._DaliBaseIterator, interceptor),
    }
    with ExitStack() as stack:
        for name, patches in modules.items():
            stack.enter_context(when_imported(name, patches))
        yield


def _readers(ops: Any, interceptor: PipelineInterceptor) -> Patch:
    def init(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        inputs, named_inputs, arguments, made_with, operator = args
        given = {**made_with, **arguments}
        instead = interceptor.shard_reader(instance, given) if operator.schema.HasArgument("num_shards") else {}
        if not instead:
            return wrapped(*args)
        kept = {name: value for name, value in arguments.items() if name not in instead}
        return wrapped(inputs, named_inputs, kept, made_with, _made_anew(ops, operator, {**made_with, **instead}))

    return Patch(ops._OperatorInstance, "__init__", init)


def _made_anew(ops: Any, operator: Any, arguments: dict[str, Any]) -> Any:
    """A copy of ``operator`` with ``arguments``. Arguments cannot be changed in place: a specification accepts each only once."""
    made = copy.copy(operator)
    made._spec = ops._b.OpSpec(operator._internal_schema_name or ops._schema_name(type(operator)))
    made._spec.AddArg("device", operator.device)
    ops._process_arguments(operator.schema, made._spec, arguments, operator._operator_name())
    return made


def _builds(module: Any, interceptor: PipelineInterceptor) -> Patch:
    def build(wrapped: Callable, pipeline: Any, args: tuple, kwargs: dict) -> None:
        own = pipeline._seed
        pipeline._seed, pipeline._max_batch_size = interceptor.build_pipeline(pipeline, pipeline._ops, own)
        try:
            wrapped(*args, **kwargs)
        finally:
            pipeline._seed = own

    return Patch(module.Pipeline, "_init_pipeline_backend", build)


def _iterators(kind: Any, interceptor: PipelineInterceptor) -> list[Patch]:
    signature, iterate, length = inspect.signature(kind.__init__), kind.__iter__, kind.__len__

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
        with ExitStack() as stack:
            for pipeline in pipelines:
                stack.enter_context(_of_equal_parts(pipeline))
            return wrapped(*given.args[1:], **given.kwargs)

    return [
        Patch(kind, "__init__", init),
        Patch(kind, "__iter__", lambda wrapped, iterator, args, kwargs: interceptor.iterate_pipelines(iterator, iterate)),
        Patch(kind, "__len__", lambda wrapped, iterator, args, kwargs: interceptor.length_of_pipelines(iterator, length)),
    ]


@contextmanager
def _of_equal_parts(pipeline: Any) -> Iterator[None]:
    """Inside the block, the readers of ``pipeline`` report shards that are all as long as the longest, because shards are padded.

    Otherwise, DALI's iterators return empty batches, and do not skip what they drop.
    """
    describe = pipeline.reader_meta

    def reader_meta(name: str) -> dict[str, Any]:
        meta = describe(name)
        parts = meta["number_of_shards"]
        return {**meta, "epoch_size": math.ceil(meta["epoch_size"] / parts) * parts}

    pipeline.reader_meta = reader_meta
    try:
        yield
    finally:
        del pipeline.reader_meta


def pipelines_of(iterator: Any) -> list[Any]:
    """The pipelines that ``iterator`` reads."""
    return iterator._pipes


def readers_of(pipelines: Collection[Any]) -> dict[str, list[Mapping[str, Any]]]:
    """DALI's description of each reader in ``pipelines``, by its name, for each pipeline that has it."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for pipeline in pipelines:
        for name, meta in pipeline.reader_meta().items():
            found.setdefault(name, []).append(meta)
    return found
