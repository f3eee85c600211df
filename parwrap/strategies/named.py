"""Maps a strategy's name to its class, loaded on demand, and to its options."""

from __future__ import annotations

from pkgutil import resolve_name

from parwrap.errors import UsageError
from parwrap.options import CHOICES, OF_STRATEGIES, Options
from parwrap.strategies.common.strategy import Strategy

__all__ = ["strategy_of"]

HOMES = {
    "ddp": "parwrap.strategies.ddp.ddp:DDP",
    "local_sgd": "parwrap.strategies.local_sgd.local_sgd:LocalSGD",
    "hogwild": "parwrap.strategies.hogwild.hogwild:Hogwild",
    "fsdp": "parwrap.strategies.fsdp.fsdp:FSDP",
    "none": "parwrap.strategies.none:NoStrategy",
    "zero1": "parwrap.strategies.zero1.zero1:Zero1",
    "parameter_server": "parwrap.strategies.parameter_server.parameter_server:ParameterServer",
}


def strategy_of(options: Options) -> type[Strategy]:
    """The strategy for ``options``.

    Raises:
        UsageError: the strategy conflicts with another option.
    """
    chosen: type[Strategy] = resolve_name(HOMES[options.strategy])
    for name in OF_STRATEGIES:
        value = getattr(options, name)
        if name not in chosen.OPTIONS and value != getattr(Options, name):
            having = [repr(each) for each in CHOICES["strategy"] if name in resolve_name(HOMES[each]).OPTIONS]
            raise UsageError(
                f"{name}={value!r} has no effect with strategy={options.strategy!r}: remove it, or choose a strategy that has this "
                f"option: {' or '.join(having)}."
            )
    chosen.check(options)
    return chosen
