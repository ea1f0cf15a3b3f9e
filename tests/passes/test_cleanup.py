"""Passes over traced graphs."""

from __future__ import annotations

import torch

from millstream._torch.tensors import FakeTensorMode, storage_id
from millstream._torch.tracing import trace_aten
from millstream.passes.cleanup import (
    drop_idle_nodes,
    drop_unused_inputs,
    hoist_transfers,
    move_constants,
    written_storages,
)
from millstream.passes.pure_bodies import make_bodies_pure

aten = torch.ops.aten


def trace(function, *inputs):
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value) for value in inputs]
    with mode:
        return trace_aten(lambda: function(*fakes), fakes)


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_idle_nodes_go_and_writes_stay():
    def function(x, y):
        with torch.profiler.record_function("mark"):
            z = x.detach() * 2
        x.detach().add_(1)
        y.sin()
        return [z.detach()]

    gm = trace(function, torch.ones(2), torch.ones(2))
    drop_idle_nodes(gm)
    assert targets(gm) == [aten.mul.Tensor, aten.add_.Tensor]
    assert drop_unused_inputs(gm) == [0]
    gm.recompile()
    x = torch.ones(2)
    assert gm(x)[0].tolist() == [2, 2]
    assert x.tolist() == [2, 2]


def test_written_storages_see_through_views_and_lists():
    def function(x, y, z):
        x[0].add_(1)
        torch._foreach_mul_([y.view(-1)], 2)
        return [z * 1]

    gm = trace(function, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2))
    drop_idle_nodes(gm)
    written = written_storages(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    assert [storage_id(node.meta["val"]) in written for node in placeholders] == [True, True, False]


def test_transfers_of_arguments_leave_the_graph():
    def function(x, y):
        return [x.to("meta") + 1, y.to("meta", torch.float64) * 2]

    gm = trace(function, torch.ones(2), torch.ones(2))
    drop_idle_nodes(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    hoisted = hoist_transfers(gm, placeholders)
    assert hoisted == dict.fromkeys(placeholders, torch.device("meta"))
    assert targets(gm) == [aten.add.Tensor, aten._to_copy.default, aten.mul.Tensor]
    conversions = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert all("device" not in node.kwargs for node in conversions)
    gm.recompile()
    results = gm(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
    assert [tuple(value.shape) for value in results] == [(2,), (2,)]


def test_a_transfer_stays_if_the_host_needs_the_argument_or_the_copy_is_written():
    def function(x, y):
        y = y.to("meta")
        y.add_(1)
        return [x.to("meta") + 1, x * 2, y]

    gm = trace(function, torch.ones(2), torch.ones(2))
    drop_idle_nodes(gm)
    assert hoist_transfers(gm, gm.graph.find_nodes(op="placeholder")) == {}


def test_constants_of_functions_move_before_they_are_handed_in():
    def yes(x):
        y = x * torch.tensor([1.0, 2.0]).detach().to("meta", torch.float64)
        y[0] = torch.tensor(3.0, dtype=torch.float64)
        return y

    gm = trace(lambda x: [torch.cond(x.sum() > 0, yes, lambda x: x + 1, (x,))], torch.ones(2, device="meta").double())
    make_bodies_pure(gm)
    held = [getattr(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")]
    constants = [each for each in held if isinstance(each, torch.Tensor)]
    assert [(each.device.type, each.dtype) for each in constants] == [("meta", torch.float64)] * 2
    assert {each.meta["val"].device.type for each in gm.true_graph_0.graph.find_nodes(op="placeholder")} == {"meta"}
    assert aten._to_copy.default not in targets(gm.true_graph_0)
    assert not [*gm.true_graph_0.buffers()]  # which would be inputs of the whole graph, on the host


def test_constants_move_to_the_device_that_reads_them():
    def function(x):
        return [x * torch.tensor([1.0, 2.0]).to("meta", torch.float64)]

    gm = trace(function, torch.ones(2, device="meta"))
    drop_idle_nodes(gm)
    move_constants(gm)
    assert aten._to_copy.default not in targets(gm)
    (constant,) = [getattr(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")]
    assert constant.device.type == "meta"
    assert constant.dtype == torch.float64
    gm.recompile()
    assert gm(torch.ones(2, device="meta"))[0].dtype == torch.float64
