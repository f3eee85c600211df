"""The decorators for classes: add a mixin to the base classes, and it decorates the methods that train.

Only this file deals with classes; the decorators define what happens while a method runs.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import BuiltinMethodType
from typing import Any, ClassVar

from torch import nn

from parwrap.decorators.accumulate import accumulate
from parwrap.decorators.amp import amp
from parwrap.decorators.distributed import distributed
from parwrap.decorators.scope import ScopeDecorator, describe, refuse_undecoratable, scoped
from parwrap.errors import UsageError

__all__ = ["AccumulateMixin", "AmpMixin", "DistributedMixin"]

TRAINING = ("train", "fit")
"""The methods that are decorated, besides those that ``parwrap_methods`` names."""

_running: list[Any] = []
"""The instances, or classes, whose scopes are open."""


class _Mixin:
    """The common base of the mixins: the methods ``train`` and ``fit`` run in the scopes of decorators.

    The options of the decorators are class keywords; a subclass inherits those of its bases, and may override them. The class keyword or
    attribute ``parwrap_methods`` names further methods. If one such method calls another of the same instance, also by ``super()``, the
    scopes stay those of the first. The ``train(mode)`` of an ``nn.Module`` that sets the mode is not decorated unless it is named.

    Raises:
        UsageError: a class keyword that no mixin and no other base takes; none of its methods is decorated, or it lacks one that it names.
            Write ``parwrap_methods=()`` in a base class whose subclasses have the methods.
    """

    _decorator: ClassVar[Any]
    _keywords: ClassVar[dict[str, Any]] = {}
    parwrap_methods: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, decorator: type[ScopeDecorator] | None = None, **keywords: Any) -> None:
        if decorator is not None:  # one of the mixins below
            cls._decorator = decorator
            return
        if "parwrap_methods" in keywords:
            cls.parwrap_methods = keywords.pop("parwrap_methods")
        mixins: list[Any] = [base for base in cls.__mro__ if "_decorator" in base.__dict__]
        known = {name for mixin in mixins for name in mixin._decorator.option_names()}
        cls._keywords = {name: keywords.pop(name) for name in known & keywords.keys()}
        if keywords and isinstance(super().__init_subclass__, BuiltinMethodType):  # object is the next base, and it takes no keywords
            raise _unknown(cls, list(keywords), known)
        super().__init_subclass__(**keywords)
        options: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            options |= base.__dict__.get("_keywords", {})
        features = [mixin._decorator for mixin in mixins]
        decorators = [each(**{name: options[name] for name in each.option_names() if name in options}) for each in features]
        decorated = [_decorate(cls, name, decorators) for name in _names(cls)]
        own = [name for name, each in cls.__dict__.items() if inspect.isfunction(each) and not name.startswith("_")]
        if own and not any(decorated) and cls.__dict__.get("parwrap_methods") != ():  # cloudpickle fills a class later
            raise _without_methods(cls, mixins, own)


class DistributedMixin(_Mixin, decorator=distributed):
    """``@distributed`` for the training methods of a class.

    >>> class Trainer(DistributedMixin, batch="global"):
    ...     def fit(self, epochs):
    ...         return epochs * 2
    >>> Trainer().fit(3)
    6
    """


class AmpMixin(_Mixin, decorator=amp):
    """``@amp`` for the training methods of a class."""


class AccumulateMixin(_Mixin, decorator=accumulate):
    """``@accumulate`` for the training methods of a class."""


def _names(cls: type[_Mixin]) -> list[str]:
    """The methods to decorate: the usual ones that exist, and those that the class and its bases name."""
    named = cls.__dict__.get("parwrap_methods", ())
    if isinstance(named, str):
        raise UsageError(f"{cls.__name__}.parwrap_methods is {named!r}: use a tuple, such as ({named!r},).")
    for name in named:
        if inspect.getattr_static(cls, name, None) is None:
            raise UsageError(
                f"{cls.__name__}.parwrap_methods names {name!r}, which {describe(cls)} does not have: add the method, or remove the name."
            )
    every = [name for base in cls.__mro__ for name in base.__dict__.get("parwrap_methods", ())]
    usual = [name for name in TRAINING if not (name == "train" and _sets_mode(cls, inspect.getattr_static(cls, name, None)))]
    return list(dict.fromkeys([*usual, *every]))


def _decorate(cls: Any, name: str, decorators: list[ScopeDecorator]) -> bool:
    """Make the method ``name`` of ``cls`` run in the scopes of ``decorators``. Returns whether the method exists."""
    found = inspect.getattr_static(cls, name, None)
    if found is None:
        return False
    method = cls.__dict__[name] if name in cls.__dict__ else _inherited(cls, name, found)
    refuse_undecoratable(getattr(method, "__func__", method), type(decorators[0]).__name__)
    if isinstance(method, staticmethod):
        decorated: Any = staticmethod(scoped(method.__func__, decorators))
    elif isinstance(method, classmethod):
        decorated = classmethod(_once(method.__func__, decorators))
    else:
        decorated = _once(method, decorators)
    setattr(cls, name, decorated)
    return True


def _once(method: Callable[..., Any], decorators: list[ScopeDecorator]) -> Callable[..., Any]:
    """``method`` in the scopes of ``decorators``, or as it is if another method of the instance has opened its scopes."""

    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _running.append(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            _running.pop()

    decorated = scoped(noted, decorators)

    @functools.wraps(noted)
    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (method if any(each is self for each in _running) else decorated)(self, *args, **kwargs)

    once.__parwrap_scopes__ = (once, tuple(decorators))  # type: ignore[attr-defined]  # for parwrap.launch
    return once


def _inherited(cls: type, name: str, found: Any) -> Any:
    """A method that only calls the next one in the method resolution order, into which another class may still come."""
    if isinstance(found, staticmethod):
        return staticmethod(_like(found, lambda *args, **kwargs: getattr(super(cls, cls), name)(*args, **kwargs)))
    cooperative = _like(found, lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs))
    return classmethod(cooperative) if isinstance(found, classmethod) else cooperative


def _like(found: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the name and signature of ``found``."""
    functools.update_wrapper(function, found)
    vars(function).pop("__wrapped__")
    vars(function).pop("__parwrap_scopes__", None)
    with suppress(TypeError, ValueError):  # of a builtin
        function.__signature__ = inspect.signature(getattr(found, "__func__", found))  # type: ignore[attr-defined]
    return function


def _sets_mode(cls: type, train: Any) -> bool:
    """Whether ``train`` is a variant of ``nn.Module.train(mode=True)``, which ``eval()`` calls too, rather than a training loop."""
    if not (issubclass(cls, nn.Module) and inspect.isfunction(train)):
        return False
    mode = next(iter(list(inspect.signature(train).parameters.values())[1:]), None)
    return mode is not None and (mode.kind is mode.VAR_POSITIONAL or isinstance(mode.default, bool))


def _without_methods(cls: type, mixins: list[type[_Mixin]], own: list[str]) -> UsageError:
    """The error for a class with methods, on which its mixins would have no effect."""
    close = [name for name in own if name not in TRAINING and any(usual in name for usual in TRAINING)]
    mode = " (the train(mode) of a module only sets its mode)" if issubclass(cls, nn.Module) else ""
    return UsageError(
        f"{cls.__name__} has none of the methods that {' and '.join(mixin.__name__ for mixin in mixins)} would decorate: "
        f"{', '.join(TRAINING)}{mode}. Add one, or name your own with the class keyword, as in parwrap_methods="
        f"{(*(close or own)[:1],)!r}. If this is a base class and its subclasses have the methods, set parwrap_methods=()."
    )


def _unknown(cls: type, unknown: list[str], known: set[str]) -> UsageError:
    close = [found for name in unknown for found in difflib.get_close_matches(name, sorted(known), n=1)]
    hint = f"did you mean {close[0]!r}?" if close else f"they take {', '.join(sorted(known))}."
    return UsageError(f"{cls.__name__} has the class keyword {', '.join(unknown)}, which none of its mixins takes; {hint}")
