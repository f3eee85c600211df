"""The base class of parwrap's decorators: one class supports ``@f``, ``@f(...)`` and ``with f():``.

Decorators that stand directly on each other merge: their scopes open in the order of ``layer``, in whatever order they are written. Each
call opens new scopes. Subclasses define what a scope does.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, ClassVar, TypeVar

from parwrap.errors import UsageError
from parwrap.places import from_script, module_name, outside_of

F = TypeVar("F", bound=Callable)

__all__ = [
    "Call",
    "ScopeDecorator",
    "block_frame",
    "describe",
    "module_of",
    "refuse_undecoratable",
    "refuse_unrun",
    "scoped",
    "undecorated",
]


UNRUN = (
    (GeneratorType, "gi_frame", "a generator", "return list(...)"),
    (CoroutineType, "cr_frame", "a coroutine", "return asyncio.run(...)"),
    (AsyncGeneratorType, "ag_frame", "an async generator", "return a list of what it yields"),
)
"""Results whose code has not run yet: their type, the attribute that holds the frame, their name, and what to return instead."""


@dataclass(eq=False)
class Call:
    """What a scope opens around: a call of ``function``, or a ``with`` block if ``function`` is ``None``.

    Attributes:
        result: what the function has returned; a scope may replace it.
    """

    function: Callable | None = None
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None


class ScopeDecorator:
    """A scope around each call of a function, or around a ``with`` block.

    Subclasses set ``layer`` and implement :meth:`scope`.
    """

    layer: int = 0
    """The scopes of several decorators on one function open in ascending order of their layers."""

    of_command: bool = False
    """Whether an option of ``parwrap run`` has opened it around the script."""

    not_here: ClassVar[Mapping[str, str]] = {}
    """Advice for options that this decorator does not have, by the option's name."""

    _entered: list[AbstractContextManager]

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        for name in options:
            if name not in cls.option_names():
                raise UsageError(f"parwrap.{cls.__name__} has no option {name!r}; {cls._hint(name)}")
        decorator = super().__new__(cls)
        decorator._entered = []
        function: Any = arguments[0] if arguments else None
        is_function = callable(function) or isinstance(function, classmethod)
        if not arguments or (not is_function and cls._first_is_option()):
            return decorator
        decorator.__init__(**options)  # type: ignore[misc]
        return decorator(function)

    @classmethod
    def _hint(cls, name: str) -> str:
        """Advice for an option that does not exist."""
        if name in cls.not_here:
            return f"{cls.not_here[name]}."
        close = difflib.get_close_matches(name, cls.option_names(), n=1)
        return f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(cls.option_names()) or 'none'}."

    def __init__(self) -> None:
        """Subclasses take their options here."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names of this decorator's options."""
        return tuple(inspect.signature(cls.__init__).parameters)[1:]

    @classmethod
    def _first_is_option(cls) -> bool:
        """Whether this decorator's first option may be passed by position."""
        return any(each.kind is each.POSITIONAL_OR_KEYWORD for each in list(inspect.signature(cls.__init__).parameters.values())[1:])

    def scope(self, call: Call) -> AbstractContextManager:
        """The context manager for one call of a function, or for a ``with`` block."""
        raise NotImplementedError

    def __call__(self, decorated: F) -> F:
        function: Any = decorated
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self(function.__func__))  # type: ignore[return-value]
        refuse_undecoratable(function, type(self).__name__)
        return self.wrapped(function)

    def wrapped(self, function: Any) -> Any:
        """``function`` in the scope of this decorator and in those of the decorators that it has already."""
        plain, decorators = (function, ()) if inspect.ismethod(function) else undecorated(function)
        return scoped(plain, (self, *decorators))

    def elsewhere(self, call: Call) -> Callable[[Callable[[], Any]], Any] | None:
        """How to make ``call`` in other processes; ``None`` to make it in this process.

        The returned function gets a function without arguments that makes the call, runs it in other processes, and returns the result.
        """
        return None

    def returned(self, result: Any) -> Any:
        """What the caller gets for the ``result`` of a function, whose scope is still open."""
        return result

    def __enter__(self) -> Any:
        scope = self.scope(Call())
        entered = scope.__enter__()
        self._entered.append(scope)
        return entered

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


def scoped(function: Any, decorators: Iterable[ScopeDecorator]) -> Any:
    """``function`` in the scopes of ``decorators``, which open in the order of their layers."""
    ordered = tuple(sorted(decorators, key=lambda decorator: decorator.layer))

    @functools.wraps(function)
    def in_scopes(*args: Any, **kwargs: Any) -> Any:
        call = Call(function, args, kwargs)
        for decorator in ordered:
            if elsewhere := decorator.elsewhere(call):
                return elsewhere(functools.partial(in_scopes, *args, **kwargs))
        with ExitStack() as scopes:
            for decorator in ordered:
                scopes.enter_context(decorator.scope(call))
            call.result = function(*args, **kwargs)
            for decorator in ordered:
                call.result = decorator.returned(call.result)
            refuse_unrun(function, call.result)
        return call.result

    in_scopes.__parwrap_scopes__ = (in_scopes, ordered)  # type: ignore[attr-defined]
    return in_scopes


def undecorated(function: Any) -> tuple[Any, tuple[ScopeDecorator, ...]]:
    """A function or method without the decorators that :func:`scoped` has put around it, and these decorators.

    If another wrapper is outermost, nothing is taken off.
    """
    outer = getattr(function, "__func__", function)
    outermost, decorators = getattr(outer, "__parwrap_scopes__", (None, ()))
    if outermost is not outer:  # functools.wraps copies them to other wrappers
        return function, ()
    plain = outermost.__wrapped__
    return (plain.__get__(function.__self__) if inspect.ismethod(function) else plain), decorators


def refuse_undecoratable(function: Any, decorator: str) -> None:
    """Raise :class:`UsageError` if ``function`` is a class, an async function, a generator function, or not callable."""
    if inspect.isclass(function):
        problem = "is a class", "decorate the method that trains, or a function that uses the class"
    elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        problem = "is an async function, whose body runs after the call has returned", "decorate a plain function"
    elif inspect.isgeneratorfunction(function):
        problem = "is a generator function, whose body runs after the call has returned", "decorate the function that loops over it"
    elif not callable(function):
        raise UsageError(
            f"@parwrap.{decorator} decorates a function, and takes options by their names: {function!r} is neither a function nor a named "
            f"option. Write @parwrap.{decorator}(option=value)."
        )
    else:
        return
    raise UsageError(f"@parwrap.{decorator} cannot decorate {describe(function)}: it {problem[0]}. Instead, {problem[1]}.")


def refuse_unrun(function: Any, result: Any) -> None:
    """Raise :class:`UsageError` if ``result`` is code of the script that has not run to its end, and would run after the scope has closed.

    Generators of libraries, such as ``model.parameters()``, need no scope.
    """
    for kind, frame, what, run in UNRUN:
        if isinstance(result, kind) and (unrun := getattr(result, frame)) is not None and from_script(unrun):
            if isinstance(result, CoroutineType):
                result.close()  # else Python warns that it was never awaited
            raise UsageError(
                f"{describe(function)} returns {what}, whose body runs after the call has returned, without parwrap. Run it inside the "
                f"function: {run}."
            )


def module_of(function: Callable | None) -> str | None:
    """The name of the module that defines ``function``; for ``None``, of the module whose ``with`` block is being entered."""
    if function is not None:
        return getattr(function, "__module__", None)
    frame = block_frame()
    return None if frame is None else module_name(frame)


def block_frame() -> FrameType | None:
    """The frame whose ``with`` block is being entered."""
    return outside_of(sys._getframe(1), "contextlib", "parwrap")


def describe(function: Any) -> str:
    """Name, file and line of a function or class, for errors; the name alone if its source is not found.

    For a ``functools.partial``, they are those of its function; for another object with ``__call__``, those of its class; for a function
    under decorators such as ``torch.no_grad``, its own.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):
        function = type(function)
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", repr(function))
    try:
        return f"{name} ({inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]})"
    except (OSError, TypeError):
        return name
