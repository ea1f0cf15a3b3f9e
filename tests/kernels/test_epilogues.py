"""What follows a small convolution goes into its kernel: the same numbers, and nothing waits for longer than before."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import millstream as ms
from millstream.api import executables
from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.graph import KernelKind, derive_dependencies
from millstream.kernels import launches, nodes
from millstream.kernels.conv2d import conv2d, conv2d_writer, epilogues
from millstream.kernels.conv2d.channels import align_channels
from millstream.kernels.conv2d.conv2d import CONVOLVE, convolve_2d
from millstream.kernels.conv2d.epilogues import absorb_epilogues
from millstream.kernels.nodes import arguments_of
from millstream.lower.translation.translate import translate
from millstream.schedule import POLICIES, plan_graph
from millstream.testing import execute_graph, execute_plan
from tests.kernels.test_channels import DOUBLE, Branches, Net, anywhere, changed, close, trace

__all__ = ["anywhere"]  # a fixture


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Take every device for one where our kernels can be had, and doubles for half precision."""
    monkeypatch.setattr(epilogues, "may_be_ours", lambda image: True)
    monkeypatch.setattr(conv2d, "_DTYPES", (DOUBLE,))
    monkeypatch.setattr(launches, "_asynchronous_mode", lambda: None)  # stand-ins are not Triton's


def absorbed(model, x):
    """The graph of a model whose convolutions have done what they can."""
    return changed(model.to(DOUBLE).eval(), x, align_channels, absorb_epilogues)


def tasks(gm):
    """What each of our convolutions does, in words."""
    found = [arguments_of(node) for node in gm.graph.nodes if node.target is CONVOLVE]
    return [
        " ".join(name for name, part in zip(("bias", "sum", "relu"), arguments[2:5], strict=True) if part)
        for arguments in found
    ]


def others(gm):
    """Which operators are left."""
    return [node.target for node in gm.graph.nodes if node.op == "call_function" and node.target is not CONVOLVE]


def net(function, *convolutions, size=(2, 16, 6, 6)):
    torch.manual_seed(0)
    return absorbed(Net(function, *convolutions), torch.randn(size, dtype=DOUBLE))


def conv(inputs=16, outputs=16, window=3, **options):
    return nn.Conv2d(inputs, outputs, window, padding=window // 2, **options)


def test_bias_and_relu():
    gm = net(lambda x, first: torch.relu(first(x)), conv())
    assert tasks(gm) == ["bias relu"]
    assert not others(gm)


def test_a_convolution_of_what_comes_from_outside_whose_channels_were_enlarged():
    gm = net(lambda x, first: torch.cat([torch.relu(first(x)), x], 1), conv(outputs=18))
    assert tasks(gm) == ["bias relu"]


@pytest.mark.parametrize("outputs", [16, 18])
def test_a_bias_of_another_type_is_rounded_on_the_way(outputs):
    """As under autocast; of 18 channels, the bias is added apart from the convolution that is enlarged."""
    torch.manual_seed(0)
    bias = torch.randn(outputs, dtype=torch.float)
    weight, x = torch.randn(outputs, 16, 3, 3, dtype=DOUBLE), torch.randn(2, 16, 6, 6, dtype=DOUBLE)

    def function(x, weight, bias):
        return torch.relu(F.conv2d(x, weight, bias.to(DOUBLE), padding=1))

    gm = trace(function, x, weight, bias)
    align_channels(gm)
    absorb_epilogues(gm)
    close(gm(x, weight, bias), function(x, weight, bias))
    assert tasks(gm) == ["bias relu"]
    (node,) = (node for node in gm.graph.nodes if node.target is CONVOLVE)
    assert arguments_of(node)[2].meta["val"].dtype is torch.float


def test_a_bias_that_must_be_computed_stays_apart():
    gm = net(lambda x, first: torch.relu(F.conv2d(x, first.weight, first.bias * 2, padding=1)), conv())
    assert not tasks(gm)


def test_a_block_with_a_short_cut():
    gm = net(lambda x, first, second: torch.relu(second(torch.relu(first(x))) + x), conv(), conv())
    assert tasks(gm) == ["bias relu", "bias sum relu"]
    assert not others(gm)


def test_a_sum_of_two_branches_goes_into_the_one_that_waits_for_nothing_by_that():
    def function(x, first, second, third):
        return third(torch.relu(second(x))) + first(x)

    gm = net(function, conv(), conv(), conv())
    assert sorted(tasks(gm)) == ["bias", "bias relu", "bias sum"]
    last = next(iter(reversed([node for node in gm.graph.nodes if node.target is CONVOLVE])))
    assert arguments_of(last)[3] is not None, "the deeper branch adds"


def test_a_sum_with_something_later_stays():
    def function(x, first, second):
        return first(x) + torch.tanh(torch.tanh(torch.tanh(second(x))))

    gm = net(function, conv(), conv())
    assert tasks(gm) == ["bias", "bias"]
    assert torch.ops.aten.add.Tensor in others(gm)


def twice(y):
    return y + y


def forked(y):
    return torch.relu(y) + torch.tanh(y)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, first: first(x) + first(x)[:1],
        lambda x, first: twice(first(x)),
        lambda x, first: forked(first(x)),
        lambda x, first: torch.relu(torch.relu(first(x)) + x),
        lambda x, first: torch.add(first(x), x, alpha=2),
        lambda x, first: first(x) + 1.0,
        lambda x, first: first(x) + x.mean((2, 3), keepdim=True),
        lambda x, first: first(x)[:, 3:].relu(),
        lambda x, first: first(x)[:, ::2].relu(),
        lambda x, first: first(x)[:, :9].relu(),
        lambda x, first: first(x)[:, :10].relu() + 1,
        lambda x, first: torch.nn.functional.pad(torch.relu(first(x)), [0, 0, 0, 0, 0, 3]),
    ],
)
def test_what_else_follows_is_computed_behind_it(function):
    net(function, conv())


def test_channels_that_nobody_wants_are_cleared_and_nothing_is_added_to_them():
    def function(x, first):
        y = torch.nn.functional.pad(torch.relu(first(x)[:, :10]), [0, 0, 0, 0, 0, 6])
        return y + x

    gm = net(function, conv())
    (arguments,) = [arguments_of(node) for node in gm.graph.nodes if node.target is CONVOLVE]
    assert arguments[3:6] == [None, True, 10], "the sum would reach beyond"


def test_a_network_of_odd_widths_and_two_resolutions():
    torch.manual_seed(0)
    gm = absorbed(Branches(), torch.randn(2, 3, 16, 16, dtype=DOUBLE))
    assert "bias sum relu" in tasks(gm)
    left = [node for node in gm.graph.nodes if node.target is torch.ops.aten.constant_pad_nd.default]
    assert len(left) == 6 + 2, "weights, and the images that none of our convolutions makes"


def test_the_operator_says_what_it_returns():
    options = [torch.randn(9, dtype=DOUBLE), torch.randn(2, 16, 3, 6, dtype=DOUBLE), True, 9, [2, 1], [1, 0]]
    inputs = [torch.randn(2, 8, 5, 6, dtype=DOUBLE), torch.randn(16, 8, 3, 1, dtype=DOUBLE), *options]
    torch.library.opcheck(CONVOLVE, inputs, test_utils=("test_schema", "test_faketensor"))
    assert not CONVOLVE(*inputs)[:, 9:].any()


@pytest.mark.parametrize("last", [True, False])
def test_in_a_program_it_writes_into_memory_of_the_plan(last):
    """If channels come last; otherwise the operator is called, which is right but slow."""
    graph = torch.fx.Graph()
    image, weight, bias, addend = (graph.placeholder(name) for name in ("image", "weight", "bias", "addend"))
    node = graph.call_function(CONVOLVE, (image, weight, bias, addend, True, 10, [1, 1], [1, 1]))
    graph.output([node])
    layout = torch.channels_last if last else torch.contiguous_format
    with FakeTensorMode():
        image.meta["val"] = torch.empty(2, 8, 5, 5, dtype=torch.half).contiguous(memory_format=layout)
        weight.meta["val"] = torch.empty(16, 8, 3, 3, dtype=torch.half).contiguous(memory_format=layout)
        bias.meta["val"] = torch.empty(10, dtype=torch.half)
        addend.meta["val"] = torch.empty(2, 24, 5, 5, dtype=torch.half).contiguous(memory_format=layout)
        node.meta["val"] = torch.empty(2, 16, 5, 5, dtype=torch.half).contiguous(memory_format=torch.channels_last)
    program = translate(torch.fx.GraphModule(torch.nn.Module(), graph), name="test")
    (kernel,), (call,) = program.graph.kernels, program.calls
    assert (call.target is convolve_2d) is last
    assert kernel.kind is (KernelKind.CONV if last else KernelKind.LIBRARY)
    assert kernel.flops == 2 * (2 * 16 * 5 * 5) * (8 * 3 * 3)
    assert kernel.reads == ("image", "weight", "bias", "addend")
    assert bool(kernel.allocates) is not last
    if last:
        assert kernel.name == "convolve_2d with bias and sum and relu"
        assert kernel.ops == ("convolution", "add", "relu")
        assert kernel.writes == (call.kwargs["out"].name,)
        assert kernel.writes[0] in program.layouts


def test_where_there_is_no_triton_nothing_is_absorbed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(nodes, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(nodes, "_has_triton", lambda: False)
    monkeypatch.setattr(conv2d, "_DTYPES", (DOUBLE,))
    assert not tasks(net(lambda x, first: torch.relu(first(x)), conv()))


def compile_function(monkeypatch, function, *convolutions, layout=torch.contiguous_format):
    """On a CPU without oneDNN, Inductor treats convolutions as on a GPU."""

    def convolve(*arguments, out):
        images = [arguments[0], arguments[1]] + [each for each in arguments[3:4] if each is not None]
        assert all(image.is_contiguous(memory_format=torch.channels_last) for image in images)
        assert out.stride(1) == 1
        out.copy_(CONVOLVE(*arguments))

    monkeypatch.setattr(conv2d_writer, "convolve_2d", convolve)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(function, *convolutions).to(DOUBLE).eval()
    x = torch.randn(2, 16, 6, 6, dtype=DOUBLE).contiguous(memory_format=layout)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        compiled = ms.compile(model, strict=True)
        close(compiled(x), model(x))
    (executable,) = executables(compiled)
    program = executable.lowered.program
    return program, [call for call in program.calls if call.target is convolve]


def test_an_image_with_several_readers_is_computed_once(monkeypatch):
    def function(x, first, second):
        y = torch.relu(x)  # so little that Inductor would compute it for each
        return first(y) + 1, second(y) + 1

    _, calls = compile_function(monkeypatch, function, conv(window=1), conv(window=1))
    assert len(calls) == 2
    assert len({call.args[0].name for call in calls}) == 1


def test_parts_of_other_tensors_are_copied_first(monkeypatch):
    """Our kernel knows no gaps between pixels, neither in images nor in what is added."""

    def function(x, first, second, third):
        left, right = first(x).chunk(2, 1)
        deep = torch.tanh(torch.tanh(torch.tanh(torch.tanh(x))))
        return torch.relu(second(left)) + 1, torch.relu(third(deep) + right)

    _, calls = compile_function(monkeypatch, function, conv(outputs=32), conv(bias=False), conv(window=1, bias=False))
    assert len(calls) == 3


def joined(x, *convolutions):
    """A block of branches one of which is longer, and what reads all of them."""
    *branches, longer, last = convolutions
    ends = [torch.relu(branch(x)) for branch in branches]
    return last(torch.cat([*ends[:1], torch.relu(longer(ends[-1])), *ends[1:-1]], 1)) + 1


BRANCHES = conv(outputs=8), conv(outputs=24, window=1), conv(), conv(outputs=8), conv(40, 16)


def test_convolutions_write_where_their_results_are_concatenated(monkeypatch):
    program, calls = compile_function(monkeypatch, joined, *BRANCHES)
    kernels = [kernel for kernel in program.graph.kernels if kernel.kind is KernelKind.CONV]
    (whole,) = {name for kernel in kernels for name in kernel.parts}
    assert program.layouts[whole].size == (2, 40, 6, 6)
    writers = [kernel for kernel in kernels if whole in kernel.parts]
    assert len(calls) == 5
    assert len(writers) == 3
    (first,) = [kernel for kernel in program.graph.kernels if whole in kernel.writes and whole not in kernel.parts]
    assert not any("cat" in kernel.ops or "join_channels" in kernel.name for kernel in program.graph.kernels)
    waiting = [{found.kernel for found in each} for each in derive_dependencies(program.graph)]
    ids = {kernel.id for kernel in writers}
    assert all(first.id in waiting[writer] and not waiting[writer] & ids for writer in ids)
    (reader,) = [kernel for kernel in program.graph.kernels if whole in kernel.reads]
    assert ids <= waiting[reader.id]


def test_what_is_concatenated_twice_is_so_at_once(monkeypatch):
    def function(x, first, second, third, last):
        inner = torch.cat([torch.relu(second(x)), torch.relu(third(x))], 1)
        return last(torch.cat([torch.relu(first(x)), inner], 1)) + 1

    program, calls = compile_function(monkeypatch, function, conv(), conv(), conv(outputs=24), conv(56))
    (whole,) = {name for kernel in program.graph.kernels for name in kernel.parts}
    assert program.layouts[whole].size == (2, 56, 6, 6)
    assert len(calls) == 4
    assert not any("cat" in kernel.ops or "join_channels" in kernel.name for kernel in program.graph.kernels)


def test_the_first_of_them_gets_the_memory_if_they_have_nothing_in_common(monkeypatch):
    def function(x, first, second, last):
        return last(torch.cat([torch.relu(first(x[:, :8])), torch.relu(second(x[:, 8:]))], 1)) + 1

    program, _ = compile_function(monkeypatch, function, conv(8, 8), conv(8, 8), conv(), layout=torch.channels_last)
    (whole,) = {name for kernel in program.graph.kernels for name in kernel.parts}
    writers = [kernel.parts for kernel in program.graph.kernels if whole in kernel.writes]
    assert writers == [(), (whole,)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("packed", [False, True])
def test_plans_of_such_convolutions_are_sound(monkeypatch, policy, packed):
    program, _ = compile_function(monkeypatch, joined, *BRANCHES)
    costs = Roofline().estimate(program.graph)
    plan = plan_graph(program.graph, costs, 4, policy, packed=packed)
    check_plan(plan)
    expected = execute_graph(program.graph)
    assert all(execute_plan(plan, random.Random(seed)) == expected for seed in range(30))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, first, second: torch.cat([torch.relu(first(x)), torch.relu(second(x))], 1),
        lambda x, first, second: torch.cat([torch.relu(first(x)), torch.relu(second(x))], 1)[:, 3:],
        lambda x, first, second: torch.cat([torch.relu(first(x)), torch.relu(second(x))], 2) + 1,
        lambda x, first, second: torch.cat([torch.relu(first(x)), torch.tanh(second(x))], 1) + 1,
        lambda x, first, second: torch.cat([torch.relu(first(x))] * 2, 1) + 1 + second(x)[:, :1],
        lambda x, first, second: torch.cat([torch.cat([torch.relu(first(x)), x], 1)] * 2, 1) + 1 + second(x)[:, :1],
    ],
)
def test_where_they_cannot_write_there_nothing_changes(monkeypatch, function):
    program, _ = compile_function(monkeypatch, function, conv(), conv(), layout=torch.channels_last)
    assert not any(kernel.parts for kernel in program.graph.kernels)


def test_a_network_through_inductor(monkeypatch):
    _, calls = compile_function(monkeypatch, lambda x, net: net(x[:, :3]), Branches())
    tasks = sorted(" ".join(str(bool(part)) for part in call.args[2:5]) for call in calls)
    assert tasks == [
        "False True True", "True False False", "True False False", "True False True", "True False True",
        "True True True",
    ]  # fmt: skip
