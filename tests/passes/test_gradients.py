"""Split gradients: the same numbers, and only where they are worth it."""

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from millstream.passes import gradients, split_gradients

BACKWARD = torch.ops.aten.convolution_backward.default


def backward_graph(mask=(True, True, True), **kwargs):
    """A traced convolution backward, with its example inputs."""
    x, w = torch.randn(2, 4, 7, 7), torch.randn(6, 4 // kwargs.get("groups", 1), 3, 3)
    arguments = ([6], [1, 1], [1, 1], [1, 1], False, [0, 0], kwargs.get("groups", 1), list(mask))

    def fn(grad, x, w):
        return [g for g in BACKWARD(grad, x, w, *arguments) if g is not None]

    inputs = (torch.randn(2, 6, 7, 7), x, w)
    return make_fx(fn)(*inputs), inputs


@pytest.fixture
def anywhere(monkeypatch):
    """Let the pass take the CPU for a CUDA device."""
    monkeypatch.setattr(gradients, "_on_device", lambda value: True)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", [(True, True, True), (True, True, False)])
def test_the_numbers_are_the_same(anywhere, mask, groups):
    gm, inputs = backward_graph(mask, groups=groups)
    expected = gm(*inputs)
    split = split_gradients(gm)
    assert sum(node.target is BACKWARD for node in split.graph.nodes) == 2
    assert sum(node.target is BACKWARD for node in gm.graph.nodes) == 1
    assert all(torch.equal(a, b) for a, b in zip(split(*inputs), expected, strict=True))


def test_each_part_says_what_it_returns(anywhere):
    gm, inputs = backward_graph()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in gm.graph.nodes:
        if node.target is BACKWARD:
            node.meta["val"] = tuple(mode.from_tensor(t) for t in gm(*inputs))
    split = split_gradients(gm)
    parts = [node.meta["val"] for node in split.graph.nodes if node.target is BACKWARD]
    assert [[value is not None for value in part] for part in parts] == [[True, False, False], [False, True, True]]
    assert all(node.args[0].target is BACKWARD for node in split.graph.nodes if node.target is operator.getitem)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True)])
def test_one_gradient_alone_stays_whole(anywhere, mask):
    gm, _ = backward_graph(mask)
    assert split_gradients(gm) is gm


def test_the_cpu_is_left_alone():
    gm, _ = backward_graph()
    assert split_gradients(gm) is gm
