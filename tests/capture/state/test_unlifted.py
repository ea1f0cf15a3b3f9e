"""Tensors that a graph cannot take as inputs: met by their names alone they are of no matter, used they are refused."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction  # by this name a trace does not see it

from millstream._torch.tensors import FakeTensorMode
from millstream.capture import Step
from millstream.errors import CaptureError
from tests.capture.worlds import interpret


class Boxes(Tensor):
    pass


def make_kinds():
    x, z = torch.ones(2, 2), torch.ones(2, dtype=torch.complex64)
    with warnings.catch_warnings(action="ignore"):  # that some are young
        return {
            "has the layout torch.sparse_coo": x.to_sparse(),
            "has the layout torch.sparse_csr": x.to_sparse_csr(),
            "has the layout torch._mkldnn": x.to_mkldnn(),
            "has the layout nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "has the layout quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
            "a tensor subclass": x.as_subclass(Boxes),
            "is a FakeTensor": FakeTensorMode().from_tensor(x),
            "a conjugated or negated view": z.conj(),
        }


def test_those_that_are_only_found_stand_in_no_ways_way(monkeypatch):
    """The search for what code finds in ``sys.modules`` comes to all modules with names that the code has, too."""
    planted = types.ModuleType("planted")
    planted.__file__, planted.scale, planted.kinds = __file__, 1.0, list(make_kinds().values())
    planted.net = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(1))
    planted.net.register_buffer("table", planted.kinds[0])
    monkeypatch.setitem(sys.modules, "planted", planted)
    world = types.SimpleNamespace(net=2.0, kinds=3.0)
    step = Step(lambda x: x * sys.modules["planted"].scale * world.net * world.kinds, build=interpret, strict=True)
    for planted.scale in (1.0, 2.0):
        results = [step(torch.ones(1)).item() for _ in range(2)]
        assert results[-1] == 6 * planted.scale
    assert planted.net.table is planted.kinds[0]
    assert [type(each) for each in planted.kinds] == [type(each) for each in make_kinds().values()]


@pytest.mark.parametrize("use", [lambda t: t.shape, lambda t: t * 2, lambda t: torch.ones(2).add_(t)])
def test_those_that_are_used_are_refused_by_name_and_line(use):
    for reason, table in make_kinds().items():
        step = Step(lambda x, table=table: (use(table), x)[1], build=interpret, strict=True)
        with pytest.raises(CaptureError, match=f"default.0. .*{reason}") as caught:
            step(torch.ones(2, 2))
        assert "test_unlifted.py:" in str(caught.value)


def test_one_that_no_search_finds_is_refused_where_it_is_used():
    table, name = torch.ones(2, 2).to_sparse(), "ta" + "ble"
    held = {"table": table}
    step = Step(lambda x: x + vars(types.SimpleNamespace(**held))[name].to_dense(), build=interpret, strict=True)
    with pytest.raises(CaptureError, match="has the layout"):
        step(torch.ones(2, 2))


def test_a_module_is_called_whose_buffer_is_not_used():
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.ones(2, 2).to_sparse())
    model.register_parameter("boxes", nn.Parameter(torch.ones(2).as_subclass(Boxes)))
    step = Step(lambda x: model(x), build=interpret, strict=True)
    x = torch.ones(1, 2)
    for _ in range(2):
        assert torch.equal(step(x), model(x))


def test_a_lazy_module_that_is_used_later_gets_its_shape_then():
    torch.manual_seed(0)
    model, late = nn.Linear(2, 2), nn.LazyLinear(3)
    world = types.SimpleNamespace(is_late=False)
    step = Step(lambda x: late(model(x)) if world.is_late else model(x), build=interpret, strict=True)
    x = torch.ones(1, 2)
    for world.is_late in (False, False, True, True, True):
        result = step(x)
        torch.testing.assert_close(result, late(model(x)) if world.is_late else model(x))
    assert len(step.graphs) == 2


def test_a_gradient_past_function_modes_is_refused_and_taken_of_a_view():
    weight = nn.Parameter(torch.ones(3))

    def step(x, *, of_view):
        factor = weight.view_as(weight) if of_view else weight
        with DisableTorchFunction():
            loss = (x * factor).sum()
        loss.backward()
        gradient, weight.grad = weight.grad, None
        return gradient

    ours = Step(step, build=interpret, strict=True)
    with pytest.raises(CaptureError, match="no mode sees"):
        ours(torch.arange(3.0), of_view=False)
    assert ours(torch.arange(3.0), of_view=True).tolist() == [0, 1, 2]
    assert weight.grad is None
