"""Arguments that a kernel gets while it is generated, and how another one gets the same for other buffers.

Private APIs of Inductor's code generation; tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
from torch._inductor.codegen.common import REMOVED, DeferredLine, KernelArgs, is_buffer_removed

from millstream.lower.inductor.once.forms import BufferNumbers


@dataclass(frozen=True)
class Bound:
    """Changes that some loops made to the arguments of their kernel, with numbers for names.

    Attributes:
        in_place: Of buffers that are written over: what is written there, or ``None`` where it came out that nothing
            needs the memory.
        inputs: In their order.
        outputs: Likewise, and whether it came out that nothing needs them.
        offsets: Places of seeds that are arguments, and what the kernel calls them.
    """

    in_place: tuple[tuple[int, int | None], ...]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, bool], ...]
    offsets: tuple[tuple[int, str], ...]


def arguments_form(args: KernelArgs, names: BufferNumbers) -> Hashable:
    """Return what arguments a kernel has already, of those with a number."""
    found = []
    for name in [*names.number]:
        in_place, output = args.inplace_buffers.get(name), args.output_buffers.get(name)
        others = getattr(in_place, "other_names", None)
        found.append(
            (
                name in args.input_buffers,
                None if output is None else isinstance(output, str),
                None if in_place is None else others is not None,
                tuple(map(names, others or ())),
            )
        )
    return tuple(found), tuple(args.sizevars.items())


class NotedArguments:
    """Notes what arguments a kernel gets."""

    def __init__(self, args: Any) -> None:
        self._args, self._in_place = args, list[tuple[str, str | None]]()
        self._before = [{**each} for each in (args.input_buffers, args.output_buffers, args.inplace_buffers)]
        self._before.append({**args.sizevars})
        self._num_workspaces = len(args.workspace_args)
        self._removed = {name for name, buffer in args.inplace_buffers.items() if buffer is REMOVED}
        make_inplace = args.make_inplace

        def note(old: str, new: str) -> None:
            self._note_removed()
            self._in_place.append((old, new))
            make_inplace(old, new)

        args.make_inplace = note

    def _note_removed(self) -> None:
        for name, buffer in self._args.inplace_buffers.items():
            if buffer is REMOVED and name not in self._removed:
                self._removed.add(name)
                self._in_place.append((name, None))

    def end(self, names: BufferNumbers) -> Bound:
        """Return what it got.

        Raises:
            KeyError: It got more than can be bound again.
        """
        args, number = self._args, names.number
        del args.make_inplace
        self._note_removed()
        now = args.input_buffers, args.output_buffers, args.inplace_buffers, args.sizevars
        is_changed = any(
            after.get(name) is not value
            for before, after in zip(self._before, now, strict=True)
            for name, value in before.items()
        )
        sizes = {size: inner for size, inner in args.sizevars.items() if size not in self._before[-1]}
        if is_changed or len(args.workspace_args) != self._num_workspaces or not all(size.is_Integer for size in sizes):
            raise KeyError
        inputs, outputs = self._before[:2]
        return Bound(
            tuple((number[old], None if new is None else number[new]) for old, new in self._in_place),
            tuple(number[name] for name in args.input_buffers if name not in inputs),
            tuple(
                (number[name], inner is REMOVED) for name, inner in args.output_buffers.items() if name not in outputs
            ),
            tuple((names.offset[int(size)], inner) for size, inner in sizes.items()),
        )


def bind(args: Any, bound: Bound, names: Sequence[str], offsets: Sequence[int]) -> None:
    """Give a kernel the arguments that equal loops have got."""
    for old, new in bound.in_place:
        if new is None:
            args.inplace_buffers[names[old]] = REMOVED
        else:
            args.make_inplace(names[old], names[new])
    for number in bound.inputs:
        prefix = "seed" if names[number].startswith("seed") else "in_ptr"
        args._lookup(prefix, args.input_buffers, names[number])
    for number, is_removed in bound.outputs:
        args._lookup("out_ptr", args.output_buffers, names[number])
        if is_removed:
            args.output_buffers[names[number]] = REMOVED
    for number, inner in bound.offsets:
        args.sizevars[sympy.Integer(offsets[number])] = inner


def inner_names(args: KernelArgs) -> Iterator[tuple[str, str, str]]:
    """Yield what a kernel calls its arguments, by their kinds and the names of buffers."""
    yield from (("input", inner, name) for name, inner in args.input_buffers.items())
    yield from (("output", inner, name) for name, inner in args.output_buffers.items() if isinstance(inner, str))
    for name, buffer in args.inplace_buffers.items():
        if buffer is not REMOVED:
            yield "in place", buffer.inner_name, name  # pyrefly: ignore[missing-attribute]


# --- lines of code ---


Part = str | tuple[str, int]
"""Text, or the kind of a name, and the number of the buffer."""
Line = tuple[tuple[Part, ...], int | None]
"""Its parts, and the number of the buffer that it is for, if it is left out where nothing needs that."""

_NONE: Mapping[str, int] = MappingProxyType({})

_INNER = re.compile(r"\b((?:in_out_ptr|in_ptr|out_ptr|seed)\d+)\b")
"""What kernels call buffers."""

_OFFSET = re.compile(r"(\[static_cast<int64_t>\()(\d+)(?=L\)\])|( \+ \()(\d+)(?=\))")
"""What comes after the name of a buffer of which one element is read: its place, in C++ and in Triton."""


def read_lines(
    lines: Sequence[Any], args: KernelArgs, names: BufferNumbers, variables: Mapping[str, int] = _NONE
) -> Iterator[Line]:
    """Yield lines of code, without those that are left out.

    Args:
        lines: Of a kernel.
        args: Its arguments.
        names: Numbers for its buffers.
        variables: For each letter or word with which names of variables begin: the first number after it.

    Raises:
        KeyError: There is something in them that cannot be written for other buffers.
    """
    number = names.number
    outer = {inner: (kind, name) for kind, inner, name in inner_names(args)}
    words = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in number))
    for line in lines:
        condition, text = (line.name, line.line) if type(line) is DeferredLine else (None, line)
        if condition is not None and is_buffer_removed(condition):
            continue
        if type(text) is not str or words.search(text):
            raise KeyError(text)
        before, *rest = _INNER.split(text)
        parts: list[Part] = [*_read_variables(before, variables)]
        for inner, after in zip(rest[::2], rest[1::2], strict=True):
            kind, name = outer[inner]
            parts.append((kind, number[name]))
            if name in names.picked:
                match = _OFFSET.match(after)
                if match is None:
                    raise KeyError(text)
                bracket, element = (each for each in match.groups() if each is not None)
                parts += [bracket, ("element", names.offset[int(element)])]
                after = after[match.end() :]
            parts += _read_variables(after, variables)
        yield tuple(parts), None if condition is None else number[condition]


def _read_variables(text: str, variables: Mapping[str, int]) -> Iterator[Part]:
    """Yield a text, apart where variables stand that are numbered.

    Raises:
        KeyError: One of them is of other code.
    """
    if not variables:
        yield text
        return
    before, *rest = re.split(rf"\b({'|'.join(variables)})(\d+)\b", text)
    yield before
    for kind, number, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if int(number) < variables[kind]:
            raise KeyError(number)
        yield from ((kind, int(number) - variables[kind]), after)


def write_lines(
    lines: Sequence[Line],
    args: KernelArgs,
    names: Sequence[str],
    offsets: Sequence[int],
    variables: Mapping[str, int] = _NONE,
) -> Iterator[str | DeferredLine]:
    """Yield them again for other buffers and variables; arguments likewise."""
    known = {(kind, name): inner for kind, inner, name in inner_names(args)}

    def write(part: Part) -> str:
        if isinstance(part, str):
            return part
        kind, number = part
        if kind in variables:
            return f"{kind}{variables[kind] + number}"
        return str(offsets[number]) if kind == "element" else known[kind, names[number]]

    for parts, condition in lines:
        text = "".join(map(write, parts))
        yield text if condition is None else DeferredLine(names[condition], text)
