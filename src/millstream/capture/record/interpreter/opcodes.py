"""Reads and writes of each instruction of Python 3.11 to 3.13, and their objects' positions on the stack.

The interpreter says before which instruction it is (see ``recorder.cpp``); what that instruction is about to do is
known from this table and the entries of the stack that it takes. So no code is changed. Instructions are those of
``co_code``, which are never the specialised ones.

**Contract**
- Every instruction of these versions stands in the table, be it as one that reads and writes nothing.
- An entry of the stack is told from its bottom: the depth before each instruction is known from the code alone.
"""

from __future__ import annotations

import dis
import functools
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

TREATMENTS: dict[str, tuple[str, int]] = {
    # name: the action, and how many entries of the stack it takes; see ``Recorder`` for what an action records
    "LOAD_ATTR": ("attribute", 1),
    "LOAD_METHOD": ("attribute", 1),
    "IMPORT_FROM": ("attribute", 1),
    "LOAD_SUPER_ATTR": ("super_attribute", 3),
    "LOAD_GLOBAL": ("global_variable", 0),
    "LOAD_NAME": ("name", 0),
    "LOAD_FROM_DICT_OR_GLOBALS": ("name", 0),
    "LOAD_DEREF": ("cell", 0),
    "LOAD_CLASSDEREF": ("cell", 0),
    "LOAD_FROM_DICT_OR_DEREF": ("cell", 0),
    "BINARY_SUBSCR": ("item", 2),
    "BINARY_SLICE": ("slice", 3),
    "CONTAINS_OP": ("contains", 2),
    "MATCH_KEYS": ("match_keys", 2),
    "MATCH_CLASS": ("match_class", 3),
    "MATCH_MAPPING": ("kind", 1),
    "MATCH_SEQUENCE": ("kind", 1),
    "CHECK_EXC_MATCH": ("kind", 1),
    "CHECK_EG_MATCH": ("kind", 1),
    "BEFORE_WITH": ("enter", 1),
    "BEFORE_ASYNC_WITH": ("enter", 1),
    "GET_LEN": ("length", 1),
    "GET_ITER": ("contents", 1),
    "GET_YIELD_FROM_ITER": ("contents", 1),
    "GET_AITER": ("contents", 1),
    "GET_AWAITABLE": ("contents", 1),
    "GET_ANEXT": ("advance", 1),
    "FOR_ITER": ("advance", 1),
    "SEND": ("advance", 2),
    "UNPACK_SEQUENCE": ("contents", 1),
    "UNPACK_EX": ("contents", 1),
    "LIST_EXTEND": ("contents", 1),
    "SET_UPDATE": ("set_contents", 1),
    "DICT_UPDATE": ("contents", 1),
    "DICT_MERGE": ("contents", 1),
    "IMPORT_STAR": ("contents", 1),
    "IMPORT_NAME": ("import_", 2),
    "COMPARE_OP": ("operator", 2),
    "IS_OP": ("identity", 2),
    "BINARY_OP": ("operator", 2),
    "UNARY_NEGATIVE": ("operator", 1),
    "UNARY_POSITIVE": ("operator", 1),
    "UNARY_INVERT": ("operator", 1),
    "CALL_INTRINSIC_1": ("intrinsic", 1),
    "FORMAT_VALUE": ("text", 1),
    "FORMAT_SIMPLE": ("text", 1),
    "FORMAT_WITH_SPEC": ("text", 2),
    "CONVERT_VALUE": ("text", 1),
    "PRINT_EXPR": ("text", 1),
    "UNARY_NOT": ("truth", 1),
    "TO_BOOL": ("truth", 1),
    "JUMP_IF_FALSE_OR_POP": ("truth", 1),
    "JUMP_IF_TRUE_OR_POP": ("truth", 1),
    "POP_JUMP_IF_FALSE": ("truth", 1),
    "POP_JUMP_IF_TRUE": ("truth", 1),
    "POP_JUMP_BACKWARD_IF_FALSE": ("truth", 1),
    "POP_JUMP_BACKWARD_IF_TRUE": ("truth", 1),
    "POP_JUMP_FORWARD_IF_FALSE": ("truth", 1),
    "POP_JUMP_FORWARD_IF_TRUE": ("truth", 1),
    "PRECALL": ("call", 2),  # and its arguments: see ``_num_operands``
    "CALL": ("call", 2),
    "CALL_KW": ("call_with_names", 3),
    "CALL_FUNCTION_EX": ("call_spread", 3),
    "STORE_ATTR": ("store_attribute", 2),
    "DELETE_ATTR": ("delete_attribute", 1),
    "STORE_SUBSCR": ("store_item", 3),
    "DELETE_SUBSCR": ("delete_item", 2),
    "STORE_SLICE": ("store_slice", 4),
    "STORE_GLOBAL": ("store_global", 1),
    "DELETE_GLOBAL": ("store_global", 0),
    "STORE_NAME": ("store_name", 1),
    "DELETE_NAME": ("store_name", 0),
    "STORE_DEREF": ("store_cell", 1),
    "DELETE_DEREF": ("store_cell", 0),
}

NOTHING = frozenset(
    """
    ASYNC_GEN_WRAP BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE CACHE
    CALL_INTRINSIC_2 CLEANUP_THROW COPY COPY_FREE_VARS DELETE_FAST END_ASYNC_FOR END_FOR END_SEND ENTER_EXECUTOR
    EXIT_INIT_CHECK EXTENDED_ARG INTERPRETER_EXIT JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD KW_NAMES
    LIST_APPEND LIST_TO_TUPLE LOAD_ASSERTION_ERROR LOAD_BUILD_CLASS LOAD_CLOSURE LOAD_CONST LOAD_FAST
    LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_LOCALS MAKE_CELL MAKE_FUNCTION MAP_ADD NOP POP_EXCEPT
    POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_TOP PREP_RERAISE_STAR PUSH_EXC_INFO PUSH_NULL RAISE_VARARGS RERAISE
    RESERVED RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE SETUP_ANNOTATIONS SET_ADD SET_FUNCTION_ATTRIBUTE
    STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST SWAP WITH_EXCEPT_START YIELD_VALUE
    """.split()
)
"""Those that move values between the stack, local variables and what they have just made."""

ATOMIC, SLOT = 1, 2
"""Of an ``InstructionSite``: numbers and text on the stack are of no interest; a cell is among the variables."""

_VERSION = sys.version_info[:2]
_IS_311 = _VERSION == (3, 11)
_FORGETS_ATOMS = frozenset(
    """
    attribute item slice contains length contents operator operator_in_place text truth call call_with_names kind
    """.split()
)
_HAS_CELL = frozenset({"cell", "store_cell"})
_CALLS = frozenset({"PRECALL", "CALL", "CALL_KW"})
_ENDS = frozenset(
    """
    RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE INTERPRETER_EXIT JUMP_FORWARD JUMP_BACKWARD
    JUMP_BACKWARD_NO_INTERRUPT
    """.split()
)
_CACHE = dis.opmap["CACHE"]
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_SHIFTS = {
    "LOAD_GLOBAL": 1,
    "LOAD_ATTR": 0 if _IS_311 else 1,
    "LOAD_SUPER_ATTR": 2,
    "COMPARE_OP": {11: 0, 12: 4, 13: 5}.get(_VERSION[1], 5),
}
"""Bits of an argument that say something else."""
_BINARY = "add and floordiv lshift matmul mul mod or pow rshift sub truediv xor".split()
"""Of ``BINARY_OP``, in the order of its argument, and again for those in place."""
_COMPARISONS = "lt le eq ne gt ge".split()


@dataclass(frozen=True, slots=True)
class InstructionSite:
    """An instruction that reads or writes.

    Attributes:
        action: What it does, see ``TREATMENTS``.
        argument: A name, or the instruction's number.
        depth: Of the stack before it.
        num_operands: How many of the topmost entries it takes.
        slot: Of the cell among the frame's variables; -1 for none.
    """

    action: str
    argument: Any
    depth: int
    num_operands: int
    slot: int = -1

    @property
    def flags(self) -> int:
        """``ATOMIC``, ``SLOT`` or both."""
        return ATOMIC * (self.action in _FORGETS_ATOMS) + SLOT * (self.slot >= 0)


class Instruction(NamedTuple):
    """One of ``co_code``; places are in units of two bytes."""

    first: int  # where it begins, with what extends it
    unit: int
    name: str
    opcode: int
    argument: int
    after: int  # where the next one begins

    @property
    def target(self) -> int | None:
        """Where it may jump to."""
        if self.opcode not in _JUMPS:
            return None
        return self.after - self.argument if "BACKWARD" in self.name else self.after + self.argument


def instructions_of(code: CodeType) -> Iterator[Instruction]:
    """Yield what ``dis.get_instructions`` gives, in a tenth of its time."""
    units = code.co_code
    extended, first, unit = 0, 0, 0
    while unit < len(units) // 2:
        opcode = units[2 * unit]
        argument = extended | units[2 * unit + 1]
        after = unit + 1
        while 2 * after < len(units) and units[2 * after] == _CACHE:
            after += 1
        if opcode == dis.EXTENDED_ARG:
            extended = argument << 8
        else:
            yield Instruction(first, unit, dis.opname[opcode], opcode, argument, after)
            extended, first = 0, after
        unit = after


def sites_of(code: CodeType) -> dict[int, InstructionSite]:
    """The instructions of some code that read or write, by their place among its units.

    An instruction that is extended stands there by where it begins, too: versions differ in what they speak of.
    """
    items = [*instructions_of(code)]
    depths, found = depths_of(code, items), {}
    for item in items:
        if item.name in TREATMENTS and item.unit in depths and (site := _site_of(item, depths[item.unit], code)):
            found[item.first] = found[item.unit] = site
    return found


def packed(sites: dict[int, InstructionSite], code: CodeType) -> bytes:
    """The same for ``recorder.cpp``: of each unit depth, number of operands, flags and slot, in 8 bytes."""
    units = bytearray(8 * (len(code.co_code) // 2))
    for unit, site in sites.items():
        struct.pack_into("=HHHH", units, 8 * unit, site.depth, site.num_operands, 0x80 | site.flags, max(site.slot, 0))
    return bytes(units)


def depths_of(code: CodeType, items: Iterable[Instruction]) -> dict[int, int]:
    """How many entries are on the stack before each of some code's instructions that can be reached, by its unit."""
    at = {item.first: item for item in items}
    depths: dict[int, int] = {}
    pending = [(0, 0), *_handlers_of(code)]
    while pending:
        unit, depth = pending.pop()
        while (item := at.get(unit)) is not None and item.unit not in depths:
            depths[item.unit] = depth
            if (target := item.target) is not None:
                pending.append((target, depth + _effect(item.opcode, item.argument, is_jump=True)))
            if item.name in _ENDS:
                break
            depth += _effect(item.opcode, item.argument, is_jump=False)
            unit = item.after
    return depths


def _handlers_of(code: CodeType) -> Iterator[tuple[int, int]]:
    """Yield where handlers of exceptions begin, and the depth there.

    See CPython's InternalDocs/exception_handling.md.
    """
    numbers = _varints_of(code.co_exceptiontable)
    for _, _, target, lasti in zip(*[numbers] * 4, strict=True):
        yield target, (lasti >> 1) + (lasti & 1) + 1


def _varints_of(table: bytes) -> Iterator[int]:
    number = 0
    for byte in table:
        number = number << 6 | byte & 0x3F
        if not byte & 0x40:
            yield number
            number = 0


@functools.cache
def _effect(opcode: int, argument: int, *, is_jump: bool) -> int:
    if dis.opname[opcode] == "RETURN_GENERATOR":
        return 1  # what is sent when the generator begins
    return dis.stack_effect(opcode, argument if opcode >= dis.HAVE_ARGUMENT else None, jump=is_jump)


def _site_of(item: Instruction, depth: int, code: CodeType) -> InstructionSite | None:
    if _IS_311 and item.name == "CALL":  # there ``PRECALL`` has come before it
        return None
    action, num_operands = TREATMENTS[item.name]
    if item.name == "BINARY_OP" and item.argument >= len(_BINARY):
        action = "operator_in_place"
    slot = item.argument if action in _HAS_CELL else -1
    num_operands += item.argument * (item.name in _CALLS)
    num_operands += (item.argument & 1) * (item.name == "CALL_FUNCTION_EX")
    num_operands += (item.argument & 4 == 4) * (item.name == "FORMAT_VALUE")
    return InstructionSite(action, _argument_of(item, code), depth, num_operands, slot)


def _argument_of(item: Instruction, code: CodeType) -> Any:
    """A name, the method of an operator, or the number that stands there."""
    name, number = item.name, item.argument
    if item.opcode in dis.hasname:
        return code.co_names[number >> _SHIFTS.get(name, 0)]
    if name == "BINARY_OP":
        return _BINARY[number % len(_BINARY)]
    if name == "COMPARE_OP":
        return _COMPARISONS[number >> _SHIFTS[name]]
    if item.opcode in dis.hasfree:
        return code._varname_from_oparg(number)  # type: ignore[attr-defined]  as ``dis`` does
    return number


def opcode_names() -> set[str]:
    """Instructions that this version's compiler makes: none that its assembler or its monitoring replaces."""
    return {name for name, number in dis.opmap.items() if number < _PSEUDO and not name.startswith("INSTRUMENTED_")}


_PSEUDO = 256
