# ruff: noqa: E501
"""Random steps as Python source: some cells of the table, read in various ways; and how they are run and compared."""

from __future__ import annotations

import gc
import linecache
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.guards.cells import CELLS, Cell
from tests.capture.worlds import assert_same, interpret

PREAMBLE = """
import argparse, array, contextvars, copy, ctypes, dataclasses, enum, functools, io, multiprocessing, operator, os, sys, types, weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
import numpy as np
import torch
from torch import Tensor, nn
"""

WAYS = {  # where the value is read: what must be there, and the expression in the step
    "in the step": ("", "{}"),
    "in a helper": ("def helper#(y):\n    return {}", "helper#(y)"),
    "in a lambda": ("lambda# = [lambda y: {}]", "lambda#[0](y)"),
    "in a method": ("class R#:\n    def read(self, y):\n        return {}\nreader# = R#()", "reader#.read(y)"),
    "in forward": ("class F#(nn.Module):\n    def forward(self, y):\n        return {}\nf_#_ = F#()", "f_#_(y)"),
    "in a comprehension": ("", "sum([({}) for _ in range(1)])"),
}

WRITES = {  # what a step may keep from call to call: setup, statement
    "nothing": ("", "pass"),
    "an attribute": ("kept# = types.SimpleNamespace(h=torch.zeros(2))", "kept#.h = torch.tanh(kept#.h + y.detach().sum())"),
    "in place": ("kept# = torch.zeros(2)", "kept#.mul_(0.5).add_(y.detach().sum())"),
    "an entry": ("kept# = dict(h=torch.zeros(2))", "kept#['h'] = kept#['h'] * 0.5 + y.detach().sum()"),
    "a closure": ("kept# = torch.zeros(2)", "kept# = kept# * 0.5 + y.detach().sum()"),
    "an attribute that is new": ("kept# = types.SimpleNamespace()", "kept#.h = y.detach() * 2"),
}  # fmt: skip

EFFECTS = {  # what it does on the host when the optimizer has stepped: setup, statement, what there is to compare
    "nothing": ("", "pass", "None"),
    "a counter": ("done# = types.SimpleNamespace(n=0)", "done#.n += 1", "done#.n"),
    "a counter in a dict": ("done# = dict(n=0)", "done#['n'] += 1", "done#['n']"),
    "an average": ("done# = types.SimpleNamespace(m=0.0)", "done#.m = 0.9 * done#.m + 0.1 * loss.item()", "done#.m"),
    "a line": ("done# = io.StringIO()", "print(f'{loss.item():.3e}', file=done#)", "done#.getvalue()"),
    "a scheduler": (
        "done# = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)", "done#.step()", "(done#.last_epoch, opt.param_groups[0]['lr'])"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One cell in a program.

    Attributes:
        cell: What is read and changed.
        way: Where it is read, of ``WAYS``.
        changes: Calls before which it is changed, and, each second time, changed back.
    """

    cell: Cell
    way: str
    changes: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A step, and what happens between its calls.

    Attributes:
        sites: What it reads.
        write: What it keeps, of ``WRITES``.
        effect: What it does on the host, of ``EFFECTS``.
        sizes: Lengths of the batches, one for each call.
        trains: Whether it has a backward pass and an optimizer, which take most of the time to trace.
    """

    sites: tuple[Site, ...]
    write: str = "nothing"
    effect: str = "nothing"
    sizes: tuple[int, ...] = (2,) * 8
    momentum: float = 0.5
    is_cleared: bool = True
    trains: bool = True

    @property
    def source(self) -> str:
        """Defines ``make``, which gives the step, its changes (forth and back) and the parameters."""
        setup, body, changes = [], [], []
        for number, site in enumerate(self.sites):
            cell, (prepare, expression) = site.cell, WAYS[site.way]
            parts = (cell.setup, prepare.replace("{}", cell.value))
            setup += [_numbered(part, number) for part in parts if part]
            inner = cell.value if expression == "{}" else expression.replace("{}", cell.value)
            body.append(_numbered(f"y = y * ({inner})", number))
            for which, statements in (("alter", cell.alter), ("reset", cell.reset or "pass")):
                changes.append(
                    f"def {which}_{number}():\n"
                    + textwrap.indent(_declared(_numbered(statements, number), setup, number), "    ")
                )
        keep, kept = (_numbered(part, len(self.sites)) for part in WRITES[self.write])
        prepare, done, shown = (_numbered(part, len(self.sites)) for part in EFFECTS[self.effect])
        weights = [f"w{number} = nn.Parameter(torch.ones(2))" for number in range(len(self.sites))]
        lines = [
            *weights,
            "w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))",
            f"opt = torch.optim.SGD([w], lr=0.001, momentum={self.momentum})",
            *setup,
            keep,
            prepare,
            "def step(x):",
            *([f"    nonlocal kept{len(self.sites)}"] if self.write == "a closure" else []),
            "    y = x * w",
            *(f"    {line}" for line in body),
            f"    {kept}",
            "    loss = y.square().mean()",
            *(["    loss.backward()", "    opt.step()"] if self.trains else []),
            f"    {done}",
            *(["    opt.zero_grad()"] if self.trains and self.is_cleared else []),
            "    return loss.detach(), y.sum().detach()",
            *changes,
            f"return step, [w], lambda: {shown}"
            + "".join(f", (alter_{number}, reset_{number})" for number in range(len(self.sites))),
        ]
        names = [f"G{number} = None" for number in range(len(self.sites))]
        return PREAMBLE + "\n".join(names) + "\ndef make():\n" + textwrap.indent("\n".join(lines), "    ")


def _numbered(source: str, number: int) -> str:
    return source.replace("#", str(number))


def _declared(statements: str, setup: Sequence[str], number: int) -> str:
    """The statements, with names of ``make`` that they assign made known as such."""
    assigned = set(re.findall(r"^(\w+) = ", statements, re.MULTILINE))
    lines = [f"global {name}" if name == f"G{number}" else f"nonlocal {name}" for name in sorted(assigned)]
    return "\n".join([*lines, statements])


def _load(source: str) -> Any:
    name = f"program_{abs(hash(source))}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    # A program assigns its globals in functions nested in ``make``.
    source = re.sub(r"^    (G\d+) = ", r"    global \1; \1 = ", source, flags=re.MULTILINE)
    module = sys.modules["program"] = types.ModuleType("program")  # where ``dataclass`` looks
    module.__file__ = name
    exec(compile(source, name, "exec"), vars(module))
    return module.make


@dataclass
class Outcome:
    """How a program went.

    Attributes:
        is_captured: Whether all of its calls but the first few were replays of graphs or captures.
        graphs: How many graphs there are in the end.
        refusals: Why anything ran eagerly.
    """

    is_captured: bool
    graphs: int
    refusals: list[str] = field(default_factory=list)


def run(program: Program, wrap: Callable[[Any], Any] = lambda step: Step(step, build=interpret)) -> Outcome:
    """Run a program eagerly and through the library; results and parameters must be the same after every call.

    Args:
        program: What to run; its tensors are on the default device.
        wrap: Makes the captured step of the eager one.

    Raises:
        AssertionError: They are not; the message has the source.
    """
    make = _load(program.source)
    (ours, our_weights, our_notes, *our_changes), (theirs, their_weights, their_notes, *their_changes) = make(), make()
    step = wrap(ours)
    generator = torch.Generator("cpu").manual_seed(0)
    for call, size in enumerate(program.sizes):
        for number, site in enumerate(program.sites):
            if call in site.changes:
                which = site.changes.index(call) % 2
                our_changes[number][which]()
                their_changes[number][which]()
        x = torch.randn(size, 2, generator=generator, dtype=torch.float64, device="cpu").to(torch.get_default_device())
        torch.manual_seed(call)
        expected = theirs(x.clone())
        torch.manual_seed(call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            result = step(x.clone())
        if not all(each.isfinite().all() for each in expected if isinstance(each, torch.Tensor)):
            break  # it diverges: its values tell nothing from here on
        try:
            assert_same(result, expected, name="result")
            for our, their in zip(our_weights, their_weights, strict=True):
                assert_same(our, their, name="w")
                assert_same(our.grad, their.grad, name="gradient")
            assert_same(our_notes(), their_notes(), name="effect")
        except AssertionError as error:
            raise AssertionError(f"call {call} of\n{program.source}\n{describe(program)}\n{error}") from error
    return Outcome(bool(step.graphs) and not step.refusals, len(step.graphs), step.fallbacks)


@contextmanager
def frozen() -> Iterator[None]:
    """For the length of the context, what there is already is not looked through for functions: that takes a while."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def alone(cell: Cell) -> Program:
    """A program that reads nothing else; it trains only where the cell is of the optimizer that does."""
    return Program((Site(cell, "in the step", (4,)),), sizes=(2,) * 7, trains=cell.holder == "optimizer that steps")


CALLS = 20


@st.composite
def programs(draw: Any, cells: Sequence[Cell] = tuple(CELLS)) -> Program:
    """A program over some of ``cells``, which change once or more before calls drawn at random."""
    sites = []
    for cell in draw(st.lists(st.sampled_from(cells), min_size=1, max_size=min(2, len(cells)), unique_by=str)):
        most = 2 if cell.reset else 1
        changes = draw(st.lists(st.integers(1, CALLS - 1), min_size=1, max_size=most, unique=True))
        sites.append(Site(cell, draw(st.sampled_from([*WAYS])), tuple(sorted(changes))))
    long = draw(st.sampled_from([CALLS, CALLS, CALLS - 1, 10, 3]))
    return Program(
        tuple(sites),
        write=draw(st.sampled_from([*WRITES])),
        effect=draw(st.sampled_from([*EFFECTS])),
        sizes=(2,) * long + (3,) * (CALLS - long),
        momentum=draw(st.sampled_from([0.0, 0.5])),
        is_cleared=draw(st.booleans()),
    )


def describe(program: Program) -> str:
    """The program's cells and when they change."""
    return "\n".join(f"{site.cell}, {site.way}, changes before {site.changes}" for site in program.sites)
