"""Names that a training loop adds up from its batches and that the script uses after it, read from the source (contract, rule 7).

This is advice for ``explain`` and ``verify``; nothing that parwrap does follows from it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from textwrap import dedent
from typing import NamedTuple

from parwrap.places import is_installed, is_ours, is_standard

__all__ = ["AddedUp", "added_up", "imported_classes"]

OVER_RANKS = {"total", "reduce_sum", "reduce_mean", "mean_over_ranks", "gather"}
"""Functions of parwrap whose result covers all ranks."""

SAME_ON_ALL = {"dtype", "device", "ndim"}
"""Attributes of a batch that are the same on all ranks."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class AddedUp(NamedTuple):
    """A name that a loop adds up.

    Attributes:
        name: the name, such as ``correct`` or ``self.correct``.
        line: the line that adds to it.
    """

    name: str
    line: int


def added_up(source: str, line: int, imported: Mapping[str, str] | None = None) -> list[AddedUp]:
    """The names that the loop at ``line`` adds up from its batches, and that ``source`` uses after it.

    What is added must come from the batch, or depend on it. A loss after its backward is the mean over ranks and does not count, nor does a
    name that the script passes to ``parwrap.total`` or the like after the loop. ``imported``: :func:`imported_classes`.

    >>> added_up("for x, y in loader:\\n    n += 1\\n    right += (model(x) == y).sum()\\nprint(right / n)", 1)
    [AddedUp(name='right', line=3)]
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # such as a cell of a notebook with a command of its shell
        return []
    found: dict[str, AddedUp] = {}
    for scope, loop in _loops(tree, tree):
        if loop.lineno <= line <= loop.iter.end_lineno:  # type: ignore[operator]
            adders = _adders(tree, imported or {})
            for each in _Body(loop, adders).added:
                if _used_after(each.name, scope, tree, loop):
                    found.setdefault(each.name, each)
    return list(found.values())


def _loops(scope: ast.AST, node: ast.AST) -> Iterator[tuple[ast.AST, ast.For]]:
    """All ``for`` statements, each with the function around it, or with the module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For):
            yield scope, child
        yield from _loops(child if isinstance(child, Function) else scope, child)


def imported_classes(file: str) -> dict[str, str]:
    """The sources of the script's own classes that the module in ``file`` has imported, by their names in it."""
    found = {}
    for module in [each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == file]:
        for name, value in vars(module).items():
            with suppress(OSError, TypeError):  # no class, or one without a source
                path = inspect.getfile(value) if isinstance(value, type) else file
                if not (path == file or is_ours(path) or is_standard(path) or is_installed(path)):
                    found[name] = dedent(inspect.getsource(value))
    return found


def _adders(tree: ast.AST, imported: Mapping[str, str]) -> dict[str, set[str]]:
    """For each name of an object of a class in ``tree`` or ``imported``: the methods of the class that add to attributes, such as a meter's
    ``update``.
    """
    classes: dict[str, set[str]] = {}
    for alias, root in [*((name, ast.parse(source)) for name, source in imported.items()), ("", tree)]:
        for node in ast.walk(root):
            if isinstance(node, ast.ClassDef):
                methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
                adders = {each.name for each in methods if any(map(_adds_to_self, ast.walk(each)))}
                classes.setdefault(alias or node.name, set()).update(adders)
    objects: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in classes:
                        objects.setdefault(ast.unparse(name), set()).update(classes[value.func.id])
    return objects


def _adds_to_self(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and ast.unparse(node.target).startswith("self.")


class _Body:
    """What a loop adds up in its body.

    Attributes:
        added: the names, at each line that adds to them.
    """

    def __init__(self, loop: ast.For, adders: dict[str, set[str]]) -> None:
        self.added: list[AddedUp] = []
        self._adders = adders
        self._of_batch = _names(loop.target)
        if isinstance(loop.iter, ast.Call) and "enumerate" in ast.unparse(loop.iter) and isinstance(loop.target, ast.Tuple):
            self._of_batch = _names(ast.Tuple(loop.target.elts[1:], ast.Load()))  # the first is the index
        self._run(loop.body, False)

    def _run(self, statements: list[ast.stmt], depends: bool) -> None:
        """Follow ``statements`` in their order; ``depends`` says whether the batch decides if they run."""
        for each in statements:
            if isinstance(each, (*Function, ast.ClassDef)):
                continue
            inner = depends
            if isinstance(each, (ast.If, ast.While)):
                inner = depends or self._from_batch(each.test)
            elif isinstance(each, ast.For):
                inner = depends or self._from_batch(each.iter)
                if self._from_batch(each.iter):
                    self._of_batch |= _names(each.target)
            elif isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                self._assign(each, depends)
            elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
                self._call(each.value, depends)
            for block in ("body", "orelse", "finalbody"):
                self._run(getattr(each, block, []), inner)

    def _assign(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign, depends: bool) -> None:
        value = statement.value
        if value is None:
            return
        from_batch = depends or self._from_batch(value)
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            adds = (
                isinstance(statement.op, ast.Add)
                if isinstance(statement, ast.AugAssign)
                else isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and ast.dump(value.left) == ast.dump(_loaded(target))
            )
            if adds and (from_batch or (isinstance(target, ast.Subscript) and self._from_batch(target.slice))):
                self.added.append(AddedUp(_base(target), statement.lineno))
            elif from_batch and not adds:
                self._of_batch |= _names(target)
            elif isinstance(statement, ast.Assign):
                self._of_batch -= _names(target) if isinstance(target, ast.Name) else set()

    def _call(self, call: ast.Call, depends: bool) -> None:
        if not isinstance(call.func, ast.Attribute):
            return
        if call.func.attr == "backward":
            self._of_batch -= _mean_after_backward(call.func.value)
        name, adds = ast.unparse(call.func.value), call.func.attr in ("append", "extend")
        if (adds or call.func.attr in self._adders.get(name, ())) and (depends or any(map(self._from_batch, call.args))):
            self.added.append(AddedUp(_base(call.func.value), call.lineno))

    def _from_batch(self, node: ast.AST) -> bool:
        """Whether the value of ``node`` comes from this rank's part of the batch."""
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in OVER_RANKS:
                return False
        if isinstance(node, ast.Attribute) and node.attr in SAME_ON_ALL:
            return False
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in self._of_batch:
            return True
        return any(self._from_batch(child) for child in ast.iter_child_nodes(node))


def _mean_after_backward(root: ast.AST) -> set[str]:
    """The loss into which ``root.backward()`` writes the mean over ranks, in ``loss``, ``loss / 4`` and ``scaler.scale(loss)``."""
    if isinstance(root, ast.BinOp) and isinstance(root.op, ast.Div):
        root = root.left
    if isinstance(root, ast.Call) and isinstance(root.func, ast.Attribute) and root.func.attr == "scale" and root.args:
        root = root.args[0]
    return {ast.unparse(root)} if isinstance(root, (ast.Name, ast.Attribute)) else set()


def _names(target: ast.AST) -> set[str]:
    """The names that an assignment to ``target`` sets."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for each in target.elts for name in _names(each)}
    return {_base(target.value if isinstance(target, ast.Starred) else target)}


def _base(target: ast.AST) -> str:
    """The name in ``name``, ``name[key]`` or ``self.name``."""
    while isinstance(target, ast.Subscript):
        target = target.value
    return ast.unparse(target)


def _loaded(target: ast.AST) -> ast.AST:
    """``target`` as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _used_after(name: str, scope: ast.AST, tree: ast.AST, loop: ast.For) -> bool:
    """Whether ``name`` is used after ``loop``, and not added up over ranks there.

    An attribute may be used in any other function, too.
    """
    used = False
    for node in ast.walk(tree if "." in name else scope):
        after = getattr(node, "lineno", 0) > loop.end_lineno or ("." in name and getattr(node, "lineno", loop.lineno) < loop.lineno)  # type: ignore[operator]
        if not after:
            continue
        if isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in OVER_RANKS and any(_reads(each, name) for argument in node.args for each in ast.walk(argument)):
                return False
        used = used or _reads(node, name)
    return used


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == name
