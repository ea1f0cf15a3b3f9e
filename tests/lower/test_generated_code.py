"""What is changed about Inductor's generation of C++: work for nothing is left out, and long kernels are cut."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.scheduler import SchedulerNode
from torch.nn.functional import cross_entropy, softmax

import millstream as ms
from millstream.lower import compile as lowering
from millstream.lower.cpp_kernels import MAX_ARGUMENTS, CppKernels


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


def test_shortcuts_and_limits_end_with_the_lowering():
    parts = (DtypePropagationOpsHandler.__init__, SchedulerNode.codegen, CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM)
    torch._dynamo.reset()
    ms.compile(pointwise, strict=True)(torch.randn(7))
    assert parts == (
        DtypePropagationOpsHandler.__init__,
        SchedulerNode.codegen,
        CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM,
    )


def test_an_optimizer_is_cut_into_kernels(sources):
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())

    @ms.step(strict=True)
    def step(x, y):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(2):
        step(torch.randn(8, 32), torch.randint(32, (8,)))
    num_arguments = [source.split("{")[0].count("_ptr") for source in sources]
    assert max(num_arguments) < MAX_ARGUMENTS + 20  # the last loop may go beyond it
