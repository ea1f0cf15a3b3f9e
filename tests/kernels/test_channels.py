"""Channels in multiples of eight: the same numbers, whatever else reads what was enlarged."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import millstream as ms
from millstream.api import executables
from millstream.graph import KernelKind
from millstream.kernels import nodes
from millstream.kernels.channels_last import puts_channels_last
from millstream.kernels.conv2d import channels, conv2d
from millstream.kernels.conv2d.channels import align_channels
from millstream.kernels.nodes import arguments_of

CONVOLUTION = torch.ops.aten.convolution.default
DOUBLE = torch.float64  # in which nothing but a mistake makes a difference


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """Take the CPU for a CUDA device, and doubles for half precision."""
    monkeypatch.setattr(nodes, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(nodes, "_has_triton", lambda: False)
    monkeypatch.setattr(channels, "_DTYPES", (DOUBLE,))


class Branches(nn.Module):
    """Two resolutions of 18 and 36 channels that are added to each other, as in HRNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(18, 64, 1)
        self.block = nn.Sequential(nn.Conv2d(18, 18, 3, padding=1), nn.ReLU(), nn.Conv2d(18, 18, 3, padding=1))
        self.down, self.up = nn.Conv2d(18, 36, 3, stride=2, padding=1), nn.Conv2d(36, 18, 1)
        self.low = nn.Conv2d(36, 36, 3, padding=1, bias=False)
        self.each = nn.Conv2d(36, 36, 3, padding=1, groups=36)

    def forward(self, x):
        high = torch.relu(self.stem(x))
        high = torch.relu(high + self.block(high))
        low = torch.relu(self.down(high))
        high = torch.relu(high + F.interpolate(self.up(low), scale_factor=2, mode="nearest"))
        low = torch.relu(self.low(low) + low)
        return self.head(high).mean((2, 3)), low, torch.cat([self.each(low), low], 1)


class Net(nn.Module):
    """What a function makes of an image by some convolutions."""

    def __init__(self, function, *convolutions):
        super().__init__()
        self.function, self.convolutions = function, nn.ModuleList(convolutions)

    def forward(self, x):
        return self.function(x, *self.convolutions)


def trace(function, *inputs):
    """The graph of a function, with its operators as Inductor gets them."""
    gm = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def changed(model, x, *passes):
    """The graph of a model after some passes; it computes what the model does."""
    state = dict(model.named_parameters())
    with torch.no_grad():
        gm = trace(lambda x, state: torch.func.functional_call(model, state, (x,)), x, state)
        for change in passes:
            change(gm)
        close(gm(x, state), model(x))
    return gm


def aligned(model, x):
    """Graphs of a model as it is and with its channels aligned, and its result with each."""
    model = model.to(DOUBLE).eval()
    state = dict(model.named_parameters())

    def function(x, state):
        return torch.func.functional_call(model, state, (x,))

    with torch.no_grad():
        before, after = trace(function, x, state), trace(function, x, state)
        align_channels(after)
        close(before(x, state), model(x))
        return before, after, before(x, state), after(x, state)


def widths(gm):
    """Output and input channels of each convolution."""
    found = [arguments_of(node) for node in gm.graph.nodes if node.target is CONVOLUTION]
    return [tuple(arguments[1].meta["val"].shape[:2]) for arguments in found if arguments[8] == 1]


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_a_network_of_odd_widths():
    torch.manual_seed(0)
    _, gm, expected, got = aligned(Branches(), torch.randn(2, 3, 16, 16, dtype=DOUBLE))
    assert widths(gm) == [(18, 3), (24, 24), (24, 24), (40, 24), (24, 40), (40, 40), (64, 24)]
    close(got, expected)
    pads = sum(node.target is torch.ops.aten.constant_pad_nd.default for node in gm.graph.nodes)
    assert pads == 6 + 5, "each weight, and each image once, however many read it"


class Shapes(torch.fx.Interpreter):
    """Runs a graph, and compares each result with what its node says."""

    def run_node(self, n):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            assert (result.shape, result.dtype) == (n.meta["val"].shape, n.meta["val"].dtype), n
        return result


def test_values_have_the_shapes_that_they_say():
    model, x = Branches().to(DOUBLE).eval(), torch.randn(1, 3, 16, 16, dtype=DOUBLE)
    _, gm, expected, _ = aligned(model, x)
    with torch.no_grad():
        flat = Shapes(gm).run(x, dict(model.named_parameters()))
    close(flat, expected)


def conv(outputs, inputs, window=3, **options):
    return nn.Conv2d(inputs, outputs, window, padding=window // 2, **options)


@pytest.mark.parametrize(
    ("layer", "image"),
    [
        (conv(16, 8), (1, 8, 5, 5)),
        (conv(18, 3), (1, 3, 5, 5)),  # cuDNN has kernels for these
        (conv(18, 18, groups=18), (1, 18, 5, 5)),
        (conv(24, 18, 1), (1, 18, 5, 5)),  # a product of matrices; to enlarge a caller's image costs more
        (nn.Conv1d(18, 18, 3), (1, 18, 5)),
        (nn.ConvTranspose2d(18, 18, 3), (1, 18, 5, 5)),
    ],
)
def test_what_stays_as_it_is(layer, image):
    before, after, expected, got = aligned(Net(lambda x, f: torch.relu(f(x)), layer), torch.randn(image, dtype=DOUBLE))
    assert after.code == before.code
    close(got, expected)


def test_few_channels_are_enlarged_for_our_own_kernel(monkeypatch):
    monkeypatch.setattr(channels, "may_be_ours", lambda image: True)
    monkeypatch.setattr(conv2d, "_DTYPES", (DOUBLE,))
    for size, found in ((32, (24, 8)), (2000, (18, 3))):  # more pixels are for cuDNN's kernel
        with FakeTensorMode():
            image, weight = torch.empty(1, 3, size, size, dtype=DOUBLE), torch.empty(18, 3, 3, 3, dtype=DOUBLE)
            gm = trace(lambda x, weight: torch.relu(torch.conv2d(x, weight)), image, weight)
        align_channels(gm)
        assert widths(gm) == [found]


def test_results_for_the_caller_and_for_products_are_not_parts():
    """A part has other strides, which the caller would see, and ``view`` might refuse."""
    net = Net(lambda x, f, g: (f(x), g(x).view(x.shape[0], -1)), conv(18, 18), conv(18, 18))
    _, gm, expected, got = aligned(net, torch.randn(2, 18, 5, 5, dtype=DOUBLE))
    assert widths(gm) == [(18, 24), (18, 24)]
    close(got, expected)
    assert [tensor.stride() for tensor in got] == [tensor.stride() for tensor in expected]


def test_what_is_not_finite_stays_where_it_is():
    """Zero times infinity is no number: it must not get into channels that another convolution reads."""
    net = Net(lambda x, f, g, h: F.relu6(h(F.relu6(g(F.relu6(f(x)))))), conv(18, 18), conv(18, 18), conv(18, 18))
    x = torch.randn(1, 18, 9, 9, dtype=DOUBLE)
    x[0, 3, 4, 4] = float("inf")
    _, gm, expected, got = aligned(net, x)
    assert widths(gm)[:2] == [(24, 24), (24, 24)]
    assert all(result.isfinite().all() for result in expected)
    close(got, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_whether_channels_come_last_is_asked_of_inductor(wanted):
    gm, _, _, _ = aligned(Branches(), torch.randn(1, 3, 16, 16, dtype=DOUBLE))
    with inductor_config.patch(layout_optimization=wanted), torch.backends.mkldnn.flags(enabled=False):
        assert puts_channels_last(gm) is wanted


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["convolve", "product", "relu", "add", "cat", "pool", "flip"]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from([5, 8, 12, 18, 24]),
    ),
    min_size=2,
    max_size=12,
)


@given(operations=OPERATIONS, returned=st.lists(st.integers(0, 12), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_random_networks_compute_what_they_did(operations, returned, seed):
    weights = []

    def function(x, *known):
        """Known weights are taken; without, they are drawn and noted."""
        known, generator, values = iter(known), torch.Generator().manual_seed(seed), [x, torch.relu(x)]
        for kind, i, j, width in operations:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind in ("convolve", "product"):
                window = 3 if kind == "convolve" else 1
                weight = next(known, None)
                if weight is None:
                    shape = (width, a.shape[1], window, window)
                    weights.append(torch.randn(shape, dtype=DOUBLE, generator=generator) / a.shape[1])
                    weight = weights[-1]
                bias = weight[:, 0, 0, 0] if i % 2 else None
                values.append(F.conv2d(a, weight, bias, padding=window // 2))
            elif kind == "relu":
                values.append(torch.relu(a))
            elif kind == "add" and a.shape == b.shape:
                values.append(a + b)
            elif kind == "cat" and a.shape[1] + b.shape[1] < 60:
                values.append(torch.cat([a, b], 1))
            elif kind == "pool":
                values.append(F.max_pool2d(a, 3, 1, 1))
            elif kind == "flip":
                values.append(a.transpose(2, 3))
        return [values[i % len(values)] for i in returned]

    x = torch.randn(1, 12, 4, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    expected = function(x)
    gm = trace(function, x, *weights)
    align_channels(gm)
    close(gm(x, *weights), expected)


def test_inputs_stay_together():
    _, gm, _, _ = aligned(Net(lambda x, f: torch.relu(f(x)), conv(18, 18)), torch.randn(1, 18, 5, 5, dtype=DOUBLE))
    kinds = [node.op for node in gm.graph.nodes]
    assert "placeholder" not in kinds[kinds.index("call_function") :]
    assert widths(gm) == [(24, 24)]


def test_weights_that_are_constants_are_enlarged_once():
    """As with ``freeze=True``."""
    model, x = Branches().to(DOUBLE).eval(), torch.randn(2, 3, 16, 16, dtype=DOUBLE)
    state = dict(model.named_parameters())
    with torch.no_grad():
        gm = trace(lambda state, x: torch.func.functional_call(model, state, (x,)), state, x)
        expected = gm(state, x)
    *parameters, _ = gm.graph.find_nodes(op="placeholder")
    for node, (name, value) in zip(parameters, state.items(), strict=True):
        attribute = name.replace(".", "_")
        gm.register_buffer(attribute, value.detach())
        with gm.graph.inserting_after(parameters[-1].next):
            constant = gm.graph.get_attr(attribute)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    gm.recompile()
    align_channels(gm)
    assert widths(gm) == [(18, 3), (24, 24), (24, 24), (40, 24), (24, 40), (40, 40), (64, 24)]
    pads = [node for node in gm.graph.nodes if node.target is torch.ops.aten.constant_pad_nd.default]
    assert len(pads) == 5, "of images alone"
    close(gm(state, x), expected)


@pytest.mark.parametrize("come_last", [True, False])
def test_through_inductor(come_last):
    """On a CPU without oneDNN, Inductor treats convolutions as on a GPU."""
    torch._dynamo.reset()
    model, x = Branches().to(DOUBLE).eval(), torch.randn(2, 3, 16, 16, dtype=DOUBLE)
    with (
        torch.no_grad(),
        torch.backends.mkldnn.flags(enabled=False),
        inductor_config.patch(layout_optimization=come_last),
    ):
        compiled = ms.compile(model, strict=True)
        got, expected = compiled(x), model(x)
    close(got, expected)
    assert [tensor.stride() for tensor in got] == [tensor.stride() for tensor in expected]
    (executable,) = executables(compiled)
    program = executable.lowered.program
    assert sum(kernel.kind is KernelKind.CONV for kernel in program.graph.kernels) == 8
    sizes = [layout.size for layout in program.layouts.values()]
    assert sum(len(size) == 4 and size[0] in (24, 40) for size in sizes) == 5 * come_last, "each weight"
