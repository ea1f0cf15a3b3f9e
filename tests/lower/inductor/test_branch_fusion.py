"""Branches of a graph stay apart where that is asked for: kernels that do not depend on each other are not fused."""

import contextlib
import re
from contextlib import nullcontext

import pytest
import torch

import millstream as ms
from millstream._torch.workarounds import is_off, without
from millstream.errors import ArgumentError
from millstream.lower import lower_graph
from millstream.lower.inductor import branch_fusion
from tests.lower.inductor.texts import text_of


def two_branches(x, left, right):
    """What reads ``x`` before a product could well be a part of what reads it after another one."""
    return (x @ left + x).relu(), (x - 1).relu() @ right


def num_kernels(function, *off):
    @contextlib.contextmanager
    def context():
        with without(off), branch_fusion.branches_apart():
            yield

    text = text_of(function, [torch.randn(64, 64) for _ in range(3)], "cuda", context)
    return len(re.findall(r"triton_\w+\.run\(", text))


def test_branches_are_fused_only_where_they_may_be():
    assert num_kernels(two_branches) == 1
    assert num_kernels(two_branches, branch_fusion.SWITCH) == 2


def test_what_depends_on_each_other_is_fused_all_the_same():
    def chain(x, left, right):
        return ((x @ left).relu() + x).sin() * 2, (x @ right).relu() + (x @ right).sin()

    assert num_kernels(chain, branch_fusion.SWITCH) == 2


@torch.no_grad()
def test_several_devices_have_branches_apart(monkeypatch):
    found = []
    monkeypatch.setattr(
        lower_graph, "branches_apart", lambda: found.append(is_off(branch_fusion.SWITCH)) or nullcontext()
    )
    inputs = [torch.randn(8, 8) for _ in range(3)]
    for settings in (
        {},
        {"options": {"joint_branches": False}},
        {"devices": ["cpu:0", "cpu:1"]},
        {"devices": ["cpu:0", "cpu:1"], "options": {"joint_branches": True}},
    ):
        torch._dynamo.reset()
        compiled = ms.compile(two_branches, engine="serial", strict=True, **settings)
        assert all(map(torch.allclose, compiled(*inputs), two_branches(*inputs)))
    assert found == [False, True, True, False]
    with pytest.raises(ArgumentError, match="joint_branches"):
        ms.compile(two_branches, options={"joint_branches": 3})
