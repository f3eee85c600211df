"""The decorators for classes: add a mixin to the base classes, and it decorates the methods that train or evaluate.

Only this file deals with classes; the decorators define what happens while a method runs.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import BuiltinMethodType
from typing import Any, ClassVar, NamedTuple

from torch import nn

from parwrap.decorators.accumulate import accumulate
from parwrap.decorators.amp import amp
from parwrap.decorators.distributed import distributed
from parwrap.decorators.evaluate import evaluate
from parwrap.decorators.scope import ScopeDecorator, describe, refuse_undecoratable
from parwrap.decorators.sync_bn import sync_bn
from parwrap.decorators.uniform_length import uniform_length
from parwrap.errors import UsageError

__all__ = ["AccumulateMixin", "AmpMixin", "DistributedMixin", "EvaluateMixin", "SyncBNMixin", "UniformLengthMixin"]


class _Methods(NamedTuple):
    """The methods that a mixin decorates.

    Attributes:
        usual: their default names.
        named_in: the class keyword or attribute that names further methods.
    """

    usual: tuple[str, ...]
    named_in: str


TRAINING = _Methods(("train", "fit"), "parwrap_methods")
EVALUATING = _Methods(("evaluate", "validate", "test"), "parwrap_evaluate_methods")

_running: dict[object, tuple[Any, _Methods]] = {}
"""For each running call of a decorated method, its instance (or class) and the kind of method. Calls in threads may end in any order."""


class _Mixin:
    """The common base of the mixins: methods run in the scopes of decorators.

    Mixins decorate ``train`` and ``fit``, and the methods that the class keyword or attribute ``parwrap_methods`` names. ``EvaluateMixin``
    decorates ``evaluate``, ``validate`` and ``test``, and those that ``parwrap_evaluate_methods`` names.

    The options of the decorators are class keywords; a subclass inherits those of its bases, and may override them. If one decorated
    method calls another of the same instance, also by ``super()``, no further scope opens. The ``train(mode)`` of an ``nn.Module`` that
    sets the mode is not decorated unless it is named.

    Raises:
        UsageError: a class keyword that neither a mixin nor another base takes; a class without a method to decorate, or without a method
            that it names. Write ``parwrap_methods=()`` in a base class whose subclasses have the methods.
    """

    _decorator: ClassVar[Any]
    _methods: ClassVar[_Methods]
    _keywords: ClassVar[dict[str, Any]] = {}
    parwrap_methods: ClassVar[Sequence[str]] = ()
    parwrap_evaluate_methods: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, decorator: type[ScopeDecorator] | None = None, **keywords: Any) -> None:
        if decorator is not None:  # one of the mixins below
            cls._decorator, cls._methods = decorator, EVALUATING if decorator is evaluate else TRAINING
            return
        for name in [each.named_in for each in (TRAINING, EVALUATING) if each.named_in in keywords]:
            setattr(cls, name, keywords.pop(name))
        mixins: list[Any] = [base for base in cls.__mro__ if "_decorator" in base.__dict__]
        known = {name for mixin in mixins for name in mixin._decorator.option_names()}
        cls._keywords = {name: keywords.pop(name) for name in known & keywords.keys()}
        if keywords and isinstance(super().__init_subclass__, BuiltinMethodType):  # object is the next base, and it takes no keywords
            raise _unknown(cls, list(keywords), known)
        super().__init_subclass__(**keywords)
        options: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            options |= base.__dict__.get("_keywords", {})
        own = [name for name, each in cls.__dict__.items() if inspect.isfunction(each) and not name.startswith("_")]
        for methods in (TRAINING, EVALUATING):
            of_these = [mixin for mixin in mixins if mixin._methods is methods]
            features = [mixin._decorator for mixin in of_these]
            decorators = [each(**{name: options[name] for name in each.option_names() if name in options}) for each in features]
            names = _names(cls, methods)
            if names and not decorators and cls.__dict__.get(methods.named_in):
                raise _without_mixin(cls, methods)
            decorated = [_decorate(cls, name, methods, decorators) for name in names if decorators]
            if decorators and own and not any(decorated) and cls.__dict__.get(methods.named_in) != ():  # cloudpickle fills a class later
                raise _without_methods(cls, methods, of_these, own)


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
    """``@accumulate`` for the training methods of a class, as in ``class Trainer(AccumulateMixin, steps=4)``."""


class SyncBNMixin(_Mixin, decorator=sync_bn):
    """``@sync_bn`` for the training methods of a class."""


class UniformLengthMixin(_Mixin, decorator=uniform_length):
    """``@uniform_length`` for the training methods of a class."""


class EvaluateMixin(_Mixin, decorator=evaluate):
    """``@evaluate`` for the methods ``evaluate``, ``validate`` and ``test`` of a class, and those that ``parwrap_evaluate_methods`` names.

    >>> class Trainer(EvaluateMixin, reduce="sum"):
    ...     def evaluate(self, losses):
    ...         return sum(losses)
    >>> Trainer().evaluate([0.5, 0.25])
    0.75
    """


def _names(cls: type[_Mixin], methods: _Methods) -> list[str]:
    """The methods to decorate: the usual ones, and those that the class and its bases name."""
    named = cls.__dict__.get(methods.named_in, ())
    if isinstance(named, str):
        raise UsageError(f"{cls.__name__}.{methods.named_in} is {named!r}, not a tuple of names: write ({named!r},).")
    for name in named:
        if inspect.getattr_static(cls, name, None) is None:
            raise UsageError(
                f"{cls.__name__}.{methods.named_in} names {name!r}, which {describe(cls)} does not have: add the method, or remove the "
                "name."
            )
    every = [name for base in cls.__mro__ for name in base.__dict__.get(methods.named_in, ())]
    usual = [name for name in methods.usual if not (name == "train" and _sets_mode(cls, inspect.getattr_static(cls, name, None)))]
    return list(dict.fromkeys([*usual, *every]))


def _decorate(cls: Any, name: str, methods: _Methods, decorators: list[ScopeDecorator]) -> bool:
    """Decorate the method ``name`` of ``cls`` with ``decorators``. Returns whether the method exists."""
    found = inspect.getattr_static(cls, name, None)
    if found is None:
        return False
    method = cls.__dict__[name] if name in cls.__dict__ else _inherited(cls, name, found)
    refuse_undecoratable(getattr(method, "__func__", method), type(decorators[0]).__name__)
    if isinstance(method, staticmethod):
        decorated: Any = staticmethod(_wrapped(method.__func__, decorators))
    elif isinstance(method, classmethod):
        decorated = classmethod(_once(method.__func__, methods, decorators))
    else:
        decorated = _once(method, methods, decorators)
    setattr(cls, name, decorated)
    return True


def _wrapped(function: Any, decorators: list[ScopeDecorator]) -> Any:
    for decorator in decorators:
        function = decorator.wrapped(function)
    return function


def _once(method: Callable[..., Any], methods: _Methods, decorators: list[ScopeDecorator]) -> Callable[..., Any]:
    """``method`` in the scopes of ``decorators``. If another of the ``methods`` of the instance runs already, its scopes are used."""

    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _running[call := object()] = self, methods
        try:
            return method(self, *args, **kwargs)
        finally:
            del _running[call]

    decorated = _wrapped(noted, decorators)

    @functools.wraps(noted)
    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs = any(each is self and of is methods for each, of in list(_running.values()))
        return (method if runs else decorated)(self, *args, **kwargs)

    if methods is TRAINING:
        once.__parwrap_scopes__ = (once, tuple(decorators))  # type: ignore[attr-defined]  # for parwrap.launch
    return once


def _inherited(cls: type, name: str, found: Any) -> Any:
    """A method for ``cls`` that only calls the next ``name`` in the method resolution order, which depends on the subclass."""
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


def _without_methods(cls: type, methods: _Methods, mixins: list[type[_Mixin]], own: list[str]) -> UsageError:
    """The error for a class with methods, on which its mixins would have no effect."""
    close = [name for name in own if name not in TRAINING.usual and any(usual in name for usual in (*methods.usual, "valid"))]
    mode = " (the train(mode) of a module only sets its mode)" if methods is TRAINING and issubclass(cls, nn.Module) else ""
    return UsageError(
        f"{cls.__name__} has none of the methods that {' and '.join(mixin.__name__ for mixin in mixins)} would decorate: "
        f"{', '.join(methods.usual)}{mode}. Add one, or name your own with the class keyword, as in {methods.named_in}="
        f"{(*(close or own)[:1],)!r}. If this is a base class and its subclasses have the methods, set {methods.named_in}=()."
    )


def _without_mixin(cls: type, methods: _Methods) -> UsageError:
    other = EVALUATING if methods is TRAINING else TRAINING
    return UsageError(
        f"{cls.__name__} has {methods.named_in}, but no mixin that uses it: its mixins use {other.named_in}. Write that instead."
    )


def _unknown(cls: type, unknown: list[str], known: set[str]) -> UsageError:
    close = [found for name in unknown for found in difflib.get_close_matches(name, sorted(known), n=1)]
    hint = f"did you mean {close[0]!r}?" if close else f"they take {', '.join(sorted(known))}."
    keywords = "keyword" if len(unknown) == 1 else "keywords"
    return UsageError(f"{cls.__name__} has the class {keywords} {' and '.join(unknown)}, which none of its mixins takes; {hint}")
