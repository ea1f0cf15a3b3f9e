"""What is changed about Inductor's generation of C++: work for nothing is left out."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.scheduler import SchedulerNode
from torch.nn.functional import softmax

import millstream as ms
from millstream.lower import compile as lowering
from millstream.lower.cpp_kernels import CppKernels


@pytest.fixture
def sources(monkeypatch):
    """Sources of the kernels that are generated."""
    texts: list[str] = []
    add = CppKernels.add

    def note(self, name, definition):
        texts.append(definition)
        add(self, name, definition)

    monkeypatch.setattr(CppKernels, "add", note)
    return texts


def pointwise(x):
    return torch.relu(x * 2) + 1


def reductions(x):
    return softmax(x, -1), x.mean(), (x.transpose(0, 1) * 2).contiguous(), x.var(0)


@pytest.mark.parametrize("function", [pointwise, reductions])
@pytest.mark.parametrize("shape", [(32, 64), (19, 21), (3, 5)], ids=["full vectors", "with a rest", "rest only"])
def test_shortcuts_change_no_letter(function, shape, sources, monkeypatch):
    texts = []
    for shortcuts in (lowering.shortcuts, contextlib.nullcontext):
        torch._dynamo.reset()
        sources.clear()
        monkeypatch.setattr(lowering, "shortcuts", shortcuts)
        ms.compile(function, strict=True)(torch.randn(shape))
        texts.append(list(sources))
    assert texts[0] == texts[1] != []


@pytest.mark.parametrize("is_on", [True, False])
def test_python_looks_for_garbage_again_after_the_lowering(monkeypatch, is_on):
    seen, lower = [], lowering.compile_fx_inner

    def look(*args, **kwargs):
        seen.append(gc.isenabled())
        return lower(*args, **kwargs)

    monkeypatch.setattr(lowering, "compile_fx_inner", look)
    torch._dynamo.reset()
    compiled, x = ms.compile(pointwise, strict=True), torch.randn(7)
    try:
        if not is_on:
            gc.disable()
        result = compiled(x)
        assert seen == [False]
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert torch.equal(result, pointwise(x))


def test_shortcuts_end_with_the_lowering():
    before = DtypePropagationOpsHandler.__init__, SchedulerNode.codegen
    torch._dynamo.reset()
    ms.compile(pointwise, strict=True)(torch.randn(7))
    assert before == (DtypePropagationOpsHandler.__init__, SchedulerNode.codegen)
