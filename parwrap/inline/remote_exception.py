"""An exception of a rank, in parts that can be sent to the process that started the rank, and be raised there."""

from __future__ import annotations

import builtins
import pickle
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["RemoteException", "RemoteTraceback", "can_pickle"]

MEMBERS = ("errno", "strerror", "filename", "filename2", "name", "path")
GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())


def can_pickle(thing: Any) -> bool:
    """Whether ``thing`` can be sent to another process.

    >>> can_pickle(ValueError("no")), can_pickle(lambda: 0)
    (True, False)
    """
    try:
        pickle.loads(pickle.dumps(thing))
    except Exception:
        return False
    return True


class RemoteTraceback(Exception):
    """The traceback of an exception on another rank; it becomes the cause of the exception raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteException(NamedTuple):
    """An exception as parts that can be pickled, whatever arguments its ``__init__`` takes.

    Attributes:
        kind: the class of the exception, or the nearest base class that can be pickled.
        name: the name of the exception's own class.
        args, attributes: those of the exception, with the ``repr`` of values that cannot be pickled.
        members: attributes of built-in exceptions that are in neither of these, such as ``errno``.
        grouped: the exceptions in an exception group.
        text: the formatted traceback.
    """

    kind: type[BaseException]
    name: str
    args: tuple
    attributes: dict[str, Any]
    members: dict[str, Any]
    grouped: tuple[RemoteException, ...]
    text: str

    @classmethod
    def of(cls, error: BaseException, outermost: TracebackType | None) -> RemoteException:
        """Take ``error`` apart into parts that can be pickled; the traceback begins at ``outermost``."""
        kind = next(each for each in type(error).__mro__ if can_pickle(each))
        name = type(error).__qualname__
        args = tuple(each if can_pickle(each) else repr(each) for each in error.args)
        attributes = {name: each if can_pickle(each) else repr(each) for name, each in vars(error).items()}
        names = MEMBERS if isinstance(error, (OSError, ImportError)) else ()
        members = {name: value for name in names if (value := getattr(error, name, None)) is not None and can_pickle(value)}
        grouped = tuple(cls.of(each, None) for each in error.exceptions) if isinstance(error, GROUP) else ()
        text = "".join(traceback.format_exception(type(error), error, outermost)).rstrip()
        return cls(kind, name, args, attributes, members, grouped, text)

    def error(self, who: str) -> BaseException:
        """Rebuild the exception, or one of the nearest base class that allows it, with the rank ``who`` and its traceback as the cause."""
        error = self._error()
        BaseException.__setattr__(error, "__cause__", RemoteTraceback(f"{who} failed:\n{self.text}"))  # bypasses a frozen class
        return error

    def _error(self) -> BaseException:
        here = [kind for kind in self.kind.__subclasses__() if kind.__qualname__ == self.name]  # of pytest.skip(), under no importable name
        for kind in (*here, *self.kind.__mro__):
            with suppress(Exception):
                return self._rebuilt(kind)
        return BaseException()

    def _rebuilt(self, kind: type[BaseException]) -> BaseException:
        args = (self.args[0], [each._error() for each in self.grouped]) if issubclass(kind, GROUP) else self.args
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind, *args)
        BaseException.__setattr__(error, "args", args)
        vars(error).update(self.attributes)
        for name, value in self.members.items() if issubclass(kind, (OSError, ImportError)) else ():
            setattr(error, name, value)
        return error
