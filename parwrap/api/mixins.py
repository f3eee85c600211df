"""The decorators for classes: add a mixin to the base classes, and it decorates the training methods.

Only this file deals with classes; the decorators define what happens while a method runs.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import BuiltinMethodType
from typing import Any, ClassVar, NamedTuple

from torch import nn

from parwrap.api.accumulate import accumulate
from parwrap.api.amp import amp
from parwrap.api.distributed import distributed
from parwrap.api.evaluate import evaluate
from parwrap.api.sync_bn import sync_bn
from parwrap.api.uniform_length import uniform_length
from parwrap.decorator import ScopeDecorator, describe
from parwrap.errors import UsageError

__all__ = ["AccumulateMixin", "AmpMixin", "DistributedMixin", "EvaluateMixin", "SyncBNMixin", "UniformLengthMixin"]


class _Methods(NamedTuple):
    """The methods that a mixin decorates.

    Attributes:
        usual: their default names.
        named_in: the class attribute and keyword that names further methods.
    """

    usual: tuple[str, ...]
    named_in: str


TRAINING = _Methods(("train", "fit"), "parwrap_methods")
EVALUATING = _Methods(("evaluate", "validate", "test"), "parwrap_evaluate_methods")

_running: list[tuple[Any, _Methods]] = []
"""The instances with open scopes, each with the method that opened them."""


class _Mixin:
    """The common base of the mixins: methods run in the scopes of decorators.

    Mixins for training decorate ``train`` and ``fit``, and the methods that ``parwrap_methods`` names. ``EvaluateMixin`` decorates
    ``evaluate``, ``validate`` and ``test``, and those that ``parwrap_evaluate_methods`` names. Both are class keywords or attributes, and
    subclasses inherit them.

    Options are class keywords or entries of the mapping ``parwrap_options``; a subclass inherits those of its bases, and may override them.
    They open once for an instance: if one such method calls another, also by ``super()``, the options are those of the instance's class.
    State kept from call to call, such as a loss scale, belongs to the instance.

    The ``train(mode)`` of an ``nn.Module`` that sets the mode, overridden or not, is not decorated unless it is named.

    Raises:
        UsageError: ``parwrap_options`` has an option that no mixin takes, or the class has none of the methods, or lacks one that it names.
            Set ``parwrap_methods=()`` in a base class whose subclasses have the methods.
    """

    _feature: ClassVar[Any]
    _methods: ClassVar[_Methods]
    _keywords: ClassVar[dict[str, Any]] = {}
    parwrap_options: ClassVar[dict[str, Any]] = {}
    parwrap_methods: ClassVar[tuple[str, ...]] = ()
    parwrap_evaluate_methods: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, feature: type[ScopeDecorator] | None = None, **keywords: Any) -> None:
        if feature is not None:
            cls._feature, cls._methods = feature, EVALUATING if feature is evaluate else TRAINING
            return
        mixins = list(_mixins(cls))
        kinds = list(dict.fromkeys(mixin._methods for mixin in mixins))
        named = {kind.named_in for kind in kinds}
        for name in sorted(named & keywords.keys()):
            setattr(cls, name, keywords.pop(name))
        known = {name for mixin in mixins for name in mixin._feature.option_names()}
        cls._keywords = {name: value for name, value in keywords.items() if name in known}
        others = {name: value for name, value in keywords.items() if name not in known}
        if others and isinstance(super().__init_subclass__, BuiltinMethodType):  # object is the next base, and it takes no keywords
            raise _unknown_options(f"{cls.__name__} has the class keyword", others, known | named)
        super().__init_subclass__(**others)
        options: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            options |= {**base.__dict__.get("parwrap_options", {}), **base.__dict__.get("_keywords", {})}
        if unknown := sorted(options.keys() - known):
            raise _unknown_options(f"{cls.__name__}.parwrap_options has", unknown, known)
        for methods in (TRAINING, EVALUATING):
            _check_named(cls, methods, methods in kinds)
        for kind in kinds:
            _decorate_methods(cls, kind, [mixin for mixin in mixins if mixin._methods is kind], options)


def _decorate_methods(cls: type, methods: _Methods, mixins: list[type[_Mixin]], options: dict[str, Any]) -> None:
    """Make ``methods`` of ``cls`` run in the scopes of the decorators of ``mixins``."""

    def decorators() -> list[ScopeDecorator]:
        features = [mixin._feature for mixin in mixins]
        return [feature(**{name: options[name] for name in feature.option_names() if name in options}) for feature in features]

    of = _OfEach(decorators)
    named = [name for base in cls.__mro__ for name in base.__dict__.get(methods.named_in, ())]
    found = [_decorate(cls, name, name in named, of, methods) for name in dict.fromkeys((*methods.usual, *named))]
    if not any(found) and cls.__dict__.get(methods.named_in) != () and not _is_filled_later():
        raise _without_methods(cls, methods, mixins)


def _is_filled_later() -> bool:
    """Whether cloudpickle is building the class, which is empty at first."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "_make_skeleton_class":
        frame = frame.f_back
    return frame.f_back is not None


def _check_named(cls: type, methods: _Methods, taken: bool) -> None:
    """Raise :class:`UsageError` if ``cls`` names its methods in an invalid way."""
    named = cls.__dict__.get(methods.named_in, ())
    if isinstance(named, str):
        raise UsageError(f"{cls.__name__}.{methods.named_in} is {named!r}: use a tuple, such as ({named!r},).")
    if named and not taken:
        other = next(kind for kind in (TRAINING, EVALUATING) if kind is not methods)
        raise UsageError(f"{cls.__name__} has {methods.named_in}, but no mixin that uses it: its mixins use {other.named_in}.")
    for name in named:
        if inspect.getattr_static(cls, name, None) is None:
            raise UsageError(
                f"{cls.__name__}.{methods.named_in} names {name!r}, which {describe(cls)} does not have: add the method, or remove the "
                "name."
            )


def _without_methods(cls: type, methods: _Methods, mixins: list[type[_Mixin]]) -> UsageError:
    """The error for a class on which its mixins would have no effect."""
    own = [name for name, each in cls.__dict__.items() if inspect.isfunction(each) and not name.startswith("_")]
    close = [name for name in own if name not in methods.usual and any(usual in name for usual in (*methods.usual, "valid", "eval"))]
    example = f"{methods.named_in}={(*(close or own)[:1],) or ('run',)!r}"
    mode = " (the train(mode) of a module only sets its mode)" if "train" in methods.usual and hasattr(cls, "train") else ""
    return UsageError(
        f"{cls.__name__} has none of the methods that {' and '.join(mixin.__name__ for mixin in mixins)} would decorate: "
        f"{', '.join(methods.usual)}{mode}. Add one, or name your own with the class keyword, as in {example}. If this is a base class "
        f"and its subclasses have the methods, set {methods.named_in}=()."
    )


def _unknown_options(where: str, unknown: Iterable[str], known: Iterable[str]) -> UsageError:
    hints = [difflib.get_close_matches(name, known, n=1) for name in unknown]
    close = [repr(name) for found in hints for name in found]
    hint = f"did you mean {', '.join(close)}?" if all(hints) else f"they take {', '.join(sorted(known))}."
    return UsageError(f"{where} {', '.join(unknown)}, which none of its mixins takes; {hint}")


class _OfEach:
    """The decorators of each instance of a class, and of the class itself, for methods without an instance."""

    def __init__(self, make: Callable[[], list[ScopeDecorator]]) -> None:
        self._make, self.of_class = make, make()
        self._known: dict[int, tuple[weakref.ref[Any], list[ScopeDecorator], dict[Callable[..., Any], Callable[..., Any]]]] = {}

    def __call__(self, instance: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` with the decorators of ``instance``, kept while it lives; by id, since not every instance has a hash."""
        key = id(instance)
        if key not in self._known:
            self._known[key] = weakref.ref(instance, lambda gone: self._known.pop(key, None)), self._make(), {}
        _, decorators, decorated = self._known[key]
        if method not in decorated:
            decorated[method] = _decorated(method, decorators)
        return decorated[method]

    def __reduce__(self) -> Any:
        return _OfEach, (self._make,)  # after pickling, instances get new ones


class DistributedMixin(_Mixin, feature=distributed):
    """``@distributed`` for the training methods of a class.

    >>> class Trainer(DistributedMixin, batch="global"):
    ...     def fit(self, epochs):
    ...         return epochs * 2
    >>> Trainer().fit(3)
    6
    """


class AmpMixin(_Mixin, feature=amp):
    """``@amp`` for the training methods of a class."""


class SyncBNMixin(_Mixin, feature=sync_bn):
    """``@sync_bn`` for the training methods of a class."""


class AccumulateMixin(_Mixin, feature=accumulate):
    """``@accumulate`` for the training methods of a class."""


class UniformLengthMixin(_Mixin, feature=uniform_length):
    """``@uniform_length`` for the training methods of a class."""


class EvaluateMixin(_Mixin, feature=evaluate):
    """``@evaluate`` for the methods ``evaluate``, ``validate`` and ``test`` of a class, and those in ``parwrap_evaluate_methods``.

    >>> class Trainer(EvaluateMixin, reduce="sum"):
    ...     def evaluate(self, losses):
    ...         return sum(losses)
    >>> Trainer().evaluate([0.5, 0.25])
    0.75
    """


def _mixins(cls: type) -> Iterator[type[_Mixin]]:
    """The mixins that ``cls`` derives from."""
    return (base for base in cls.__mro__ if "_feature" in base.__dict__)


def _decorate(cls: Any, name: str, named: bool, of: _OfEach, methods: _Methods) -> bool:
    """Make the method ``name`` of ``cls`` run in the scopes of decorators. Returns whether the method exists."""
    found = inspect.getattr_static(cls, name, None)
    if found is None or (not named and name == "train" and issubclass(cls, nn.Module) and _sets_mode(found)):
        return False
    method = cls.__dict__[name] if name in cls.__dict__ else _inherited(cls, name, found)
    scoped = _decorated(method, of.of_class)  # raises for an invalid one
    setattr(cls, name, scoped if isinstance(method, staticmethod) else _once(method, of, methods))
    return True


def _sets_mode(train: Any) -> bool:
    """Whether ``train`` is a variant of ``nn.Module.train(mode=True)``, which ``eval()`` calls too, rather than a training loop."""
    if not inspect.isfunction(train):
        return False
    mode = next(iter(list(inspect.signature(train).parameters.values())[1:]), None)
    return mode is not None and (mode.kind is mode.VAR_POSITIONAL or isinstance(mode.default, bool))


def _decorated(method: Any, decorators: list[ScopeDecorator]) -> Any:
    for decorator in decorators:
        method = decorator(method)
    return method


def _once(method: Any, of: _OfEach, methods: _Methods) -> Any:
    """``method`` in the scopes of the instance's decorators, or unchanged if another method of the instance has already opened them."""
    if isinstance(method, classmethod):
        return classmethod(_once(method.__func__, of, methods))

    @functools.wraps(method)
    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(each is self and open_for is methods for each, open_for in _running):
            return method(self, *args, **kwargs)
        _running.append((self, methods))
        try:
            return of(self, method)(self, *args, **kwargs)
        finally:
            _running.pop()

    once.__parwrap_decorators__ = of.of_class  # type: ignore[attr-defined]
    return once


def _inherited(cls: type, name: str, found: Any) -> Any:
    """A method that only calls the next one in the method resolution order, into which another class may still come."""
    if isinstance(found, staticmethod):
        return staticmethod(_called(found, lambda *args, **kwargs: getattr(super(cls, cls), name)(*args, **kwargs)))
    cooperative = _called(found, lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs))
    return classmethod(cooperative) if isinstance(found, classmethod) else cooperative


def _called(found: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the name and signature of ``found``."""
    functools.update_wrapper(function, found)
    del function.__dict__["__wrapped__"]
    with suppress(TypeError, ValueError):  # of a builtin
        function.__signature__ = inspect.signature(getattr(found, "__func__", found))  # type: ignore[attr-defined]
    return function
