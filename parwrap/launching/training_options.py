"""The options of ``parwrap run`` that set the scopes around a script: a table for ``distributed``, and one for the other decorators.

``options.py`` explains the options of ``distributed``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from parwrap.errors import UsageError
from parwrap.options import CHOICES, OF_STRATEGIES, TOGETHER

__all__ = ["DECORATORS", "GROUPS", "OF_DECORATORS", "SCOPE_OPTIONS", "Given", "add_options", "decorators", "scope_options"]


GROUPS = ("launch", "training", "strategies", "output", "clusters", "help")
"""The groups of options in the help text, in its order."""


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
    """The value of ``--wrap``: names of classes, or a number of parameters.

    >>> _modules("Block, Head"), _modules("1000")
    (('Block', 'Head'), 1000)
    """
    return int(text) if text.isdecimal() else tuple(text.replace(" ", "").split(","))


def _choice(text: str) -> str:
    return text.replace("-", "_")


SCOPE_OPTIONS: dict[str, dict[str, Any]] = {
    "seed": {"type": _whole, "metavar": "N", "help": "of torch, numpy and python [rank 0's state]"},
    "batch": {"metavar": "per-rank|global|whole", "help": "a batch for each rank, a part, or rows of one [per-rank]"},
    "uneven": {"metavar": "pad|drop|join", "help": "repeat samples, skip some, or use each once [pad]"},
    "lr": {"metavar": "keep|linear|sqrt", "help": "scale learning rates by number of ranks [keep]"},
    "loss": {"metavar": "mean|sum", "help": "how the loss combines a batch's samples [mean]"},
    "draws": {"metavar": "by-pass|per-rank", "help": "ranks draw apart in training, or always [by-pass]"},
    "backend": {"metavar": "NAME", "help": "of the process group [nccl on GPUs, else gloo]"},
    "timeout": {"type": _number, "metavar": "SECONDS", "help": "how long a rank waits for another [1800]"},
    "strategy": {"metavar": "NAME", "help": f"{', '.join(CHOICES['strategy'])} [ddp]"},
    "bucket_cap_mb": {"type": _number, "metavar": "MB", "help": "size of DDP's gradient buckets [torch's]"},
    "gradient_as_bucket_view": {"action": "store_true", "help": "save memory; gradients change after the step"},
    "compress": {"metavar": "NAME", "help": "send gradients as bf16, fp16 or powersgd [none]"},
    "powersgd_rank": {"type": _whole, "metavar": "N", "help": "powersgd: rank of the matrices [4]"},
    "wrap": {"type": _modules, "metavar": "CLASSES|N", "help": "fsdp: modules to gather, or their least size"},
    "shard_within_node": {"action": "store_true", "help": "fsdp: shards in a node, replicas between nodes"},
    "every": {"type": _whole, "metavar": "N", "help": "local_sgd: steps between averages [8]"},
    "warmup": {"type": _whole, "metavar": "N", "help": "local_sgd: synchronous steps before them [0]"},
    "outer": {"metavar": "nesterov", "help": "local_sgd: an outer optimizer, as in DiLoCo"},
    "outer_lr": {"type": _number, "metavar": "LR", "help": "outer: learning rate [0.7]"},
    "outer_momentum": {"type": _number, "metavar": "M", "help": "outer: momentum [0.9]"},
    "lock": {"action": "store_true", "help": "hogwild: one rank at a time takes a step"},
    "servers": {"type": _whole, "metavar": "N", "help": "parameter_server: the last N ranks [1]"},
    "staleness": {"type": _whole, "metavar": "N", "help": "parameter_server: most steps ahead [any]"},
}
"""The arguments of ``argparse`` for each option of the scope."""

DECORATORS: dict[str, dict[str, Any]] = {
    "accumulate": {"type": _whole, "metavar": "N", "help": "an optimizer step every N batches"},
    "amp": {"metavar": "DTYPE", "help": "bf16, fp16, auto, or a level of Apex, O0 to O3"},
    "sync_bn": {"action": "store_true", "help": "batch norms use the statistics of all ranks"},
    "data_parallel": {"type": _devices, "metavar": "all|0,1", "help": "one process on several GPUs, by parts of batches"},
    "uniform_length": {"action": "store_true", "help": "batches of samples of similar length"},
    "progress": {"action": "store_true", "help": "a bar for a loop that shows none, on a terminal"},
    "explain": {"action": "store_true", "help": "at the end, a table of what each line did"},
}
"""The arguments of ``argparse`` for each decorator of parwrap around the script. An option's value is its decorator's first argument."""

OF_DECORATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "no_gather": ("data_parallel", {"action": "store_true", "help": "data_parallel: outputs stay on their devices"}),
    "pad_value": ("uniform_length", {"type": _number, "metavar": "X", "help": "uniform_length: what sequences are padded with"}),
    "max_tokens": ("uniform_length", {"type": _whole, "metavar": "N", "help": "uniform_length: most tokens in a batch"}),
    "report": ("explain", {"metavar": "FILE", "help": "explain: a file that gets the table as JSON"}),
    "html": ("explain", {"metavar": "FILE", "help": "explain: a file that gets the script with what each line did"}),
    "multiple_of": ("uniform_length", {"type": _whole, "metavar": "N", "help": "uniform_length: round lengths up to it [1]"}),
}
"""The other options of these decorators, each with the name of its decorator and its arguments of ``argparse``."""


class _Completion(argparse.Action):
    """Prints what makes a shell complete the commands of parwrap, and the options of those that run a script."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, shell: Any, *of_option: Any) -> NoReturn:
        try:
            import shtab
        except ImportError:
            raise UsageError("--shell-completion needs shtab: pip install 'parwrap[completion]'.") from None
        command = argparse.ArgumentParser(prog="parwrap")
        commands = command.add_subparsers()
        options = argparse.ArgumentParser(add_help=False)
        for each in parser._actions:
            if names := [name for name in each.option_strings if "_" not in name]:
                value = {"action": "store_true"} if each.nargs == 0 else {"choices": each.choices, "metavar": each.metavar}
                options.add_argument(*names, help=each.help, **value)
        options.add_argument("script", nargs="...").complete = shtab.FILE  # type: ignore[attr-defined]
        for name in ("run", "explain", "verify", "scaling"):
            commands.add_parser(name, parents=[options], add_help=False, help=name)  # shtab skips those without a help
        commands.add_parser("doctor", help="doctor")
        print(shtab.complete(command, shell=shell))
        parser.exit()


def add_options(groups: Mapping[str, argparse._ArgumentGroup]) -> None:
    """Add all options of this file to their ``groups``. Parsed arguments have no attribute for an option that is not given."""
    others = {name: arguments for name, (_, arguments) in OF_DECORATORS.items()}
    for name, arguments in {**SCOPE_OPTIONS, **DECORATORS, **others}.items():
        given = {"type": _choice, **arguments} if name in CHOICES else arguments
        spelled = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        groups[_group_of(name)].add_argument(*spelled, default=argparse.SUPPRESS, **given)
    spellings = ("--shell-completion", "--shell_completion")
    shells: dict[str, Any] = {
        "choices": ("bash", "zsh", "tcsh"),
        "metavar": "SHELL",
        "help": "print what completes options in bash, zsh or tcsh",
    }
    groups["help"].add_argument(*spellings, action=_Completion, **shells)


def _group_of(name: str) -> str:
    """The group of an option of this file.

    >>> [_group_of(name) for name in ("timeout", "batch", "wrap", "amp", "report")]
    ['launch', 'training', 'strategies', 'training', 'output']
    """
    if name == "strategy" or OF_STRATEGIES.get(name, TOGETHER) is not TOGETHER:
        return "strategies"
    if name in ("backend", "timeout"):
        return "launch"
    return "output" if name in ("progress", "explain", "report", "html") else "training"


def scope_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options in ``arguments`` that belong to the scope; torchrun's options, such as ``--start-method``, do not.

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
            raise UsageError(f"{option} has no effect without {decorator}: add it. Write the script's own options after the script.")
    return found
