"""Weights are made ready by our kernel, several in a launch. What it computes is tested on a GPU."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from millstream.kernels import horizontal_fusion
from millstream.kernels.conv2d.channels import align_channels
from millstream.kernels.horizontal_fusion import MOST_CONVERTED_BYTES, MOST_TOGETHER
from millstream.kernels.nodes import arguments_of
from millstream.kernels.weights import weight_layouts, weights
from millstream.kernels.weights.weight_layouts import take_conversions
from millstream.kernels.weights.weights import CONVERT, Conversion
from tests.kernels.stand_ins import own_kernels, pretended_gpu, run_everywhere
from tests.kernels.test_channels import CONVOLUTION, DOUBLE, Net, anywhere, changed

__all__ = ["anywhere", "own_kernels", "pretended_gpu"]  # fixtures

PAD = torch.ops.aten.constant_pad_nd.default
TYPE = torch.ops.prims.convert_element_type.default


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Take every device for one where our kernels can be had."""
    monkeypatch.setattr(weight_layouts, "may_be_ours", lambda weight: True)
    monkeypatch.setattr(weight_layouts, "_DTYPES", (DOUBLE, torch.float))


def taken(function, *convolutions, layout=torch.contiguous_format, dtype=DOUBLE):
    """The graph of a network whose weights our kernel makes ready."""
    torch.manual_seed(0)
    model = Net(function, *convolutions).to(dtype).eval().to(memory_format=layout)
    return changed(model, torch.randn(2, 16, 6, 7, dtype=DOUBLE), align_channels, take_conversions)


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def conv(outputs=16, window=3, **options):
    return nn.Conv2d(16, outputs, window, **options)


def test_a_weight_whose_channels_lie_first():
    assert targets(taken(lambda x, a: a(x), conv())) == [CONVERT, CONVOLUTION]


@pytest.mark.parametrize(
    ("convolution", "layout"),
    [
        (conv(), torch.channels_last),
        (conv(window=1), torch.contiguous_format),
        (conv(groups=16), torch.contiguous_format),
        (conv(outputs=512), torch.contiguous_format),  # 576 KiB
    ],
)
def test_what_is_ready_or_large_stays(convolution, layout):
    assert CONVERT not in targets(taken(lambda x, a: a(x), convolution, layout=layout))


def test_without_our_kernels_all_stay(monkeypatch):
    monkeypatch.setattr(weight_layouts, "may_be_ours", lambda weight: False)
    assert CONVERT not in targets(taken(lambda x, a: a(x), conv()))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", [1, 3])
def test_channels_of_zeros_are_added_on_the_way(window, layout):
    gm = taken(lambda x, a, b: b(torch.relu(a(x))), conv(18, window), nn.Conv2d(18, 24, window), layout=layout)
    assert targets(gm).count(CONVERT) == 2
    sizes = [tuple(node.args[1]) for node in gm.graph.nodes if node.target is CONVERT]
    assert sizes == [(24, 16, window, window), (24, 24, window, window)]
    padded = [node.args[0].name for node in gm.graph.nodes if node.target is PAD]
    assert not any("state" in name for name in padded)


@pytest.mark.parametrize("window", [1, 3])
def test_another_type_is_too(window):
    gm = taken(lambda x, a: F.conv2d(x, a.weight.to(DOUBLE)), conv(window=window), dtype=torch.float)
    assert targets(gm) == [CONVERT, CONVOLUTION]


def test_what_is_rounded_twice_stays_so():
    gm = taken(lambda x, a: F.conv2d(x, a.weight.float().to(DOUBLE)), conv(), dtype=torch.double)
    assert targets(gm) == [TYPE, TYPE, CONVOLUTION]


def test_a_weight_that_is_computed_stays():
    assert CONVERT not in targets(taken(lambda x, a: F.conv2d(x, a.weight * 2), conv()))


def test_several_readers_share_it_and_others_read_it_as_it_was():
    gm = taken(lambda x, a, b: a(x) + a(x + 1) + F.conv2d(x, b.weight) + b.weight.sum(), conv(), conv())
    found = [node for node in gm.graph.nodes if node.target is CONVERT]
    readers = [node for node in gm.graph.nodes if node.target is CONVOLUTION]
    assert [len(node.users) for node in found] == [2, 1]
    assert {arguments_of(node)[1] for node in readers} == set(found)
    (total,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.sum.default)
    assert total.args[0].op == "placeholder"


# --- in one launch ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 2 * MOST_CONVERTED_BYTES), max_size=60), st.randoms())
def test_launches_grow_and_keep_their_order(sizes, rng):
    order = rng.sample(range(len(sizes)), len(sizes))
    groups = [*horizontal_fusion._divide_by_need((i, sizes[i]) for i in order)]
    assert [i for group in groups for i in group] == order
    before = 0
    for group in groups:
        assert len(group) <= min(max(before, 1), MOST_TOGETHER)
        assert len(group) == 1 or sum(sizes[i] for i in group) <= MOST_CONVERTED_BYTES
        before += len(group)


def test_many_small_ones_are_few_launches():
    groups = [*horizontal_fusion._divide_by_need((i, 1) for i in range(40))]
    assert [len(group) for group in groups] == [1, 1, 2, 4, 8, 8, 8, 8]


def test_those_that_are_needed_first_come_first(own_kernels):
    """In program order one branch stands after the other, whose first weights are needed as early."""
    torch.manual_seed(0)
    left, right = ([conv(padding=1) for _ in range(8)] for _ in range(2))

    def function(x, *convolutions):
        first = second = x
        for each in convolutions[:8]:
            first = torch.relu(each(first))
        for each in convolutions[8:]:
            second = torch.sigmoid(each(second))
        return first + second

    with torch.no_grad():
        program, _ = run_everywhere(Net(function, *left, *right).to(DOUBLE), torch.randn(1, 16, 8, 8, dtype=DOUBLE))
    kernels = program.graph.kernels
    depths, _ = horizontal_fusion._depths(program.graph)
    needed = {name: depths[kernel.id] for kernel in kernels if kernel.kind == "conv" for name in kernel.reads}
    launches = [kernel.writes for kernel in kernels if "convert_weight" in kernel.name]
    times = [sorted(needed[name] for name in names) for names in sorted(launches, key=len)]
    assert [len(each) for each in times] == [1, 1, 2, 4, 8]
    assert all(earlier[-1] <= later[0] for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({}, True),
        ({"weight": torch.empty(40, 8, 3, 3), "out": torch.empty(40, 8, 3, 3)}, True),
        ({"weight": torch.empty(16, 16, 1, 9), "out": torch.empty(16, 16, 1, 9)}, True),
        ({"weight": torch.empty(16, 16, 3, 3, dtype=DOUBLE)}, False),
        ({"out": torch.empty(16, 16, 3, 3, dtype=DOUBLE)}, False),
        ({"out": torch.empty(16, 24, 3, 3)}, False),
        ({"weight": torch.empty(16, 16, 3, 3).contiguous(memory_format=torch.channels_last)}, False),
        ({"weight": torch.empty(16, 16, 5, 5), "out": torch.empty(16, 16, 5, 5)}, False),
    ],
)
def test_what_one_launch_can_convert(changes, alike):
    usual = Conversion(torch.empty(16, 16, 3, 3), torch.empty(16, 16, 3, 3))
    assert (usual._replace(**changes).kind == usual.kind) is alike


@given(st.lists(st.integers(0, 1 << 29), min_size=1, max_size=8), st.integers(0, 1 << 29))
def test_for_no_number_anything_is_compiled(values, beyond):
    given = weights._numbers(values, beyond)
    assert len(given) in (1, 2, 4, 8)
    assert all(number != 1 and number % 16 and number < 1 << 31 for number in given)
    assert [(number - 3) // 2 for number in given] == values + [beyond] * (len(given) - len(values))


@pytest.mark.parametrize(
    ("widths", "chosen"), [([24, 72], 16), ([144], 16), ([32], 32), ([64, 128], 64), ([96, 64], 32), ([8, 40], 16)]
)
def test_tiles_end_where_channels_end_if_they_can(widths, chosen):
    assert weights._choose_width([torch.empty(8, width, 3, 3) for width in widths]) == chosen
