"""The decorators for classes: a mixin beside the user's base class gives its training methods what the decorator would.

Only this file knows about classes; what holds while a method runs is the decorators' own.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType
from typing import Any, ClassVar

from torch import nn

from parwrap.decorator import ScopeDecorator, describe
from parwrap.errors import UsageError
from parwrap.features.accumulate import accumulate
from parwrap.features.amp import amp
from parwrap.features.distributed import distributed
from parwrap.features.sync_bn import sync_bn

__all__ = ["AccumulateMixin", "AmpMixin", "DistributedMixin", "SyncBNMixin"]

METHODS = ("train", "fit")

_running: list[Any] = []
"""The instances whose scopes are open."""


class _Mixin:
    """What the mixins share: the methods ``train`` and ``fit``, and those named in ``parwrap_methods``, run in the scopes.

    Options are class keywords or entries of the mapping ``parwrap_options``; a subclass has those of its bases, and its own instead. They
    are open once for an instance: where one such method calls another, also by ``super()``, they are those of the instance's class. What
    goes on from call to call, such as a loss scale, is the instance's own.

    The ``train(mode)`` of an ``nn.Module`` that sets the mode, overridden or not, is none of these methods unless it is named.

    Raises:
        UsageError: ``parwrap_options`` has one that no mixin takes, or ``parwrap_methods`` names what is no method.
    """

    _feature: ClassVar[Any]
    _keywords: ClassVar[dict[str, Any]] = {}
    parwrap_options: ClassVar[dict[str, Any]] = {}
    parwrap_methods: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, feature: type[ScopeDecorator] | None = None, **keywords: Any) -> None:
        if feature is not None:
            cls._feature = feature
            return
        features = list(_features(cls))
        known = {name for feature in features for name in feature.option_names()}
        cls._keywords = {name: value for name, value in keywords.items() if name in known}
        others = {name: value for name, value in keywords.items() if name not in known}
        if others and isinstance(super().__init_subclass__, BuiltinMethodType):  # of object: no other base takes any
            raise _unknown_options(f"{cls.__name__} has the class keyword", others, known)
        super().__init_subclass__(**others)
        options: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            options |= {**base.__dict__.get("parwrap_options", {}), **base.__dict__.get("_keywords", {})}
        if unknown := sorted(options.keys() - known):
            raise _unknown_options(f"{cls.__name__}.parwrap_options has", unknown, known)

        def decorators() -> list[ScopeDecorator]:
            return [feature(**{name: options[name] for name in feature.option_names() if name in options}) for feature in features]

        of = _OfEach(decorators)
        if isinstance(cls.parwrap_methods, str):
            raise UsageError(f"{cls.__name__}.parwrap_methods is {cls.parwrap_methods!r}: give a tuple, as in ({cls.parwrap_methods!r},).")
        named = [name for base in cls.__mro__ for name in base.__dict__.get("parwrap_methods", ())]
        for name in dict.fromkeys((*METHODS, *named)):
            _decorate(cls, name, name in named, of)


def _unknown_options(where: str, unknown: Iterable[str], known: Iterable[str]) -> UsageError:
    hints = [difflib.get_close_matches(name, known, n=1) for name in unknown]
    close = [repr(name) for found in hints for name in found]
    hint = f"did you mean {', '.join(close)}?" if all(hints) else f"they take {', '.join(sorted(known))}."
    return UsageError(f"{where} {', '.join(unknown)}, which none of its mixins takes; {hint}")


class _OfEach:
    """The decorators of each instance of a class, and of the class itself, for methods that have no instance."""

    def __init__(self, make: Callable[[], list[ScopeDecorator]]) -> None:
        self._make, self.of_class = make, make()
        self._known: dict[int, tuple[weakref.ref, list[ScopeDecorator]]] = {}

    def __call__(self, instance: Any) -> list[ScopeDecorator]:
        """Those of ``instance``, for as long as it lives; an id, since not every instance has a hash."""
        key = id(instance)
        if key not in self._known:
            self._known[key] = weakref.ref(instance, lambda gone: self._known.pop(key, None)), self._make()
        return self._known[key][1]

    def __reduce__(self) -> Any:
        return _OfEach, (self._make,)  # instances have others where they are sent


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


def _features(cls: type) -> Iterator[type[ScopeDecorator]]:
    """Those of the mixins that ``cls`` derives from."""
    return (base.__dict__["_feature"] for base in cls.__mro__ if "_feature" in base.__dict__)


def _decorate(cls: Any, name: str, named: bool, of: _OfEach) -> None:
    """Have the method ``name`` of ``cls`` run in the scopes of decorators."""
    found = inspect.getattr_static(cls, name, None)
    if found is None:
        if name in cls.__dict__.get("parwrap_methods", ()):
            raise UsageError(
                f"{cls.__name__}.parwrap_methods names {name!r}, which {describe(cls)} has not: give it the method, or leave it out."
            )
        return
    if not named and name == "train" and issubclass(cls, nn.Module) and _sets_mode(found):
        return
    method = cls.__dict__[name] if name in cls.__dict__ else _inherited(cls, name, found)
    scoped = _decorated(method, of.of_class)  # which refuses what cannot be
    setattr(cls, name, scoped if isinstance(method, staticmethod) else _once(method, of))


def _sets_mode(train: Any) -> bool:
    """Whether ``train`` is a form of ``nn.Module.train(mode=True)``, which ``eval()`` calls too, and no training loop."""
    if not inspect.isfunction(train):
        return False
    mode = next(iter(list(inspect.signature(train).parameters.values())[1:]), None)
    return mode is not None and (mode.kind is mode.VAR_POSITIONAL or isinstance(mode.default, bool))


def _decorated(method: Any, decorators: list[ScopeDecorator]) -> Any:
    for decorator in decorators:
        method = decorator(method)
    return method


def _once(method: Any, of: _OfEach) -> Any:
    """``method`` in the scopes of the instance's decorators, or plain where one of the same instance has opened them already."""
    if isinstance(method, classmethod):
        return classmethod(_once(method.__func__, of))

    @functools.wraps(method)
    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(each is self for each in _running):
            return method(self, *args, **kwargs)
        _running.append(self)
        try:
            return _decorated(method, of(self))(self, *args, **kwargs)
        finally:
            _running.pop()

    once.__parwrap_decorators__ = of.of_class  # type: ignore[attr-defined]
    return once


def _inherited(cls: type, name: str, found: Any) -> Any:
    """A method that only calls the next one in the method resolution order, which another class may still get into."""
    if isinstance(found, staticmethod):
        return staticmethod(_called(found, lambda *args, **kwargs: getattr(super(cls, cls), name)(*args, **kwargs)))
    cooperative = _called(found, lambda self, *args, **kwargs: getattr(super(cls, self), name)(*args, **kwargs))
    return classmethod(cooperative) if isinstance(found, classmethod) else cooperative


def _called(found: Any, function: Callable) -> Callable:
    """``function`` by the name of ``found``, whose code it is not."""
    functools.update_wrapper(function, found)
    del function.__dict__["__wrapped__"]
    return function
