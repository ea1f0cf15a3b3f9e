# ruff: noqa: E501
"""Each kind of guard in turn is switched off: then a test of the cells it is for must find a stale result."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from types import CellType, MappingProxyType

import numpy as np
import pytest
import torch

from millstream.capture.guards import derive
from millstream.capture.guards.guards import Check, Guards
from millstream.capture.record.location import MISSING, Attributes, ClassAttributes, ContextValue, SlotAttributes
from millstream.capture.state.contents import is_buffer
from tests.capture.guards.cells import CELLS
from tests.capture.guards.programs import alone, frozen, run


def expecting_no(is_hole):
    """Entries of a kind are not looked at."""

    def plant(patch):
        for name in ("expect", "expect_same"):
            original = getattr(Guards, name)

            def expect(self, location, value, original=original):
                if not is_hole(location, value):
                    original(self, location, value)

            patch.setattr(Guards, name, expect)

    return plant


def measuring_no(is_hole):
    """Nor lengths, orders and items of containers of a kind."""

    def plant(patch):
        original = Guards.measure

        def measure(self, name, container, **kwargs):
            if not is_hole(container):
                original(self, name, container, **kwargs)

        patch.setattr(Guards, "measure", measure)

    return plant


def pinning_no(number):
    """Nor a part (class, bases, code, defaults) of objects."""

    def plant(patch):
        original = Guards.pin

        def pin(self, owner):
            original(self, owner)
            self.pins[number].things.clear()

        patch.setattr(Guards, "pin", pin)

    return plant


def seeing_no(*positions):
    """Nor a part of what tensors look like."""

    def plant(patch):
        original = derive.whole_form_of

        def whole_form_of(value):
            form = original(value)
            if len(form) == 2:
                return form
            flat = [form[0], *form[1], *form[2:]]
            return [part for position, part in enumerate(flat) if position not in positions]

        patch.setattr(derive, "whole_form_of", whole_form_of)

    return plant


def checking_no(*checks, **replaced):
    """Nor all that stands in a list of checks."""

    def plant(patch):
        original = derive.make_guards

        def make_guards(*args):
            guards = original(*args)
            left_out = [getattr(guards, name) for name in checks]
            guards._quick = [check for check in guards._quick if not any(check is each for each in left_out)]
            for name, value in replaced.items():
                setattr(guards, name, value)
            return guards

        patch.setattr("millstream.capture.step.capturing.bind.make_guards", make_guards)

    return plant


def copying_no(what, **replaced):
    """Nor what is in a container of modules or optimizers."""

    def plant(patch):
        original = Guards.copy

        def copy(self, name, container):
            if not name.endswith(what):
                original(self, name, container)

        patch.setattr(Guards, "copy", copy)
        checking_no(**replaced)(patch)

    return plant


def without(target, value):
    return lambda patch: patch.setattr(target, value)


def both(one, other):
    """For what is noticed in two ways."""

    def plant(patch):
        one(patch)
        other(patch)

    return plant


def is_attribute(location):
    return isinstance(location.holder, dict) and "." in location.name and not location.name.endswith("]")


def is_plain_dict(holder):
    return isinstance(holder, dict) and "__module__" not in holder and "__builtins__" not in holder


HOLES = {  # what is switched off, how, and a part of the names of the cells that the search is over
    "closure cells": (expecting_no(lambda at, value: isinstance(at.holder, CellType)), "closure / a"),
    "globals": (expecting_no(lambda at, value: isinstance(at.holder, dict) and "__builtins__" in at.holder), "global / a"),
    "attributes": (expecting_no(lambda at, value: is_attribute(at)), "object / a number"),
    "attributes of a namespace": (expecting_no(lambda at, value: is_attribute(at)), "namespace / getattr / "),
    "entries of dicts": (expecting_no(lambda at, value: at.name.endswith("]") and isinstance(at.holder, dict)), "dict / a"),
    "items of lists": (expecting_no(lambda at, value: isinstance(at.holder, list)), "list / sum"),
    "attributes of classes": (expecting_no(lambda at, value: isinstance(at.holder, ClassAttributes | MappingProxyType)), "class / a number"),
    "slots": (expecting_no(lambda at, value: isinstance(at.holder, SlotAttributes)), "slots / a number"),
    "context variables": (expecting_no(lambda at, value: isinstance(at.holder, ContextValue)), "context variable / a number"),
    "environment variables": (expecting_no(lambda at, value: at.holder is os.environ._data), "environment"),
    "what is not there": (expecting_no(lambda at, value: value is MISSING), "parameter / hasattr"),
    "absent entries of the environment": (expecting_no(lambda at, value: value is MISSING), "environment / in"),
    "plain values": (expecting_no(lambda at, value: isinstance(value, float)), "namespace / a number"),
    "functions": (expecting_no(lambda at, value: callable(value)), "a function / rebind"),
    "state by identity": (expecting_no(lambda at, value: isinstance(value, torch.Tensor)), "values of a tensor / rebind"),
    "lengths of lists": (measuring_no(lambda each: isinstance(each, list)), "list / len / append"),
    "lengths of dicts": (measuring_no(is_plain_dict), "dict / len"),
    "the order of dicts": (measuring_no(is_plain_dict), "dict / order"),
    "sets": (measuring_no(lambda each: isinstance(each, set)), "set / "),
    "deques": (measuring_no(lambda each: isinstance(each, deque)), "deque / order"),
    "arrays of NumPy": (measuring_no(lambda each: isinstance(each, np.ndarray)), "array of NumPy / item"),
    "buffers": (measuring_no(is_buffer), "bytearray"),
    "C's values": (measuring_no(is_buffer), "ctypes"),
    "long containers": (measuring_no(lambda each: not isinstance(each, Attributes) and len(each) > 1000), "long "),
    "attributes that appear": (expecting_no(lambda at, value: value is MISSING), "namespace / hasattr / appears"),
    "attributes of classes that appear": (expecting_no(lambda at, value: value is MISSING), "class / hasattr"),
    "the class of an object": (pinning_no(0), "object / its "),
    "the class of a module": (pinning_no(0), "module / its class"),
    "the bases of a class": (pinning_no(1), "__bases__"),
    "a function's code": (pinning_no(2), "its code"),
    "its defaults": (pinning_no(3), "its defaults"),
    "its defaults by keyword": (pinning_no(4), "its keyword defaults"),
    "shapes": (seeing_no(1, 4), "shape of a tensor / rebind"),
    "dtypes": (seeing_no(2), "dtype of a tensor"),
    "strides": (seeing_no(4), "stride of a tensor"),
    "offsets": (seeing_no(7), "offset of a tensor"),
    "whether there is a gradient": (seeing_no(8), "grad of a tensor / grad "),
    "whether there is a tensor": (without("millstream.capture.guards.derive.kind_of", lambda value: None), "none of a tensor"),
    "what was looked at": (without("millstream.capture.guards.derive._add_forms", lambda *_: None), "len of a tensor"),
    "addresses": (checking_no("placed"), "values of a tensor / data"),
    "hooks": (copying_no("hooks", hooks=Check("", id)), "module / hooks"),
    "submodules": (both(copying_no("submodules"), without("millstream.capture.record.recorded_calls.find_reads", lambda *_: ())), "module / submodules"),
    "dicts of objects": (without("millstream.capture.guards.guards._has_own_dict", lambda owner: False), "object / a number / __dict__"),
    "attributes of modules": (expecting_no(lambda at, value: "_parameters" in at.holder if isinstance(at.holder, dict) else False), "out_features"),
    "shapes of arguments": (without("millstream.capture.state.signature.spec_of", lambda tensor: ((), tensor.dtype, tensor.device, (), False, False)), "dict / in / add"),
    "learning rates": (without("millstream.capture.step.graph.StepGraph.fill_slots", lambda self: None), "optimizer that steps / lr"),
    "names that are computed": (without("millstream.capture.record.recorded_calls.find_reads", lambda *_: ()), "computed name"),
    "attributes that are matched": (without("millstream.capture.record.recorder.Recorder._match_class", lambda *_: None), "match by position"),
    "PyTorch's own objects": (without("millstream.capture.state.relevant._is_looked_into", lambda owner: False), "log_prob"),
    "what is called": (without("millstream.capture.record.recorder.Recorder._called", lambda *_: None), "its defaults"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    with frozen():
        yield


@pytest.mark.parametrize("hole", HOLES)
def test_a_cell_is_stale_then(hole, monkeypatch):
    plant, cells = HOLES[hole]
    chosen = [cell for cell in CELLS if cells in f"{cell} / "]
    assert chosen, cells
    plant(monkeypatch)
    if hole == "shapes of arguments":  # a kernel is given another one
        with pytest.raises(RuntimeError, match="must match"):
            run(dataclasses.replace(alone(chosen[0]), sizes=(2, 2, 2, 3), trains=True))
    else:
        with pytest.raises(AssertionError, match=r"call \d+ of"):
            [run(alone(cell)) for cell in chosen]
