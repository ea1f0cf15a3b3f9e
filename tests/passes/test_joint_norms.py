"""The norm of many norms as the root of one sum of squares: the same value, and only where kernels are spared."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from millstream._torch.workarounds import without
from millstream.passes import join_norms, joint_norms

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Let the pass take the CPU for a CUDA device."""
    monkeypatch.setattr(joint_norms, "_on_device", lambda value: True)


def clipping(*gradients):
    return torch.nn.utils.get_total_norm(gradients, foreach=False)


def clipping_lists(*gradients):
    return torch.nn.utils.get_total_norm(gradients, foreach=True)


def gradients(*, dtype=torch.float32):
    """Small and large ones, laid out in other orders, one whose rows have no length, one without elements."""
    shapes = (3,), (), (40, 512), (16391,), (0, 2), (2, 8, 1024)
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return [*made, torch.randn(512, 64, dtype=dtype).t(), torch.randn(4, 6, dtype=dtype)[:, ::2]]


def num_norms(gm):
    nodes = [*gm.graph.nodes]
    lists = [each for each in nodes if each.target is aten._foreach_norm.Scalar]
    return sum(each.target is aten.linalg_vector_norm.default for each in nodes) + sum(
        len(each.users) for each in lists
    )


@pytest.mark.parametrize("function", [clipping, clipping_lists])
def test_the_value_is_that_of_the_norms(function):
    given = gradients()
    gm = make_fx(function)(*given)
    joint = join_norms(gm)
    assert (num_norms(gm), num_norms(joint)) == (9, 2)  # of what has no rows, and no elements
    torch.testing.assert_close(joint(*given), gm(*given), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(gm(*given), clipping(*given))
    given[0][1] = float("nan")
    assert joint(*given).isnan()


def test_memory_is_read_in_its_order():
    joint = join_norms(make_fx(clipping)(*gradients()))
    for node in joint.graph.find_nodes(op="call_function", target=aten.reshape.default):
        assert node.args[0].meta["val"].numel() == node.meta["val"].numel()
    turned = joint.graph.find_nodes(op="call_function", target=aten.permute.default)
    assert all([*each.meta["val"].stride()] == sorted(each.meta["val"].stride(), reverse=True) for each in turned)


def test_a_norm_that_somebody_reads_is_kept():
    def step(*gradients):
        each = torch._foreach_norm(gradients)
        return torch.linalg.vector_norm(torch.stack(each)), each[2] + 1

    given = gradients()
    joint = join_norms(make_fx(step)(*given))
    assert num_norms(joint) == 3
    torch.testing.assert_close(joint(*given), step(*given), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda *given: torch.linalg.vector_norm(torch.stack([each.norm() for each in given[:3]])),
        lambda *given: torch.nn.utils.get_total_norm(given, 3.0),
        lambda *given: torch.stack([each.norm() for each in given]),
    ],
    ids=["few", "another order", "no norm of them"],
)
def test_others_stay(function):
    gm = make_fx(function)(*gradients())
    assert join_norms(gm) is gm


def test_other_precisions_stay():
    gm = make_fx(clipping)(*gradients(dtype=torch.float64))
    assert join_norms(gm) is gm


def test_it_can_be_switched_off():
    gm = make_fx(clipping)(*gradients())
    with without(("joint-norms",)):
        assert join_norms(gm) is gm
