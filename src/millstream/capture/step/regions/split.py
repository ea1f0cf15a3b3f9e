"""Split a function at its eager regions, into functions that run one after the other.

**Contract**
- Only ``with eager_region():`` statements directly in the function's body split it. Each part is compiled from the
  function's own source, with its globals, its closure and its line numbers.
- Called in order, each with the local variables that it mentions, the parts do what the function does.
- What would not be the same is a ``CaptureError`` with the line: a closure that shares a variable with another part.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from millstream.errors import CaptureError

UNBOUND = type("Unbound", (), {"__slots__": (), "__repr__": lambda _: "<unbound>"})()
"""Stands for the value of a local variable that has none."""

_LEAVE, _UNBOUND = "_ms_leave", "_ms_unbound"

_TRIVIAL = (ast.Pass, ast.Return, ast.Assign, ast.Expr, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class FunctionPart:
    """A part of a function."""

    # takes the values of ``inputs`` by position. It returns ``(True, result)`` where the user's function would return,
    # and otherwise ``(False, leave(values of outputs))``.
    function: Callable[..., Any]
    is_region: bool  # whether it is the body of an eager region
    is_trivial: bool  # whether it does nothing but pass values on
    inputs: tuple[str, ...]  # local variables that it mentions and that may have a value by then
    outputs: tuple[str, ...]  # those that it may change and that later parts mention
    lines: tuple[int, int]  # the first and the last


def split_function(
    function: FunctionType, marker: Callable[..., Any], leave: Callable[..., Any]
) -> tuple[list[FunctionPart], CaptureError | None]:
    """Split ``function`` at the ``with`` statements of its body that call ``marker``.

    Args:
        function: The user's.
        marker: What makes a region: ``eager_region``.
        leave: What parts that are no regions call with the tuple of their outputs.

    Returns:
        The parts in order, none if there is no such statement or no source; and what forbids to use them, if anything.
    """
    tree = definition_of(function)
    if tree is None:
        return [], None
    bodies = _bodies(function, tree, marker)
    if len(bodies) == 1:
        return [], None
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    mentioned = [_mentioned(body) & local for body, _ in bodies]
    stored = [_stored(body) & local for body, _ in bodies]
    parameters = _parameters(tree.args)
    error = _shared_by_closures(function, [body for body, _ in bodies], stored)
    parts = []
    for index, (body, is_region) in enumerate(bodies):
        before = set(parameters).union(*stored[:index])
        after = set[str]().union(*mentioned[index + 1 :])
        inputs = [name for name in parameters if name in mentioned[index]]
        if parameters and parameters[0] not in inputs and "super" in _mentioned(body):
            inputs.insert(0, parameters[0])
        inputs += sorted((mentioned[index] & before) - {*parameters})
        outputs = sorted(stored[index] & after)
        is_last = index + 1 == len(bodies)
        is_trivial = all(map(_is_trivial, body))
        end = _pass_on if is_region or is_trivial else leave
        made = _compile(function, tree, body, inputs, outputs, set[str]().union(*stored[:index]), is_last, end)
        parts.append(FunctionPart(made, is_region, is_trivial, tuple(inputs), tuple(outputs), _lines_of(body, tree)))
    return parts, error


def _pass_on(*values: Any) -> tuple[Any, ...]:
    return values


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of a function, with the line numbers of its file; ``None`` where the source cannot be had."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    ast.increment_lineno(tree, first - 1)
    (found,) = tree.body if len(tree.body) == 1 else (None,)
    if not isinstance(found, ast.FunctionDef) or found.name != function.__code__.co_name:
        return None
    code, arguments = function.__code__, found.args  # a file that was edited meanwhile says something else
    counts = (len(arguments.posonlyargs) + len(arguments.args), len(arguments.kwonlyargs))
    return found if counts == (code.co_argcount, code.co_kwonlyargcount) else None


def lines_for_a_region(function: Any, where: str) -> tuple[int, int] | None:
    """The statement of a function's body that holds a line, if an eager region may stand there.

    That is known after the last backward pass: no gradient can cross then.

    Args:
        function: The user's; may be a method.
        where: ``file:line``.

    Returns:
        The first and the last line of the statement.
    """
    plain = getattr(function, "__func__", function)
    file, _, line = where.rpartition(":")
    if not isinstance(plain, FunctionType) or plain.__code__.co_filename != file or not line.isdigit():
        return None
    tree = definition_of(plain)
    body = [] if tree is None else tree.body
    for index, statement in enumerate(body):
        last = statement.end_lineno or statement.lineno
        if statement.lineno <= int(line) <= last:
            is_after = any(map(_goes_backward, body[:index])) and not any(map(_goes_backward, body[index:]))
            return (statement.lineno, last) if is_after else None
    return None


def _goes_backward(statement: ast.stmt) -> bool:
    """Whether a statement mentions a backward pass, by a name like ``backward`` or ``grad``."""
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(statement) if isinstance(node, _NAMES))
    return any("backward" in name or name == "grad" for name in names)


_NAMES = (ast.Attribute, ast.Name)


def _bodies(
    function: FunctionType, tree: ast.FunctionDef, marker: Callable[..., Any]
) -> list[tuple[list[ast.stmt], bool]]:
    """The statements of each part, and whether it is a region; the first and every second are none."""
    bodies: list[tuple[list[ast.stmt], bool]] = [([], False)]
    for statement in tree.body:
        first = statement.items[0] if isinstance(statement, ast.With) else None
        if (
            isinstance(statement, ast.With)
            and first is not None
            and isinstance(first.context_expr, ast.Call)
            and first.optional_vars is None
            and not first.context_expr.args
            and not first.context_expr.keywords
            and _value_of(function, first.context_expr.func) is marker
        ):
            rest = statement.items[1:]
            inner: list[ast.stmt] = (
                [ast.copy_location(ast.With(rest, statement.body), statement)] if rest else statement.body
            )
            bodies += [(inner, True), ([], False)]
        else:
            bodies[-1][0].append(statement)
    return bodies


def _value_of(function: FunctionType, expression: ast.expr) -> Any:
    """What a dotted name is, as far as it can be told without running anything."""
    if isinstance(expression, ast.Attribute):
        owner = _value_of(function, expression.value)
        return getattr(owner, expression.attr, None) if inspect.ismodule(owner) else None
    if not isinstance(expression, ast.Name):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if expression.id in cells:
        try:
            return cells[expression.id].cell_contents
        except ValueError:  # not assigned yet
            return None
    return function.__globals__.get(expression.id)


def _compile(
    function: FunctionType,
    tree: ast.FunctionDef,
    body: Sequence[ast.stmt],
    inputs: Sequence[str],
    outputs: Sequence[str],
    changed: Container[str],
    is_last: bool,
    leave: Callable[..., Any],
) -> Callable[..., Any]:
    declared = [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)]
    ours = [node for node in declared if node in tree.body and node not in body]
    start = [f"if {name} is {_UNBOUND}: del {name}" for name in inputs if name in changed]
    end = [f"try: {name}\nexcept NameError: {name} = {_UNBOUND}" for name in outputs]
    end.append("return True, None" if is_last else f"return False, {_LEAVE}({', '.join(outputs)})")
    statements = [
        *ours,
        *_at(start, body[0] if body else tree),
        *(_Returns().visit(statement) for statement in body),
        *_at(end, body[-1] if body else tree),
    ]
    arguments = ast.arguments([], [ast.arg(name) for name in inputs], None, [], [], None, [])
    part: ast.stmt = ast.FunctionDef(tree.name, arguments, statements, [], None, None)
    free = [name for name in function.__code__.co_freevars if name != "__class__"]
    *_, owner, _ = ("", *function.__qualname__.split("."))
    if owner.isidentifier():  # private names mean what they mean in the class
        part = ast.ClassDef(owner, [], [], [part], [])
    outer = ast.arguments([], [ast.arg(name) for name in (*free, _LEAVE, _UNBOUND)], None, [], [], None, [])
    module = ast.Module([ast.FunctionDef("_ms_outer", outer, [part], [], None, None)], [])
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and hasattr(node, "type_params") is False:
            node.type_params = []  # type: ignore[attr-defined]  since Python 3.12
    ast.copy_location(part, tree)
    ast.fix_missing_locations(module)
    flags = function.__code__.co_flags & _FUTURE
    code = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    for _ in range(3 if isinstance(part, ast.ClassDef) else 2):
        code = next(each for each in code.co_consts if isinstance(each, CodeType))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {_LEAVE: CellType(leave), _UNBOUND: CellType(UNBOUND)}
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, None, closure)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


_FUTURE = 0x1FF0000
"""Flags of code for ``from __future__`` imports."""


def _at(lines: Sequence[str], place: ast.AST) -> Iterator[ast.stmt]:
    """Statements of ours, on a line of the user's."""
    for statement in ast.parse("\n".join(lines)).body if lines else ():
        for node in ast.walk(statement):
            ast.copy_location(node, place)
        yield statement


class _Returns(ast.NodeTransformer):
    """``return value`` becomes ``return (True, value)``; functions within keep theirs."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = node.value or ast.copy_location(ast.Constant(None), node)
        pair = ast.copy_location(ast.Tuple([ast.copy_location(ast.Constant(True), node), value], ast.Load()), node)
        return ast.copy_location(ast.Return(pair), node)

    def visit_FunctionDef(self, node: Any) -> Any:
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = visit_FunctionDef  # noqa: N815


def _is_trivial(statement: ast.stmt) -> bool:
    if not isinstance(statement, _TRIVIAL):
        return False
    value = getattr(statement, "value", None)
    plain = (ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.expr_context)
    return value is None or all(isinstance(node, plain) for node in ast.walk(value))


def _lines_of(body: Sequence[ast.stmt], tree: ast.FunctionDef) -> tuple[int, int]:
    return (body[0].lineno, body[-1].end_lineno or body[-1].lineno) if body else (tree.lineno, tree.lineno)


def _parameters(arguments: ast.arguments) -> list[str]:
    """In the order in which Python numbers them."""
    named = [*arguments.posonlyargs, *arguments.args]
    more = [arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [each.arg for each in (*named, *more) if each is not None]


def _mentioned(body: Sequence[ast.stmt]) -> set[str]:
    return {name for statement in body for node in ast.walk(statement) for name in _names_of(node)}


def _names_of(node: ast.AST) -> Iterator[str]:
    """Names that a node of a syntax tree reads or gives a value."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
    ):
        if node.name is not None:
            yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest


def _stored(body: Sequence[ast.stmt]) -> set[str]:
    """Names to which statements give a value or from which they take it, in their own scope."""
    found: set[str] = set()
    todo: list[ast.AST] = [*body]
    while todo:
        node = todo.pop()
        if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
            found.update(_names_of(node))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def _shared_by_closures(
    function: FunctionType, bodies: Sequence[Sequence[ast.stmt]], stored: Sequence[set[str]]
) -> CaptureError | None:
    """What forbids the parts: a function within one of them has a variable in common with another part."""
    cells = {*function.__code__.co_cellvars}
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)
    for index, body in enumerate(bodies):
        for node in (node for statement in body for node in ast.walk(statement) if isinstance(node, inner)):
            others = set[str]().union(*(_mentioned(other) for other in bodies if other is not body))
            nonlocals = {name for each in ast.walk(node) if isinstance(each, ast.Nonlocal) for name in each.names}
            shared = (nonlocals & others) | set[str]().union(*stored[index + 1 :])
            for name in sorted(_mentioned([node]) & cells & shared):  # type: ignore[list-item]
                return CaptureError(
                    f"A function in the step uses its variable {name}, which changes after an eager_region.",
                    where=f"{function.__code__.co_filename}:{node.lineno}",
                    remedy="Pass the variable to that function, or give it another name after the region.",
                )
    return None
