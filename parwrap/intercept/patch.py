"""Replaces an attribute inside a ``with`` block, and restores the identical object.

A patch is data: an owner, a name and a wrapper. wrapt installs and removes it; only this file imports wrapt. ``intercept/`` has the
wrappers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pkgutil import resolve_name
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import wrapt

from parwrap.intercept.import_hooks import imports_watched
from parwrap.intercept.imported_names import Namespaces
from parwrap.torch_private.dynamo import DYNAMO, inlined, left_out, outside

__all__ = ["Patch", "caller", "installed", "is_patched", "when_imported"]

BETWEEN = ("wrapt.", f"{DYNAMO}.", outside.__module__, "parwrap.intercept.")
"""How the names of modules begin whose frames may be between a wrapper and its caller. With its C extension, wrapt has none.

If two interceptors patch a call, the wrapper of one calls that of the other.
"""


class Patch(NamedTuple):
    """Wraps ``owner.name`` with ``wrapper(wrapped, instance, args, kwargs)``.

    Attributes:
        traced: the function that ``torch.compile`` compiles instead of the wrapped one, if any; a function of a module.
        outside: why ``torch.compile`` must call the wrapper outside of its graphs; empty if graphs may go without it.
    """

    owner: Any
    name: str
    wrapper: Callable[[Callable, Any, tuple, dict], Any]
    traced: Callable | None = None
    outside: str = ""


class _Wrapped(wrapt.FunctionWrapper):
    """A wrapped function that is copied and pickled by reference, like a function: a model may have ``print`` as its logger."""

    def __init__(self, wrapped: Any, patch: Patch) -> None:
        super().__init__(wrapped, outside(patch.wrapper, patch.outside) if patch.outside else patch.wrapper)
        owner = patch.owner
        place = f"{owner.__module__}:{owner.__qualname__}." if isinstance(owner, type) else f"{owner.__name__}:"
        self._self_reference = place + patch.name

    def __copy__(self) -> _Wrapped:
        return self

    def __deepcopy__(self, memo: dict) -> _Wrapped:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return resolve_name, (self._self_reference,)


@functools.cache
def _wrapping(traced: Callable | None, why: str) -> type[_Wrapped]:
    """The class of wrapped functions that are compiled as ``traced``, or not because of ``why``. It differs for each: guards compare it."""
    if traced is not None:
        return type("_Traced", (_Wrapped,), inlined(traced))
    return type("_Outside", (_Wrapped,), left_out(why)) if why else _Wrapped


def is_patched(function: Any) -> bool:
    """Whether a call of ``function`` goes to a wrapper that :func:`installed` has put there.

    >>> is_patched(print)
    False
    """
    return isinstance(function, _Wrapped)


def caller() -> FrameType:
    """The frame that called the patched function whose wrapper calls this."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith(BETWEEN):
        frame = frame.f_back
    return frame


@contextmanager
def installed(patches: Iterable[Patch | AbstractContextManager], module: str | None = None) -> Iterator[None]:
    """Install ``patches`` in order and remove them in reverse, also when the block raises.

    Functions of modules are also patched under the names with which the user's modules, and the package of ``module``, imported them. A
    context manager among the patches is entered in order: it intercepts a call for which torch has a hook.

    Args:
        patches: the patches to install.
        module: the name of the running function's module, whose package is searched for such names even if it is an installed one.

    >>> import math
    >>> before = math.sqrt
    >>> with installed([Patch(math, "sqrt", lambda wrapped, instance, args, kwargs: -wrapped(*args))]):
    ...     math.sqrt(4)
    -2.0
    >>> math.sqrt is before
    True
    """
    with ExitStack() as stack:
        places: dict[tuple[int, str], list[Any]] = {}
        names = Namespaces(module)
        stack.callback(lambda: names.exchange_in_new({id(each): place[1].__wrapped__ for place in places.values() for each in place[1:]}))
        for patch in patches:
            if isinstance(patch, Patch):
                original = getattr(patch.owner, patch.name)
                wrapped = wrapt.wrap_object(patch.owner, patch.name, _wrapping(patch.traced, patch.outside), (patch,))
                stack.callback(_unwrap, patch, wrapped)
                if isinstance(patch.owner, ModuleType):
                    places.setdefault((id(patch.owner), patch.name), [original]).append(wrapped)
            else:
                stack.enter_context(patch)
        names.exchange({id(place[0]): place[-1] for place in reversed(places.values())})
        yield


def _unwrap(patch: Patch, wrapped: Any) -> None:
    # the script has replaced it, as logging.captureWarnings does, or has wrapped it once more
    with suppress(wrapt.WrapperNotFoundError, wrapt.WrapperNotOutermostError):
        wrapt.unwrap_object(patch.owner, patch.name, wrapped)


@contextmanager
def when_imported(name: str, patches: Callable[[ModuleType], Iterable[Patch | AbstractContextManager]]) -> Iterator[None]:
    """Install the ``patches`` of a module once it exists: immediately, or as soon as something in the block imports it.

    Args:
        name: the name of the module.
        patches: a function that returns the patches of the module. If several blocks wait for one module, its patches are installed in the
            order of these blocks.

    >>> _ = sys.modules.pop("colorsys", None)
    >>> def patched(module):
    ...     return [Patch(module, "rgb_to_hsv", lambda wrapped, instance, args, kwargs: "patched")]
    >>> with when_imported("colorsys", patched):
    ...     import colorsys
    ...     colorsys.rgb_to_hsv(0, 0, 0)
    'patched'
    >>> colorsys.rgb_to_hsv(0, 0, 0)
    (0.0, 0.0, 0)
    """
    with ExitStack() as stack:

        def install(module: ModuleType) -> None:
            stack.enter_context(installed(patches(module)))

        if name in sys.modules:
            install(sys.modules[name])
        else:
            stack.enter_context(imports_watched(name, install))
        yield
