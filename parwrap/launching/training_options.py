"""The scopes around a script as options of ``parwrap.run``: a table for ``distributed``, whose options ``options.py`` explains, and one
for other decorators."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from parwrap.errors import UsageError
from parwrap.options import CHOICES

__all__ = ["DECORATORS", "OF_DECORATORS", "SCOPE_OPTIONS", "Given", "add_options", "decorators", "scope_options"]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer.") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from None


def _devices(text: str) -> str | list[int | str]:
    return text if text == "all" else [int(each) if each.isdecimal() else each for each in text.split(",")]


def _modules(text: str) -> int | tuple[str, ...]:
    """
    >>> _modules("Block, Head"), _modules("1000")
    (('Block', 'Head'), 1000)
    """
    return int(text) if text.isdecimal() else tuple(text.replace(" ", "").split(","))


def _choice(text: str) -> str:
    return text.replace("-", "_")


SCOPE_OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {"help": "Backend of the process group; by default nccl for GPUs and gloo for the CPU."},
    "seed": {"type": _whole, "help": "Seed of torch, numpy and python on all ranks."},
    "batch": {"help": "per_rank: each rank takes whole batches; global: each takes its part of every batch; by default per_rank."},
    "uneven": {"help": "If samples do not divide evenly: pad repeats some; drop skips some; join uses each once; by default pad."},
    "lr": {"help": "How learning rates follow the larger global batch: keep, linear or sqrt; by default keep."},
    "loss": {"help": "How the loss combines the samples of a batch: mean or sum; by default mean."},
    "draws": {
        "help": "by-pass: ranks draw their own random numbers in training passes; per-rank: from the first backward on; by default by-pass."
    },
    "strategy": {
        "help": f"How ranks train together: {'; '.join(f'{name}: {text}' for name, text in CHOICES['strategy'].items())}; by default ddp."
    },
    "bucket_cap_mb": {"type": _number, "help": "Size of DDP's gradient buckets in megabytes."},
    "gradient_as_bucket_view": {
        "action": "store_true",
        "help": "As in DistributedDataParallel: saves memory, but gradients kept across steps change.",
    },
    "compress": {"help": "Send gradients in fewer bytes: bf16, fp16 or powersgd."},
    "powersgd_rank": {"type": _whole, "help": "With --compress powersgd: the rank of the matrices that are sent; by default 4."},
    "wrap": {"type": _modules, "help": "With --strategy fsdp: modules to gather one by one: names of classes, or a number of parameters."},
    "every": {"type": _whole, "help": "With --strategy local_sgd: average weights every N steps; by default 8."},
    "warmup": {"type": _whole, "help": "With --strategy local_sgd: synchronous steps before the first local one."},
    "outer": {"help": "With --strategy local_sgd: nesterov adds an outer optimizer, as in DiLoCo."},
    "outer_lr": {"type": _number, "help": "With --outer: its learning rate; by default 0.7."},
    "outer_momentum": {"type": _number, "help": "With --outer: its momentum; by default 0.9."},
    "lock": {"action": "store_true", "help": "With --strategy hogwild: one rank at a time takes a step."},
    "servers": {"type": _whole, "help": "With --strategy parameter_server: the number of servers, which are the last ranks; by default 1."},
    "staleness": {
        "type": _whole,
        "help": "With --strategy parameter_server: how many steps a worker may be ahead of the slowest; 0: they step together.",
    },
    "timeout": {"type": _number, "help": "Seconds that a rank waits for another; by default 1800."},
}
"""The arguments of ``argparse`` for each option of the scope."""

DECORATORS: dict[str, dict[str, Any]] = {
    "accumulate": {"type": _whole, "help": "Take an optimizer step every so many batches."},
    "amp": {"help": "Mixed precision: bf16, fp16, auto, or one of Apex's levels, O0 to O3."},
    "data_parallel": {
        "type": _devices,
        "help": "One process on several GPUs, each with a part of every batch: all, or their numbers, such as 0,1.",
    },
    "sync_bn": {"action": "store_true", "help": "Batch norms use the statistics of all ranks."},
    "uniform_length": {"action": "store_true", "help": "Batches hold samples of similar length, with as little padding as possible."},
}
"""The arguments of ``argparse`` for each decorator of parwrap around the script. The value of an option is its first argument."""

OF_DECORATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "no_gather": ("data_parallel", {"action": "store_true", "help": "With --data-parallel: keep outputs and losses on their devices."}),
    "pad_value": ("uniform_length", {"type": _number, "help": "With --uniform-length: the value that sequences are padded with."}),
    "max_tokens": ("uniform_length", {"type": _whole, "help": "With --uniform-length: the most tokens of a batch, instead of samples."}),
    "multiple_of": ("uniform_length", {"type": _whole, "help": "With --uniform-length: round lengths up to a multiple of this."}),
}
"""The other options of these decorators, each with the name of its decorator and its arguments of ``argparse``."""


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add all of them to ``group``; one that is not given leaves no attribute."""
    others = {name: arguments for name, (_, arguments) in OF_DECORATORS.items()}
    for name, arguments in {**SCOPE_OPTIONS, **DECORATORS, **others}.items():
        given = {"type": _choice, **arguments} if name in CHOICES else arguments
        group.add_argument(*dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")), default=argparse.SUPPRESS, **given)


def scope_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options for the scope that ``arguments`` give. torchrun's ``--start-method`` is none of them.

    >>> scope_options(argparse.Namespace(seed=3, nnodes="1"))
    {'seed': 3}
    """
    return {name: getattr(arguments, name) for name in SCOPE_OPTIONS if hasattr(arguments, name)}


class Given(NamedTuple):
    """The arguments of a decorator."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return ", ".join([*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())])


def decorators(arguments: argparse.Namespace) -> dict[str, Given]:
    """The decorators that ``arguments`` ask for, each with its arguments.

    Raises:
        UsageError: an option of a decorator is given without the decorator.

    >>> found = decorators(argparse.Namespace(amp="bf16", uniform_length=True, pad_value=0, seed=3))
    >>> {name: str(given) for name, given in found.items()}
    {'amp': "'bf16'", 'uniform_length': 'pad_value=0'}
    """
    found = {}
    for name in DECORATORS:
        if hasattr(arguments, name):
            value = getattr(arguments, name)
            given = [each for each, (of, _) in OF_DECORATORS.items() if of == name and hasattr(arguments, each)]
            # --no-x is x=False
            kwargs = {each.removeprefix("no_"): not each.startswith("no_") and getattr(arguments, each) for each in given}
            if name == "data_parallel" and hasattr(arguments, "loss"):  # an option of the scope too
                kwargs["loss"] = arguments.loss
            found[name] = Given(() if value is True else (value,), kwargs)
    for name, (of, _) in OF_DECORATORS.items():
        if hasattr(arguments, name) and of not in found:
            option, decorator = (f"--{each.replace('_', '-')}" for each in (name, of))
            raise UsageError(f"{option} has no effect without {decorator}: add it. The script's own options come after its name.")
    return found
