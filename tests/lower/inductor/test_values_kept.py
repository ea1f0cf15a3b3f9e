"""Nodes keep the values that AOT autograd has found, and have those that they would have if all were run again."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import compile_fx
from torch._inductor.fx_passes import freezing_patterns  # noqa: F401  before the function that it takes is replaced
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves

import millstream as ms
from millstream._torch.workarounds import replaced
from millstream.lower.inductor.shortcuts import values_kept
from tests import networks

A = torch.ops.aten


class DoneError(BaseException):
    """All that is looked at has been done."""


class Heads(nn.Module):
    """Views of one product, read as they are and turned, and values that Inductor's passes fold."""

    def __init__(self):
        super().__init__()
        self.project, self.norm, self.last = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.project(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
        scores = torch.softmax(q @ k.mT + torch.zeros(8, 8) * torch.ones(8, 1).expand(8, 8), -1)
        hidden = (scores @ v).transpose(1, 2).reshape(2, 8, 16)
        return self.last(self.norm(hidden + x).mean(1))


def describe(graph):
    """The forms of all values, and which of them lie in one memory."""
    number, found = {}, []
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")) if node.op != "output" else []:
            if isinstance(value, torch.Tensor):
                form = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
                memory = number.setdefault(value.untyped_storage()._cdata, len(number))
                found.append((node.name, *form, memory))
            else:
                found.append((node.name, value))
    return found


@pytest.fixture
def values(monkeypatch):
    """What is known of the values of each graph when it has been run, and how many of its nodes have not been."""
    graphs, counts = [], []
    propagate, run = compile_fx.fake_tensor_prop, torch.fx.Interpreter.run_node

    def note_values(gm, *args, **kwargs):
        counts.append(len(gm.graph.nodes))
        propagate(gm, *args, **kwargs)
        graphs.append((describe(gm.graph), counts[-1]))
        raise DoneError

    def count(self, node):
        if isinstance(self, FakeTensorProp) and counts:
            counts[-1] -= 1
        return run(self, node)

    monkeypatch.setattr(compile_fx, "fake_tensor_prop", note_values)
    monkeypatch.setattr(torch.fx.Interpreter, "run_node", count)
    return graphs


def train(kind):
    torch.manual_seed(0)
    model = kind()
    x, labels = (torch.randn(2, 8, 16), torch.tensor([1, 3])) if kind is Heads else networks.example(kind)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    @ms.step(strict=True)
    def step(x, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    step(x, labels)
    with pytest.raises(DoneError):
        step(x, labels)


@pytest.mark.parametrize("kind", [Heads, networks.ResNet])
def test_values_are_those_of_a_run(kind, values, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WARM_START", "0")
    train(kind)
    found = [*values]
    values.clear()
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "shortcuts")
    train(kind)
    (with_kept, kept), (run, none) = *found, *values
    assert with_kept == run
    assert kept > len(run) // 2
    assert none == 0


def changed(change):
    """The forms of a graph's values after a pass has changed it, with those kept that are."""
    with FakeTensorMode() as mode:
        inputs = [torch.empty(4, 6), torch.empty(4, 6)]
    graph = torch.fx.Graph()
    x, y = map(graph.placeholder, "xy")
    turned = graph.call_function(A.permute.default, (x, [1, 0]))
    copied = graph.call_function(A.clone.default, (turned,))
    added = graph.call_function(A.add.Tensor, (copied, turned))
    parts = graph.call_function(A.split.Tensor, (added, 3))
    part = graph.call_function(operator.getitem, (parts, 1))
    graph.output((part, y, graph.call_function(A.sum.default, (part,))))
    gm = torch.fx.GraphModule({}, graph)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    with replaced(compile_fx, "_recursive_joint_graph_passes", lambda gm: gm), values_kept():
        compile_fx._recursive_joint_graph_passes(gm)
        change(gm.graph, x, y, turned, copied, added, part)
        gm.recompile()
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
        kept = describe(gm.graph)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return kept, describe(gm.graph)


def other_numbers(graph, x, y, turned, copied, added, part):
    added.args, turned.args = (copied, copied), (y, [1, 0])


def other_operator(graph, x, y, turned, copied, added, part):
    copied.target = A.alias.default


def other_node(graph, x, y, turned, copied, added, part):
    with graph.inserting_before(added):
        again = graph.node_copy(copied, lambda node: node)
    added.args = (again, turned)


def other_strides(graph, x, y, turned, copied, added, part):
    copied.kwargs = {"memory_format": torch.contiguous_format}


def other_part(graph, x, y, turned, copied, added, part):
    part.args = (part.args[0], 0)


@pytest.mark.parametrize("change", [other_numbers, other_operator, other_node, other_strides, other_part])
def test_changed_nodes_get_other_values(change):
    kept, run = changed(change)
    assert kept == run
