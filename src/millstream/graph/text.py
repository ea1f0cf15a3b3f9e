r"""The text form of graphs and plans: one kernel or step a line, and back again without loss.

A graph::

    graph "two layers"
    inputs   (x, w)
    outputs  (y)
    buffers
      x  input      cuda:0  4096
      w  state      cuda:0  65536
      t  temporary  cuda:0  4096
      v  temporary  cuda:0  4096  view of t
      y  output     cuda:0  4096
    kernels
      0  gemm   mm.out           cuda:0  (x, w) -> (t)  bytes 73728  flops 2097152  from "model.py:7 in forward"
      1  fused  triton_gelu_relu  cuda:0  (v) -> (y)  bytes 8192  ops (gelu, relu)

A plan is its steps, each after its stream, and then its graph::

    plan list on 2 streams
    steps
      s0  allocate  t
      s0  launch    0 mm.out
      s0  record    e0
      s1  wait      e0
      s0  free      t
    arena 4096 cuda:0
      t  0
    graph "two layers"
    ...

The arena, with the offset of each buffer in it, is there only where a plan says where its temporaries lie. How
kernels are spread, ``apart`` or ``even``, stands after the streams.

A name stands bare where it consists of letters, digits and ``_ . : /`` (with single ``-`` inside), and otherwise in
double quotes with Python's escapes. Fields at their defaults are left out. Indented lines belong to the heading above
them; blank lines and lines that begin with ``#`` are skipped, and the amount of space between words does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from millstream.errors import GraphError
from millstream.graph.kernel_graph import Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.graph.layout import MemoryLayout
from millstream.graph.plan import Allocate, Free, Launch, Plan, Record, Spread, Step, Wait

_BARE = r"[\w.:/]+(?:-[\w.:/]+)*"
_TOKEN = re.compile(rf'[ \t]*(?P<token>"(?:[^"\\]|\\.)*"|->|[(),]|-?{_BARE})')
_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)")
_INTEGER = re.compile(r"-?[0-9]+")
_WIDEST_COLUMN = 48  # one very long generated name must not push every line off the screen


class ParseError(GraphError):
    """A text is not the text form of a graph or plan.

    Attributes:
        line: Line number, from 1.
        column: Column number, from 1.
        expected: What should have stood there.
    """

    def __init__(self, line: int, column: int, expected: str, found: str) -> None:
        super().__init__(f"line {line}, column {column}: expected {expected}, found {found}")
        self.line = line
        self.column = column
        self.expected = expected


def format_graph(graph: KernelGraph) -> str:
    """Write a graph as text; ``parse_graph`` reads it back as an equal graph, also when the graph is not valid."""
    buffers = [(_quote(b.id), b.role.value, _quote(b.device), f"{b.num_bytes}{_alias(b)}") for b in graph.buffers]
    kernels = [(str(k.id), k.kind.value, _quote(k.name), _quote(k.device), _format_effects(k)) for k in graph.kernels]
    lines = [f"graph {_quote(graph.name)}", f"inputs   {_names(graph.inputs)}", f"outputs  {_names(graph.outputs)}"]
    lines += ["buffers", *_align(buffers), "kernels", *_align(kernels)]
    return "\n".join(lines) + "\n"


def format_plan(plan: Plan) -> str:
    """Write a plan and its graph as text; ``parse_plan`` reads it back as an equal plan, also when it is not valid."""
    streams = f"{plan.num_streams} stream{'' if plan.num_streams == 1 else 's'}"
    steps = [_step_columns(plan.graph, step) for step in plan.steps]
    spread = "" if plan.spread is Spread.PACKED else f" {plan.spread}"
    lines = [f"plan {_quote(plan.policy)} on {streams}{spread}", "steps", *_align(steps)]
    if plan.layout is not None:
        offsets = [(_quote(buffer), str(offset)) for buffer, offset in plan.layout.offset_of.items()]
        lines += [f"arena {plan.layout.arena_bytes} {_quote(plan.layout.device)}", *_align(offsets)]
    return "\n".join(lines) + "\n" + format_graph(plan.graph)


def format_step(graph: KernelGraph, step: Step) -> str:
    """Write one step of a plan of ``graph`` on one line, such as ``s0 launch 3 mm.out``."""
    return " ".join(_step_columns(graph, step))


def parse_graph(text: str) -> KernelGraph:
    """Read what ``format_graph`` wrote, or a text of the same form. The graph is not validated.

    Raises:
        ParseError: The text has another form; the message names the line, the column and what was expected.
    """
    reader = _Reader(text)
    graph = _parse_graph(reader)
    reader.finish()
    return graph


def parse_plan(text: str) -> Plan:
    """Read what ``format_plan`` wrote, or a text of the same form. Neither plan nor graph is validated.

    Raises:
        ParseError: The text has another form; the message names the line, the column and what was expected.
    """
    reader = _Reader(text)
    head = reader.heading("plan")
    policy = head.name("the policy's name")
    head.keyword("on")
    num_streams = head.integer("the number of streams")
    head.keyword("stream", "streams")
    spread = Spread(head.keyword(*(spread.value for spread in Spread))) if head.more else Spread.PACKED
    head.end()
    reader.heading("steps").end()
    # A launch names its kernel, which can be checked only once the graph below is known.
    launches: list[tuple[_TokenLine, int, str]] = []
    steps = tuple(_parse_step(line, launches) for line in reader.entries())
    layout = _parse_layout(reader) if reader.at("arena") else None
    graph = _parse_graph(reader)
    reader.finish()
    for line, kernel, name in launches:
        if 0 <= kernel < len(graph.kernels) and graph.kernels[kernel].name != name:
            line.fail(f"{_quote(graph.kernels[kernel].name)}, the name of kernel {kernel} in the graph below")
    return Plan(graph, steps, num_streams, policy, layout, spread)


# --- writing ---------------------------------------------------------------------------------------------------------


def _quote(name: str) -> str:
    if re.fullmatch(_BARE, name):
        return name
    return '"' + "".join(map(_escape, name)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    # Not json.dumps: it writes two lone surrogates as it writes the one character that they would encode.
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _names(names: Iterable[str]) -> str:
    return f"({', '.join(map(_quote, names))})"


def _alias(buffer: Buffer) -> str:
    return "" if buffer.alias_of is None else f"  view of {_quote(buffer.alias_of)}"


def _format_effects(kernel: Kernel) -> str:
    parts = [f"{_names(kernel.reads)} -> {_names(kernel.writes)}"]
    if kernel.allocates:
        parts.append(f"allocates {_names(kernel.allocates)}")
    if kernel.parts:
        parts.append(f"parts {_names(kernel.parts)}")
    if kernel.num_bytes:
        parts.append(f"bytes {kernel.num_bytes}")
    if kernel.flops:
        parts.append(f"flops {kernel.flops}")
    if kernel.ops:
        parts.append(f"ops {_names(kernel.ops)}")
    if kernel.source:
        parts.append(f"from {_quote(kernel.source)}")
    if kernel.hint is not None:
        parts.append(f"for {_quote(kernel.hint)}")
    if kernel.module:
        parts.append(f"in {_quote(kernel.module)}")
    return "  ".join(parts)


def _step_columns(graph: KernelGraph, step: Step) -> tuple[str, str, str]:
    stream = f"s{step.stream}"
    match step:
        case Launch(kernel=kernel):
            known = 0 <= kernel < len(graph.kernels)
            return stream, "launch", f"{kernel} {_quote(graph.kernels[kernel].name)}" if known else f"{kernel}"
        case Record(event=event):
            return stream, "record", f"e{event}"
        case Wait(event=event):
            return stream, "wait", f"e{event}"
        case Allocate(buffer=buffer):
            return stream, "allocate", _quote(buffer)
        case Free(buffer=buffer):
            return stream, "free", _quote(buffer)


def _align(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Indent rows and pad every column but the last to its widest entry."""
    widths = [min(max(map(len, column)), _WIDEST_COLUMN) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        yield "  " + "  ".join([*map(str.ljust, row, widths), row[-1]])


# --- reading ---------------------------------------------------------------------------------------------------------


class _TokenLine:
    """The tokens of one line, taken from left to right."""

    def __init__(self, text: str, number: int) -> None:
        self.number = number
        self.indented = text[0] in " \t"
        self._tokens: list[tuple[str, int]] = []
        self._next = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                column = position + len(text[position:]) - len(text[position:].lstrip()) + 1
                raise ParseError(number, column, 'a word, a "quoted name", (...) or ->', repr(text[column - 1]))
            self._tokens.append((match["token"], match.start("token") + 1))
            position = match.end()
        self._end = end + 1

    @property
    def more(self) -> bool:
        return self._next < len(self._tokens)

    def fail(self, expected: str, *, back: int = 1) -> NoReturn:
        """Raise for the token taken ``back`` tokens ago (0: the one to come)."""
        index = self._next - back
        token, column = self._tokens[index] if index < len(self._tokens) else ("the end of the line", self._end)
        raise ParseError(self.number, column, expected, token)

    def peek(self) -> str:
        return self._tokens[self._next][0] if self.more else ""

    def take(self, expected: str) -> str:
        if not self.more:
            self.fail(expected, back=0)
        self._next += 1
        return self._tokens[self._next - 1][0]

    def keyword(self, *choices: str) -> str:
        expected = " or ".join(map(repr, choices))
        token = self.take(expected)
        if token not in choices:
            self.fail(expected)
        return token

    def name(self, expected: str) -> str:
        token = self.take(expected)
        if token[0] == '"':
            return _ESCAPE.sub(lambda match: self._unescape(match[1]), token[1:-1])
        if not re.fullmatch(_BARE, token):
            self.fail(expected)
        return token

    def _unescape(self, escape: str) -> str:
        if escape in ('"', "\\"):
            return escape
        if len(escape) == 1 or int(escape[1:], 16) > 0x10FFFF:
            self.fail(r"a name that is escaped only by \" \\ \xNN \uNNNN \UNNNNNNNN")
        return chr(int(escape[1:], 16))

    def integer(self, expected: str, *, prefix: str = "") -> int:
        token = self.take(expected)
        digits = token.removeprefix(prefix)
        if not token.startswith(prefix) or not _INTEGER.fullmatch(digits):
            self.fail(expected)
        return int(digits)

    def names(self, expected: str) -> tuple[str, ...]:
        if self.take(expected) != "(":
            self.fail(expected)
        names: list[str] = []
        while self.peek() != ")":
            if names:
                self.keyword(",", ")")
            names.append(self.name("a name or ')'"))
        self.keyword(")")
        return tuple(names)

    def optional(self, keyword: str) -> bool:
        found = self.peek() == keyword
        self._next += found
        return found

    def end(self, expected: str = "the end of the line") -> None:
        if self.more:
            self.fail(expected, back=0)


class _Reader:
    """The lines of a text, without blank lines and comments."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        shown = ((number, line) for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#")
        self._lines = [_TokenLine(line, number) for number, line in shown]
        self._next = 0
        self._last = len(lines)

    def heading(self, keyword: str) -> _TokenLine:
        if self._next == len(self._lines):
            raise ParseError(self._last, 1, repr(keyword), "the end of the text")
        line = self._lines[self._next]
        if line.indented:
            line.fail(f"{keyword!r} at the beginning of the line", back=0)
        line.keyword(keyword)
        self._next += 1
        return line

    def at(self, keyword: str) -> bool:
        """Return whether the next heading begins with a keyword."""
        return self._next < len(self._lines) and self._lines[self._next].peek() == keyword

    def entries(self) -> Iterator[_TokenLine]:
        while self._next < len(self._lines) and self._lines[self._next].indented:
            self._next += 1
            yield self._lines[self._next - 1]

    def finish(self) -> None:
        if self._next < len(self._lines):
            self._lines[self._next].fail("the end of the text", back=0)


def _parse_graph(reader: _Reader) -> KernelGraph:
    head = reader.heading("graph")
    name = head.name("the graph's name")
    head.end()
    ends = []
    for heading in ("inputs", "outputs"):
        line = reader.heading(heading)
        ends.append(line.names(f"the {heading} as (...)"))
        line.end()
    reader.heading("buffers").end()
    buffers = tuple(map(_parse_buffer, reader.entries()))
    reader.heading("kernels").end()
    kernels = tuple(map(_parse_kernel, reader.entries()))
    return KernelGraph(name, kernels, buffers, *ends)


def _parse_buffer(line: _TokenLine) -> Buffer:
    name = line.name("a buffer's name")
    role = Role(line.keyword(*(role.value for role in Role)))
    device = line.name("a device")
    num_bytes = line.integer("the number of bytes")
    alias_of = None
    if line.optional("view"):
        line.keyword("of")
        alias_of = line.name("the buffer that it is a view of")
    line.end("'view of' or the end of the line")
    return Buffer(name, num_bytes, device, role, alias_of)


def _parse_kernel(line: _TokenLine) -> Kernel:
    number = line.integer("the kernel's number")
    kind = KernelKind(line.keyword(*(kind.value for kind in KernelKind)))
    name = line.name("the kernel's name")
    device = line.name("a device")
    reads = line.names("the buffers read as (...)")
    line.keyword("->")
    writes = line.names("the buffers written as (...)")
    allocates = line.names("the buffers allocated as (...)") if line.optional("allocates") else ()
    parts = line.names("the buffers of which it writes a part as (...)") if line.optional("parts") else ()
    num_bytes = line.integer("the number of bytes") if line.optional("bytes") else 0
    flops = line.integer("the number of operations") if line.optional("flops") else 0
    ops = line.names("the fused operators as (...)") if line.optional("ops") else ()
    source = line.name("the source line") if line.optional("from") else ""
    hint = line.name("the stream it is written for") if line.optional("for") else None
    module = line.name("the module it computes") if line.optional("in") else ""
    known = "'allocates', 'parts', 'bytes', 'flops', 'ops', 'from', 'for' or 'in'"
    line.end(f"{known}, in this order, or the end of the line")
    effects = reads, writes, allocates, num_bytes, flops
    return Kernel(number, name, kind, device, *effects, ops, source, parts, hint, module)


def _parse_layout(reader: _Reader) -> MemoryLayout:
    head = reader.heading("arena")
    arena_bytes, device = head.integer("the size of the arena"), head.name("the device")
    head.end()
    offset_of = {}
    for line in reader.entries():
        buffer = line.name("a buffer's name")
        offset_of[buffer] = line.integer("its offset in the arena")
        line.end()
    return MemoryLayout(offset_of, arena_bytes, device)


def _parse_step(line: _TokenLine, launches: list[tuple[_TokenLine, int, str]]) -> Step:
    stream = line.integer("a stream such as s0", prefix="s")
    verb = line.keyword("launch", "record", "wait", "allocate", "free")
    step: Step
    if verb == "launch":
        step = Launch(line.integer("a kernel's number"), stream)
        if line.more:
            launches.append((line, step.kernel, line.name("the kernel's name")))
    elif verb in ("record", "wait"):
        step = (Record if verb == "record" else Wait)(line.integer("an event such as e0", prefix="e"), stream)
    else:
        step = (Allocate if verb == "allocate" else Free)(line.name("a buffer's name"), stream)
    line.end()
    return step
