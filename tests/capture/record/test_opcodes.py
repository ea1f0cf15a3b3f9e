"""Every instruction of this Python has a treatment, and the depth of the stack before it is known."""

import argparse
import ast
import asyncio.tasks
import dataclasses
import dis
import types
from pathlib import Path

import pytest

from millstream.capture.record.interpreter.opcodes import (
    NOTHING,
    TREATMENTS,
    depths_of,
    instructions_of,
    opcode_names,
    sites_of,
)

MODULES = [argparse, ast, asyncio.tasks, dataclasses]


def codes_of(module):
    waiting = [compile(Path(module.__file__).read_text(encoding="utf-8"), module.__file__, "exec")]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def test_every_instruction_has_a_treatment():
    assert opcode_names() <= TREATMENTS.keys() | NOTHING
    assert TREATMENTS.keys().isdisjoint(NOTHING)


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_the_stack_is_as_deep_as_the_compiler_says(module):
    for code in codes_of(module):
        depths = depths_of(code, instructions_of(code))
        assert min(depths.values()) == 0
        assert max(depths.values()) <= code.co_stacksize, code.co_qualname
        assert all(site.num_operands <= site.depth for site in sites_of(code).values()), code.co_qualname


def test_instructions_are_those_of_the_library():
    for code in codes_of(dataclasses):
        items = [item for item in dis.get_instructions(code) if item.opname != "EXTENDED_ARG"]
        ours = [*instructions_of(code)]
        assert [(2 * each.unit, each.name) for each in ours] == [(item.offset, item.opname) for item in items]
        jumps = [item.argval for item in items if item.opcode in {*dis.hasjrel, *dis.hasjabs}]
        assert [2 * each.target for each in ours if each.target is not None] == jumps


def test_names_are_those_of_the_library():
    for code in codes_of(argparse):
        names = {item.offset // 2: item.argval for item in dis.get_instructions(code)}
        for unit, site in sites_of(code).items():
            if site.action in ("attribute", "global_variable", "cell", "store_cell", "store_attribute"):
                assert names[unit] == site.argument or unit not in names or isinstance(names[unit], int)
