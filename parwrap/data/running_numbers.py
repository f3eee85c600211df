"""Detects sums over batches that a loop divides by the length of the whole dataset, although each rank's sum covers only its share.

The sum cannot be observed, but the division can: by the length of a shared dataset, in the first training pass or after it, or by a
variable, an item or an attribute with that value.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from parwrap.coordination.call_site import is_ours
from parwrap.data.reported_lengths import asker, can_patch
from parwrap.patching.patch import Patch, installed

__all__ = ["RunningNumbers"]

DIVISIONS = ("/", "/=")
COMPUTED = ("BINARY_", "INPLACE_")
SILENT = {"CACHE", "PRECALL", "PUSH_NULL", "NOP"}
"""Bytecode instructions that do not change the result."""

REDUCTIONS = {"reduce_sum", "reduce_mean", "gather"}


class RunningNumbers:
    """Warns once, and says how to get such numbers of all ranks.

    Args:
        size: the number of ranks that share a dataset.
        say: a function, called with the warning.
    """

    def __init__(self, size: int, say: Callable[[str], None]) -> None:
        self._size, self._say = size, say
        self._dataset: Any = None
        self._passes = 0
        self._reads_share = self._over = False
        self._known: dict[tuple[CodeType, int], bool] = {}
        self._divided = ""
        self._patches = ExitStack()

    def close(self) -> None:
        """Restore the class of the dataset."""
        self._patches.close()
        self._dataset, self._over = None, True

    def trains(self, dataset: Any) -> None:
        """Begin a training pass over this rank's share of ``dataset``.

        The first one is observed, and the code after it up to the second.
        """
        if self._over:
            return
        if self._dataset is not dataset and not self._passes and hasattr(dataset, "__len__"):
            self._patches.close()  # the pass before did not train
            self._dataset, self._reads_share, self._divided = dataset, False, ""
            if can_patch(type(dataset)):
                self._patches.enter_context(installed([Patch(type(dataset), "__len__", self._length)]))
        elif self._dataset is dataset and self._passes:
            self.close()
        self._reads_share |= self._dataset is dataset

    def looks(self, dataset: Any) -> None:
        """Stop observing when a pass over all of ``dataset`` begins, because its sums are complete."""
        if self._dataset is dataset:
            self._reads_share = False

    def ended(self, dataset: Any) -> None:
        """Record that a training pass over ``dataset`` has ended."""
        if self._over or self._dataset is not dataset:
            return
        self._passes += 1
        divided = self._divided or _divides_by_length(sys._getframe(1), dataset, len(dataset))
        if divided:
            self._warn(divided)

    def _length(self, wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        whole = wrapped(*args, **kwargs)
        if instance is self._dataset and self._reads_share and not self._divided:
            frame = asker()
            if not is_ours(frame) and self._divides(frame):
                self._divided = _place(frame)
                if self._passes:
                    self._warn(self._divided)
        return whole

    def _divides(self, frame: FrameType) -> bool:
        key = frame.f_code, frame.f_lasti
        if key not in self._known:
            self._known[key] = _divides_at_once(*key)
        return self._known[key]

    def _warn(self, place: str) -> None:
        self._say(
            f"parwrap: {place} divides by the length of a dataset that {self._size} ranks share, but a rank's sum covers only its own "
            "share. To sum over all ranks, use parwrap.reduce_sum(x)."
        )
        self.close()


def _divides_at_once(code: CodeType, call: int) -> bool:
    """Whether the result of the ``call`` at this offset of ``code`` is a divisor, directly or through the variable that gets it."""
    if REDUCTIONS & set(code.co_names):
        return False
    following = next((each for each in dis.get_instructions(code) if each.offset > call), None)
    if following is None:
        return False
    return _is_division(following) or (following.opname.startswith("STORE_") and _divides_by(code, following.argval) > 0)


def _divides_by_length(frame: FrameType | None, dataset: Any, value: int) -> str:
    """The first place in the script's frames around ``frame`` that divides by ``value``, the length of ``dataset``.

    The divisor may be a variable, an item or attribute of one, or ``len(dataset)`` if the dataset's class cannot be patched.
    """
    while frame is not None:
        code = frame.f_code
        if not is_ours(frame) and not REDUCTIONS & set(code.co_names):
            known = {**{name: frame.f_globals.get(name) for name in code.co_names}, **frame.f_locals}
            variables = (name for name, held in known.items() if type(held) is int and held == value)
            if line := next(filter(None, (_divides_by(code, name) for name in variables)), 0) or _divides_by_part(
                code, known, dataset, value
            ):
                return f"{code.co_filename}:{line}"
        frame = frame.f_back
    return ""


_NOTHING = object()
_LEN = object()


def _divides_by_part(code: CodeType, known: dict[str, Any], dataset: Any, value: int) -> int:
    """The line where ``code`` divides by an item, an attribute or ``len(dataset)`` that equals ``value``; 0 if there is none.

    >>> _divides_by_part(compile("total / sizes['train']", "", "exec"), {"sizes": {"train": 5}}, None, 5)
    1
    """
    lines, line, stack, parts = dict(dis.findlinestarts(code)), code.co_firstlineno, list[Any](), False
    for each in dis.get_instructions(code):
        line = lines.get(each.offset) or line
        name = each.opname
        if _is_division(each):
            if parts and stack and type(stack[-1]) is int and stack[-1] == value:
                return line
            stack, parts = [], False
        elif name == "LOAD_CONST":
            stack.append(each.argval)
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and stack:
            stack[-1], parts = getattr(stack[-1], "__dict__", {}).get(each.argval, _NOTHING), True
        elif name.startswith("LOAD_"):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            stack += [_LEN if one == "len" else known.get(one, _NOTHING) for one in names]
        elif (name == "BINARY_SUBSCR" or (name == "BINARY_OP" and each.argrepr == "[]")) and len(stack) > 1:
            index = stack.pop()
            stack[-1], parts = _item(stack[-1], index), True
        elif name.startswith("CALL") and each.arg == 1 and stack[-2:-1] == [_LEN]:
            stack[-2:], parts = [value if stack[-1] is dataset and not can_patch(type(dataset)) else _NOTHING], True
        elif name not in SILENT:
            stack, parts = [], False
    return 0


def _item(container: Any, index: Any) -> Any:
    """``container[index]`` of a dict, list or tuple."""
    try:
        return container[index] if type(container) in (dict, list, tuple) else _NOTHING
    except (KeyError, IndexError, TypeError):
        return _NOTHING


def _divides_by(code: CodeType, name: str) -> int:
    """The line where ``code`` divides by the variable ``name``; 0 if it does not.

    >>> _divides_by(compile("mean = total / count", "", "exec"), "count"), _divides_by(compile("count / total", "", "exec"), "count")
    (1, 0)
    """
    lines = dict(dis.findlinestarts(code))
    line = code.co_firstlineno
    instructions = list(pairwise(dis.get_instructions(code)))
    if any(two.opname.startswith("STORE_") and two.argval == name and one.opname.startswith(COMPUTED) for one, two in instructions):
        return 0  # a counter may have reached the same number
    for one, other in instructions:
        line = lines.get(one.offset) or line
        if one.opname.startswith("LOAD_") and one.argval == name and _is_division(other):
            return line
    return 0


def _is_division(instruction: dis.Instruction) -> bool:
    if instruction.opname == "BINARY_OP":
        return instruction.argrepr in DIVISIONS
    return instruction.opname in ("BINARY_TRUE_DIVIDE", "INPLACE_TRUE_DIVIDE")


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
