"""Checks of a step: branches on a value that is known after the graph, which raise an error, end the program or print.

``if not math.isfinite(loss.item()): sys.exit(1)`` goes one way in nearly all calls. The graph is that of the way past
the branch's body, and the body runs after the graph, as the user wrote it, in the calls whose value says so.

**Contract**
- Only a body after which nothing else of the step runs (it raises, or leaves the program), or that does nothing but
  print and log, is left out of the trace; what it may need of the function's variables is kept as it is there.
- The body is compiled from the user's own source, with its lines, and only if that is what has been compiled to the
  code that runs. Whether an instruction asks for a value is read from the code, what it decides from the source.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import logging
import opcode
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from millstream.capture.lines import is_ours, may_be_caught

Span: TypeAlias = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column."""

_CHANGES_WAY = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
_ENDING = [
    sys.exit,
    os._exit,
    os.abort,
    *(vars(builtins)[name] for name in ("exit", "quit") if hasattr(builtins, name)),
]
_SHOWING = (print, warnings.warn, *(getattr(logging, name) for name in "debug info warning error critical".split()))
_OF_LOGGERS = frozenset("debug info warning error critical exception log".split())


@dataclass(frozen=True)
class LateCheck:
    """A body that runs after the graph.

    Attributes:
        runs_if: The outcome of the question at which it runs.
        body: It, as a function of some of the user's variables.
        variables: What these hold.
    """

    runs_if: bool
    body: Callable[..., Any]
    variables: tuple[Any, ...]

    def __call__(self, outcome: Any, *variables: Any) -> None:
        """Run it, if the outcome says so, with the variables as they are known by then."""
        if bool(outcome) is self.runs_if:
            self.body(*variables)


def find_check() -> LateCheck | None:
    """The check that the user's code asks an outcome for just now; ``None`` where it is no check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    span = None if frame is None else _span_asked(frame.f_code, frame.f_lasti)
    if frame is None or span is None or may_be_caught():
        return None
    held = frame.f_locals
    value_of = functools.partial(_value_of, scopes=(held, frame.f_globals, vars(builtins)))
    for statement in _statements_of(frame.f_code):
        found = _deciding(statement.test, isinstance(statement, ast.If), span)
        if found is None or _is_asked_by_containers(frame, found[0], value_of):
            continue
        body = _body_of(statement)
        is_whole = not getattr(statement, "orelse", ())
        if _is_of_class(body) or not (_leaves(body, value_of) or (is_whole and _only_shows(body, value_of, held))):
            return None
        named = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
        names = tuple(sorted(named & {*held}))
        code = _compiled(frame.f_code, statement, names)
        function = types.FunctionType(code, frame.f_globals, frame.f_code.co_name)
        return LateCheck(found[1], function, tuple(held[name] for name in names))
    return None


def _span_asked(code: CodeType, offset: int) -> Span | None:
    """Return where the expression stands whose truth an instruction asks for; ``None`` for any other instruction."""
    name, place = opcode.opname[code.co_code[offset]], offset // 2
    if name != "COMPARE_OP":  # which asks by itself, from Python 3.13 on
        if name != "TO_BOOL" and not name.startswith("POP_JUMP"):
            return None
        place -= 1
    while place > 0 and opcode.opname[code.co_code[2 * place]] == "EXTENDED_ARG":
        place -= 1
    return next(islice(code.co_positions(), max(place, 0), None))  # of what gave the value


def _deciding(test: ast.expr, outcome: bool, span: Span) -> tuple[ast.expr, bool] | None:
    """The expression at ``span``, and what it must be for ``test`` to have an outcome, whatever else is asked."""
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == span:
        return test, outcome
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _deciding(test.operand, not outcome, span)
    if isinstance(test, ast.BoolOp):  # one operand settles ``or`` if true, ``and`` if false; the last one either way
        settles = isinstance(test.op, ast.Or) is outcome
        operands = test.values if settles else test.values[-1:]
        return next((found for each in operands if (found := _deciding(each, outcome, span)) is not None), None)
    return None


def _is_asked_by_containers(frame: FrameType, asked: ast.expr, value_of: Callable[[ast.expr], Any]) -> bool:
    """Return whether a comparison may be one of lists, which ask their items.

    Then those decide nothing by themselves.
    """
    if opcode.opname[frame.f_code.co_code[frame.f_lasti]] != "COMPARE_OP":
        return False
    operands = [asked.left, *asked.comparators] if isinstance(asked, ast.Compare) else []
    return not any(
        isinstance(value_of(each), int | float)
        or (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "item")
        for each in operands
    )


def _body_of(statement: ast.If | ast.Assert) -> list[ast.stmt]:
    return statement.body if isinstance(statement, ast.If) else [statement]


def _leaves(body: list[ast.stmt], value_of: Callable[[ast.expr], Any]) -> bool:
    """Return whether nothing of the function runs after ``body``."""
    if any(isinstance(node, _CHANGES_WAY) for part in body for node in ast.walk(part)):
        return False
    match body[-1]:
        case ast.Raise(exc=exc):
            return exc is not None
        case ast.Expr(value=ast.Call(func=function)):
            found = value_of(function)
            return any(found is each for each in _ENDING)
        case last:
            return isinstance(last, ast.Assert) and len(body) == 1


def _only_shows(body: list[ast.stmt], value_of: Callable[[ast.expr], Any], variables: Mapping[str, Any]) -> bool:
    """Return whether ``body`` only prints and logs what will not be another by then."""
    calls = [part.value for part in body if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call)]
    if len(calls) < len(body) or not all(_shows(value_of(call.func)) for call in calls):
        return False
    shown = [node for call in calls for each in (*call.args, *call.keywords) for node in ast.walk(each)]
    return not any(
        isinstance(node, ast.Subscript | ast.NamedExpr)
        or (isinstance(node, ast.Name | ast.Attribute) and _is_read_later(node, value_of, variables))
        or (isinstance(node, ast.Call) and not _only_reads(node.func, variables))
        for node in shown
    )


def _is_read_later(node: ast.expr, value_of: Callable[[ast.expr], Any], variables: Mapping[str, Any]) -> bool:
    """Return whether something is shown that the step may go on changing.

    A tensor that is not kept as it is, an object.
    """
    if isinstance(node, ast.Name) and isinstance(variables.get(node.id), Tensor):
        return False
    return isinstance(value_of(node), Tensor | nn.Module | Optimizer | list | dict | set)


def _only_reads(function: ast.expr, variables: Mapping[str, Any]) -> bool:
    """Return whether a call, of which this is the function, gives something of a variable and does nothing else."""
    match function:
        case ast.Name(id=name):
            return name in ("float", "int", "round", "len", "str", "repr") and name not in variables
        case ast.Attribute(attr="format", value=ast.Constant()):
            return True
        case ast.Attribute(attr="item" | "tolist", value=ast.Name(id=name)):
            return isinstance(variables.get(name), Tensor)
    return False


def _shows(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, logging.Logger):
        return function.__name__ in _OF_LOGGERS
    return any(function is each for each in (*_SHOWING, builtins.print))


def _value_of(node: ast.expr, scopes: Sequence[Any]) -> Any:
    """Return what a name stands for, or an attribute of a module, logger or the like.

    ``None`` where that is unknown.
    """
    if isinstance(node, ast.Name):
        return next((scope[node.id] for scope in scopes if node.id in scope), None)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, scopes)
        if isinstance(owner, types.ModuleType | logging.Logger):
            return getattr(owner, node.attr, None)
        return getattr(owner, "__dict__", {}).get(node.attr)
    return None


def _is_of_class(body: list[ast.stmt]) -> bool:
    """Return whether names in ``body`` mean something in the body of a class only."""
    nodes = [node for part in body for node in ast.walk(part)]
    names = [name for node in nodes if isinstance(name := getattr(node, "id", getattr(node, "attr", None)), str)]
    return any(name == "super" or (name.startswith("__") and not name.endswith("__")) for name in names)


@functools.lru_cache(maxsize=256)
def _statements_of(code: CodeType) -> list[ast.If | ast.Assert]:
    """Return those in the source of some code; none where there is no source, or another than was compiled."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
        compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return []
    if not any(each.co_code == code.co_code and each.co_name == code.co_name for each in _codes_in(compiled, code)):
        return []
    last = max((line for *_, line in code.co_lines() if line is not None), default=0)
    found = (node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert))
    return [node for node in found if code.co_firstlineno <= node.lineno <= last]


def _codes_in(code: CodeType, sought: CodeType) -> Iterator[CodeType]:
    if code.co_firstlineno == sought.co_firstlineno:
        yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes_in(each, sought)


@functools.lru_cache(maxsize=256)
def _compiled(code: CodeType, statement: ast.If | ast.Assert, names: tuple[str, ...]) -> CodeType:
    """The body of a statement as the code of a function of some variables."""
    body = [*_body_of(statement)]
    if isinstance(statement, ast.Assert):
        failed = ast.copy_location(ast.Constant(False), statement.test)
        body[0] = ast.copy_location(ast.Assert(failed, statement.msg), statement)
    parameters = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    made = ast.FunctionDef(code.co_name, parameters, body, [], None, None)
    if sys.version_info >= (3, 12):
        made.type_params = []
    module = ast.Module([ast.copy_location(made, statement)], [])
    compiled = compile(ast.fix_missing_locations(module), code.co_filename, "exec", dont_inherit=True)
    return next(each for each in compiled.co_consts if isinstance(each, CodeType))
