"""The options of ``@distributed``: their values, what these mean, and which are refused. ``decorators/distributed.py`` applies them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from parwrap.errors import UsageError

__all__ = ["CHOICES", "STRATEGIES", "CurrentOptions", "Options", "Traits", "check_positive"]


class Traits(NamedTuple):
    """What callers need to know of a strategy, so that they never ask for its name.

    Attributes:
        kind: its class, in the file in ``strategies/`` with its name.
        meaning: what it does, for errors.
        one_model: whether ranks train one model, read shares, and end together.
        averages: whether a backward leaves averages in all gradients.
        in_buckets: whether it averages gradients in DDP's buckets, be it in a warm-up alone.
        same_weights: whether after each step all ranks hold the same whole weights, so that they can be compared with one process.
        waits: whether ranks wait for each other's steps; with servers, they do so only up to a ``staleness``.
        has_servers: whether some ranks train nothing, and serve the others.
    """

    kind: str
    meaning: str
    one_model: bool = True
    averages: bool = False
    in_buckets: bool = False
    same_weights: bool = False
    waits: bool = True
    has_servers: bool = False


STRATEGIES = {
    "ddp": Traits("DDP", "gradients are averaged in every backward pass", averages=True, in_buckets=True, same_weights=True),
    "zero1": Traits(
        "Zero1",
        "like ddp, but each rank holds the optimizer state of only a part of the parameters",
        averages=True,
        in_buckets=True,
        same_weights=True,
    ),
    "fsdp": Traits("FSDP", "each rank holds a part of the parameters, the gradients and the optimizer state", averages=True),
    "local_sgd": Traits("LocalSGD", "each rank steps on its own gradients, and weights are averaged every few steps", in_buckets=True),
    "hogwild": Traits("Hogwild", "each rank steps separately, without waiting, on weights that all ranks of a node share", waits=False),
    "parameter_server": Traits(
        "ParameterServer",
        "some ranks hold the weights and take the steps, with gradients from the other ranks, the workers",
        waits=False,
        has_servers=True,
    ),
    "none": Traits("Independent", "nothing is averaged, and every rank trains a separate model on all of the data", one_model=False),
}
"""The strategies: the class of each, and its traits."""

CHOICES: dict[str, dict[Any, str]] = {
    "batch": {
        "per_rank": "each rank takes batches of the loader's batch_size, so the global batch is batch_size times the number of ranks",
        "global": "the loader's batch_size is the global batch, and each rank takes a part of it",
        "whole": "the script sees the batch of one process: one tensor, whose rows lie on the ranks",
    },
    "uneven": {
        "pad": "samples are repeated from the beginning until all ranks have equally many",
        "drop": "samples that are not enough for all ranks are skipped",
        "join": "every sample is used once, and ranks are weighted by their number of samples",
    },
    "lr": {
        "keep": "learning rates are unchanged",
        "linear": "they are multiplied by the number of ranks, like the global batch",
        "sqrt": "they are multiplied by the square root of the number of ranks",
    },
    "loss": {"mean": "the loss is an average over the batch", "sum": "the loss is a sum over the batch"},
    "draws": {
        "by_pass": "each rank has random numbers of its own inside training passes, and all have the same outside",
        "per_rank": "each rank has random numbers of its own from the first backward on, for loops that draw their batches by hand",
    },
    "strategy": {name: traits.meaning for name, traits in STRATEGIES.items()},
    "compress": {
        None: "gradients are sent in full precision",
        "bf16": "they are sent in bfloat16",
        "fp16": "they are sent in float16",
        "powersgd": "each gradient matrix is approximated by the product of two small ones, which are sent",
    },
    "outer": {
        None: "weights are averaged, without an outer optimizer",
        "nesterov": "SGD with Nesterov momentum uses the averaged change of the weights as its gradient, as in DiLoCo",
    },
    "start_method": {
        None: "on Linux, ranks are forked from the calling process until CUDA has started there; otherwise they are spawned",
        "fork": "ranks inherit everything in this process, and compute with one thread each",
        "spawn": "ranks are new interpreters, which receive what the function uses",
    },
}
"""The options that have a fixed set of values, each value with its meaning, as errors list them."""

AVERAGING = tuple(name for name, traits in STRATEGIES.items() if traits.in_buckets)
TOGETHER = tuple(name for name, traits in STRATEGIES.items() if traits.one_model)

OF_STRATEGIES = {
    **dict.fromkeys(("bucket_cap_mb", "gradient_as_bucket_view", "compress", "powersgd_rank"), AVERAGING),
    **dict.fromkeys(("wrap", "shard_within_node"), ("fsdp",)),
    **dict.fromkeys(("every", "warmup", "outer", "outer_lr", "outer_momentum"), ("local_sgd",)),
    "lock": ("hogwild",),
    **dict.fromkeys(("servers", "staleness"), ("parameter_server",)),
    **dict.fromkeys(("batch", "uneven", "lr", "loss"), TOGETHER),
}
"""The options that only some strategies have, each with the strategies that have it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of :class:`parwrap.distributed`. A value or a combination that is refused raises :class:`UsageError`."""

    backend: str | None = None
    seed: int | None = None
    batch: Literal["per_rank", "global", "whole"] = "per_rank"
    uneven: Literal["pad", "drop", "join"] = "pad"
    lr: Literal["keep", "linear", "sqrt"] = "keep"
    loss: Literal["mean", "sum"] = "mean"
    draws: Literal["by_pass", "per_rank"] = "by_pass"
    strategy: Literal["ddp", "zero1", "fsdp", "local_sgd", "hogwild", "parameter_server", "none"] = "ddp"
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    compress: Literal["bf16", "fp16", "powersgd"] | None = None
    powersgd_rank: int = 4
    wrap: int | str | type | tuple[str | type, ...] | None = None
    shard_within_node: bool = False
    every: int = 8
    warmup: int = 0
    outer: Literal["nesterov"] | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    lock: bool = False
    servers: int = 1
    staleness: int | None = None
    timeout: float | timedelta | None = None
    nprocs: int | Literal["gpu", "cpu", "auto"] | None = None
    start_method: Literal["fork", "spawn"] | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in tuple(choices):
                meanings = "; ".join(f"{choice!r}: {meaning}" for choice, meaning in choices.items())
                raise UsageError(f"{name}={value!r} is not a valid value. Choose one of: {meanings}.")
        if self.lr != "keep" and self.batch == "global":
            raise UsageError(
                f"lr={self.lr!r} has no effect with batch='global', because the global batch is that of a single process: remove one of "
                "them."
            )
        for name in ("lr", "loss", "uneven", "draws"):
            if self.batch == "whole" and self.is_given(name):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} has no effect with batch='whole', where the script sees the batch of one process: "
                    "remove one of them."
                )
        if self.batch == "whole" and not self.traits.averages:
            able = ", ".join(repr(name) for name, traits in STRATEGIES.items() if traits.averages)
            raise UsageError(
                f"batch='whole' needs gradients that are averaged in each backward, but with strategy={self.strategy!r} they are not: "
                f"choose one of {able}."
            )
        if self.backend is not None and not (isinstance(self.backend, str) and dist.is_backend_available(self.backend)):
            there = ", ".join(name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name))
            raise UsageError(
                f"backend={self.backend!r} is not available in this build of torch, which has {there}. Remove backend=, and parwrap "
                "chooses one by the device."
            )
        if self.seed is not None and not (_whole(self.seed, 0) and self.seed < 2**64):
            raise UsageError(f"seed={self.seed!r} is not an integer from 0 to 2**64 - 1.")
        if self.bucket_cap_mb is not None and not (is_number(self.bucket_cap_mb) and self.bucket_cap_mb > 0):
            raise UsageError(f"bucket_cap_mb={self.bucket_cap_mb!r} is not a positive number of megabytes.")
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        if seconds is not None and not (is_number(seconds) and seconds >= 0.001):  # torch counts milliseconds
            problem = "is too small" if is_number(seconds) else "is not a finite number"
            raise UsageError(f"timeout={self.timeout!r} {problem}: pass at least 0.001 seconds, or a timedelta.")
        for name, strategies in OF_STRATEGIES.items():
            if self.is_given(name) and self.strategy not in strategies:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} has no effect with strategy={self.strategy!r}: remove it, or choose a strategy that "
                    f"has this option: {', '.join(map(repr, strategies))}."
                )
        names = self.wrap if isinstance(self.wrap, tuple) else (self.wrap,)
        if not (self.wrap is None or _whole(self.wrap, 1) or all(isinstance(each, (str, type)) for each in names)):
            raise UsageError(
                f"wrap={self.wrap!r} does not say which modules strategy='fsdp' gathers one by one: use a positive number of parameters, a "
                "class, the name of a class, or a tuple of classes and names."
            )
        if not (self.nprocs in (None, "gpu", "cpu", "auto") or _whole(self.nprocs, 1)):
            raise UsageError(f"nprocs={self.nprocs!r} is not a positive number of ranks, nor 'gpu', 'cpu' or 'auto'.")
        self._check_compression()
        self._check_local_sgd()
        self._check_separate_steps()

    def is_given(self, name: str) -> bool:
        """Whether the option has another value than its default."""
        return getattr(self, name) != getattr(Options, name)

    def _check_compression(self) -> None:
        check_positive(powersgd_rank=self.powersgd_rank)
        if self.powersgd_rank == 2:
            raise UsageError(
                "powersgd_rank=2 is refused, because torch's orthogonalization of two columns doubles gradients that are matrices of rank "
                "1. Use 1, or 3 and above."
            )
        if self.compress != "powersgd" and self.is_given("powersgd_rank"):
            raise UsageError(
                f"powersgd_rank={self.powersgd_rank!r} has no effect with compress={self.compress!r}: remove it, or use "
                "compress='powersgd'."
            )

    def _check_local_sgd(self) -> None:
        check_positive(every=self.every)
        if not _whole(self.warmup, 0):
            raise UsageError(f"warmup={self.warmup!r} is not a number of steps: pass an integer, 0 or more.")
        if not (is_number(self.outer_lr) and self.outer_lr > 0):
            raise UsageError(f"outer_lr={self.outer_lr!r} is not a positive learning rate.")
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise UsageError(f"outer_momentum={self.outer_momentum!r} is not in the range [0, 1).")
        for name in ("outer_lr", "outer_momentum"):
            if self.is_given(name) and self.outer is None:
                raise UsageError(f"{name}={getattr(self, name)!r} is an option of the outer optimizer: add outer='nesterov', or remove it.")
        for name, strategies in OF_STRATEGIES.items():
            if self.strategy == "local_sgd" and not self.warmup and strategies is AVERAGING and self.is_given(name):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} applies only to averaged gradients, which strategy='local_sgd' has only during its "
                    "warm-up: remove it, or set warmup= to a number of steps."
                )

    def _check_separate_steps(self) -> None:
        for name in ("lock", "gradient_as_bucket_view"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r} is neither True nor False.")
        check_positive(servers=self.servers)
        if self.staleness is not None and not _whole(self.staleness, 0):
            raise UsageError(f"staleness={self.staleness!r} is not a number of steps: pass an integer, 0 or more.")
        if not self.traits.waits and self.staleness != 0:
            instead = "remove it" + ", or set staleness=0, with which workers step together" * self.traits.has_servers
            for name, value in (("batch", "global"), ("uneven", "join"), ("loss", "sum"), ("lr", "linear"), ("lr", "sqrt")):
                if getattr(self, name) == value:
                    raise UsageError(
                        f"{name}={value!r} says how ranks share a step, but with strategy={self.strategy!r} each rank steps by itself: "
                        f"{instead}."
                    )

    @property
    def patience(self) -> timedelta | None:
        """``timeout`` as a ``timedelta``, as torch needs it; ``None`` if it is not set."""
        return timedelta(seconds=self.timeout) if isinstance(self.timeout, (int, float)) else self.timeout

    @property
    def traits(self) -> Traits:
        """What the strategy is like."""
        return STRATEGIES[self.strategy]

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other's steps, so that they can end a stream together."""
        return self.traits.waits or self.staleness is not None

    def lr_factor(self, size: int) -> float:
        """The number by which learning rates are multiplied on ``size`` ranks.

        >>> Options(lr="sqrt").lr_factor(4)
        2.0
        """
        return {"keep": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[self.lr]


def _whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def check_positive(**values: object) -> None:
    """Refuse values that are not positive integers. The error names the argument.

    Raises:
        UsageError: a value is not a positive integer.
    """
    for name, value in values.items():
        if not _whole(value, 1):
            raise UsageError(f"{name}={value!r} is not a positive integer.")


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number.

    >>> is_number(0.5), is_number(True), is_number("1"), is_number(float("inf"))
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class CurrentOptions:
    """The options of the innermost running function: call it, or where a call costs too much, read ``now``."""

    now: Options

    def __call__(self) -> Options:
        return self.now
