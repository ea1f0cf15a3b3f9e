"""What stands in front of a small depthwise convolution goes into its kernel: the same numbers in fewer kernels."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import millstream as ms
from millstream.api import executables
from millstream.graph import KernelKind
from millstream.kernels import launches
from millstream.kernels.conv2d import conv2d, conv2d_writer, epilogues
from millstream.kernels.conv2d.conv2d import CONVOLVE
from millstream.kernels.conv2d.epilogues import absorb_epilogues
from millstream.kernels.depthwise import depthwise, prologues
from millstream.kernels.depthwise.depthwise import CONVOLVE_DEPTHWISE, convolve_depthwise
from millstream.kernels.depthwise.prologues import absorb_prologues
from millstream.kernels.nodes import arguments_of
from millstream.lower.translation.translate import translate
from tests.kernels.test_channels import DOUBLE, Net, anywhere, changed, close

__all__ = ["anywhere"]  # a fixture

PAD = torch.ops.aten.constant_pad_nd.default
RELU = torch.ops.aten.relu.default


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Take every device for one where our kernels can be had, and doubles for half precision."""
    for module in (epilogues, prologues):
        monkeypatch.setattr(module, "may_be_ours", lambda image: True)
    for module in (conv2d, depthwise):
        monkeypatch.setattr(module, "_DTYPES", (DOUBLE,))
    monkeypatch.setattr(launches, "_asynchronous_mode", lambda: None)  # stand-ins are not Triton's


def absorbed(function, *convolutions, size=(2, 16, 6, 7)):
    """The graph of a network whose depthwise convolutions have done what they can."""
    torch.manual_seed(0)
    model = Net(function, *convolutions).to(DOUBLE).eval()
    return changed(model, torch.randn(size, dtype=DOUBLE), absorb_epilogues, absorb_prologues)


def tasks(gm):
    """Of each of our depthwise convolutions: relu, channels of the image and of the result, zeros around."""
    found = [arguments_of(node) for node in gm.graph.nodes if node.target is CONVOLVE_DEPTHWISE]
    return [(a[2], a[0].meta["val"].shape[1], a[3], a[5]) for a in found]


def others(gm):
    """Which operators are left."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    return [target for target in targets if target is not CONVOLVE_DEPTHWISE]


def each(channels=16, window=3, padding=None, **options):
    padding = window // 2 if padding is None else padding
    return nn.Conv2d(channels, channels, window, padding=padding, groups=channels, bias=False, **options)


def test_relu_that_several_read():
    gm = absorbed(lambda x, a, b: a(torch.relu(x)) * b(torch.relu(x)) + x[:, :1], each(), each(window=5))
    assert tasks(gm) == [(True, 16, 16, [1] * 4), (True, 16, 16, [2] * 4)]
    assert RELU not in others(gm)


def test_a_border_of_zeros_on_one_side_only():
    gm = absorbed(lambda x, a: a(F.pad(torch.relu(F.pad(x, (0, 1))), (1, 2, 3, 0))), each(padding=(1, 0), stride=2))
    assert tasks(gm) == [(True, 16, 16, [1, 3, 4, 1])]
    assert not others(gm)


def test_the_first_channels_of_an_image_and_channels_of_zeros_behind_the_result():
    gm = absorbed(lambda x, a: F.pad(a(torch.relu(x[:, :10])), [0] * 5 + [6]) * x, each(10))
    assert tasks(gm) == [(True, 16, 16, [1] * 4)]
    assert others(gm) == [torch.ops.aten.mul.Tensor]


def test_relu_that_another_kernel_does_anyway_stays_there():
    gm = absorbed(lambda x, first, a: a(torch.relu(first(x))), nn.Conv2d(16, 16, 1), each())
    assert not tasks(gm)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a: a(x),
        lambda x, a: (a(y := torch.relu(x)), torch.tanh(y)),
        lambda x, a: (a(y := F.pad(torch.relu(x), (1, 1))), F.avg_pool2d(y, 2)),
        lambda x, a: a(F.pad(x, (1, 1), value=1.0)),
        lambda x, a: a(F.pad(x, (-1, 1))),
        lambda x, a: a(F.pad(x, (1, 1, 1, 1), mode="reflect")),
        lambda x, a: a(torch.relu(x)[:, 0:1].expand(-1, 16, -1, -1)),
        lambda x, a: a(F.relu6(x)),
        lambda x, a: F.pad(a(x), [0, 1]),
        lambda x, a: F.pad(a(x), [0, 0, 0, 0, 1, 0]),
        lambda x, a: F.pad(a(x), [0] * 5 + [-1]),
        lambda x, a: (F.pad(y := a(x), [0] * 5 + [2]), y * 2),
        lambda x, a: F.conv2d(x, torch.relu(a.weight), groups=16),
        lambda x, a: F.conv2d(torch.relu(x), a.weight, torch.ones(16, dtype=DOUBLE), groups=16),
    ],
)
def test_what_is_something_else_stays(function):
    gm = absorbed(function, each())
    assert all(task == (False, 16, 16, [1] * 4) for task in tasks(gm))


@given(st.data())
def test_any_order_of_what_stands_in_front(data):
    steps = data.draw(
        st.lists(st.one_of(st.just("relu"), st.just("first"), st.tuples(*[st.integers(0, 2)] * 4)), max_size=5)
    )
    readers, more = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    is_read_between = data.draw(st.integers(-1, 4))

    def first(x):
        return x if x.shape[1] == 10 else x[:, :10]

    def function(x, *convolutions):
        extra = []
        for i, step in enumerate(steps):
            if i == is_read_between:
                extra.append(x * 2)
            x = torch.relu(x) if step == "relu" else first(x) if step == "first" else F.pad(x, step)
        return [F.pad(a(first(x)), [0] * 5 + [more]) * 2 for a in convolutions], extra

    gm = absorbed(function, *(each(10, window=1 + 2 * i, stride=1 + i % 2) for i in range(readers)), size=(1, 12, 3, 4))
    if set(steps) & {"relu"} and is_read_between < 0:
        assert RELU not in others(gm)


def test_the_operator_says_what_it_returns():
    options = [True, 12, [2, 1], [0, 1, 2, 0], [1, 2]]
    for layout in (torch.channels_last, torch.contiguous_format):
        image = torch.randn(2, 10, 7, 6, dtype=DOUBLE).contiguous(memory_format=layout)
        inputs = [image, torch.randn(9, 1, 3, 2, dtype=DOUBLE), *options]
        torch.library.opcheck(CONVOLVE_DEPTHWISE, inputs, test_utils=("test_schema", "test_faketensor"))
        assert not CONVOLVE_DEPTHWISE(*inputs)[:, 9:].any()


@pytest.mark.parametrize("last", [True, False])
def test_in_a_program_it_writes_into_memory_of_the_plan(last):
    graph = torch.fx.Graph()
    image, weight = graph.placeholder("image"), graph.placeholder("weight")
    options = ([1, 1], [1] * 4, [1, 1])
    node = graph.call_function(CONVOLVE_DEPTHWISE, (image, weight, True, 24, *options))
    graph.output([node])
    layout = torch.channels_last if last else torch.contiguous_format
    with FakeTensorMode():
        image.meta["val"] = torch.empty(2, 18, 5, 5, dtype=torch.half).contiguous(memory_format=layout)
        weight.meta["val"] = torch.empty(16, 1, 3, 3, dtype=torch.half)
        node.meta["val"] = torch.empty(2, 24, 5, 5, dtype=torch.half).contiguous(memory_format=torch.channels_last)
    program = translate(torch.fx.GraphModule(torch.nn.Module(), graph), name="test")
    (kernel,), (call,) = program.graph.kernels, program.calls
    assert (call.target is convolve_depthwise) is last
    assert kernel.kind is (KernelKind.CONV if last else KernelKind.LIBRARY)
    assert kernel.flops == 2 * (2 * 24 * 5 * 5) * (3 * 3)
    if last:
        assert kernel.name == "convolve_depthwise of relu"
        assert kernel.ops == ("relu", "convolution")
        assert call.args[2:] == (True, *options)


def test_a_cell_through_inductor(monkeypatch):
    """On a CPU without oneDNN, Inductor treats convolutions as on a GPU."""

    def convolve(image, weight, relu, *options, out):
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (image, out))
        out.copy_(CONVOLVE_DEPTHWISE(image, weight, relu, out.shape[1], *options))

    def function(x, first, *convolutions):
        y = torch.relu(first(x))
        z = y - 1
        branches = [convolution(torch.relu(z)) for convolution in convolutions]
        return sum(branches) + F.avg_pool2d(y, 3, 1, 1)

    monkeypatch.setattr(depthwise, "convolve_depthwise", convolve)
    monkeypatch.setattr(conv2d_writer, "convolve_2d", lambda *arguments, out: out.copy_(CONVOLVE(*arguments)))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(function, nn.Conv2d(16, 16, 1), each(), each(window=5)).to(DOUBLE).eval()
    x = torch.randn(2, 16, 6, 6, dtype=DOUBLE)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        compiled = ms.compile(model, strict=True)
        close(compiled(x), model(x))
    (executable,) = executables(compiled)
    program = executable.lowered.program
    calls = [call for call in program.calls if call.target is convolve]
    assert [call.args[2] for call in calls] == [True, True]
    assert calls[0].args[0].name == calls[1].args[0].name
