"""The kernel for small dense convolutions."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import millstream as ms
from millstream.kernels.conv2d.conv2d import convolve_2d
from millstream.kernels.conv2d.conv2d_tiles import choose_tile
from tests import networks

pytestmark = pytest.mark.gpu

SHAPES = [  # image, channels of the result, window, stride, padding
    ((1, 24, 14, 14), 72, (3, 3), (2, 2), (1, 1)),
    ((2, 40, 9, 11), 24, (3, 3), (1, 1), (1, 1)),
    ((1, 64, 56, 56), 64, (3, 3), (1, 1), (1, 1)),
    ((1, 96, 35, 35), 96, (3, 3), (1, 1), (1, 1)),
    ((1, 80, 73, 73), 192, (3, 3), (1, 1), (0, 0)),
    ((1, 8, 224, 224), 64, (7, 7), (2, 2), (3, 3)),
    ((1, 8, 224, 224), 64, (3, 3), (2, 2), (0, 0)),
    ((1, 8, 20, 30), 16, (3, 1), (1, 1), (1, 0)),
    ((1, 48, 35, 35), 64, (5, 5), (1, 1), (2, 2)),
    ((1, 160, 17, 17), 160, (1, 7), (1, 1), (0, 3)),
    ((1, 160, 17, 17), 192, (7, 1), (1, 1), (3, 0)),
    ((3, 16, 5, 4), 8, (2, 3), (3, 2), (0, 2)),
    ((1, 32, 1, 1), 32, (3, 3), (1, 1), (1, 1)),
    ((1, 672, 11, 11), 672, (1, 1), (1, 1), (0, 0)),
    ((1, 768, 17, 17), 192, (1, 1), (1, 1), (0, 0)),
    ((1, 512, 28, 28), 128, (1, 1), (1, 1), (0, 0)),
    ((1, 168, 42, 42), 168, (1, 1), (1, 1), (0, 0)),
    ((1, 64, 56, 56), 64, (1, 1), (1, 1), (0, 0)),
    ((2, 24, 28, 28), 40, (1, 1), (1, 1), (0, 0)),
    ((1, 256, 56, 56), 128, (1, 1), (2, 2), (0, 0)),
    ((1, 40, 6, 6), 8, (1, 1), (1, 1), (1, 1)),
    ((1, 144, 7, 7), 144, (3, 3), (1, 1), (1, 1)),
    ((2, 104, 7, 9), 104, (3, 3), (2, 1), (1, 0)),
    ((1, 128, 14, 14), 32, (3, 3), (1, 1), (1, 1)),
    ((1, 40, 28, 28), 72, (3, 3), (2, 2), (1, 1)),
    ((1, 56, 9, 9), 24, (1, 7), (1, 1), (0, 3)),
    ((1, 960, 7, 7), 320, (1, 1), (1, 1), (0, 0)),
    ((3, 1280, 1, 1), 1000, (1, 1), (1, 1), (0, 0)),
    ((1, 512, 1, 63), 64, (1, 3), (1, 1), (0, 1)),  # lines as long as may be
    ((1, 8, 3, 4090), 8, (3, 5), (1, 1), (2, 4)),
]


def make(size, outputs, window, stride, padding, dtype=torch.half):
    torch.manual_seed(0)
    image = torch.randn(size, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = (
        torch.randn(outputs, size[1], *window, device="cuda", dtype=dtype) / (size[1] * window[0] * window[1]) ** 0.5
    )
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    return image, weight, bias, [*stride], [*padding]


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_what_pytorch_computes(shape, dtype):
    image, weight, _, stride, padding = make(*shape, dtype)
    exact = functional.conv2d(image.double(), weight.double(), None, stride, padding)
    out = torch.full_like(exact, float("nan"), dtype=dtype, memory_format=torch.channels_last)
    convolve_2d(image, weight, None, None, False, out.shape[1], stride, padding, out=out)
    networks.assert_close(out, exact.to(dtype), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("relu", "missing", "wider"), [(True, 0, 0), (False, 2, 8), (True, 6, 0)])
def test_what_follows_is_done_as_well(shape, relu, missing, wider):
    image, weight, bias, stride, padding = make(*shape)
    exact = functional.conv2d(image.double(), weight.double(), None, stride, padding)
    kept = exact.shape[1] - missing
    size = (exact.shape[0], exact.shape[1] + wider, *exact.shape[2:])
    addend = torch.randn(size, device="cuda", dtype=torch.half).contiguous(memory_format=torch.channels_last)
    exact = (exact + bias.double().view(-1, 1, 1))[:, :kept] + addend[:, :kept].double()
    exact = torch.relu(exact) if relu else exact
    out = torch.full((size[0], size[1] - wider, *size[2:]), float("nan"), device="cuda", dtype=torch.half).contiguous(
        memory_format=torch.channels_last
    )
    convolve_2d(image, weight, bias, addend, relu, kept, stride, padding, out=out)
    networks.assert_close(out[:, :kept], exact.half(), 2 * torch.finfo(torch.half).eps)
    assert not out[:, kept:].any()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_a_bias_of_single_precision_is_rounded_first(dtype):
    image, weight, _, stride, padding = make(*SHAPES[1], dtype)
    bias = torch.randn(weight.shape[0], device="cuda")
    outs = []
    for each in (bias, bias.to(dtype)):
        outs.append(torch.empty_like(image[:, :24]).contiguous(memory_format=torch.channels_last))
        convolve_2d(image, weight, each, None, True, 24, stride, padding, out=outs[-1])
    assert torch.equal(*outs)


def test_under_autocast_a_convolution_is_one_kernel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 18, 1)).cuda().eval()
    x = torch.randn(2, 32, 14, 14, device="cuda")
    compiled = ms.compile(model, strict=True)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.half):
        for _ in range(3):
            result = compiled(x)
        networks.assert_close(result, model(x), 2e-3)
    (program,) = ms.explain(compiled).to_dict()["programs"]
    names = [kernel["name"] for kernel in program["kernels"]]
    assert sum(name.startswith("convolve_2d with bias") for name in names) == 2
    assert sum("convert_weight" in name for name in names) == 2


def test_the_shapes_above_take_every_tile():
    tiles = set()
    for shape in SHAPES:
        image, weight, bias, stride, padding = make(*shape)
        tiles.add(choose_tile(weight, functional.conv2d(image, weight, bias, stride, padding), stride, padding))
    assert None not in tiles
    assert len(tiles) == 8


def test_what_is_no_number_stays_so():
    image, weight, bias, stride, padding = make((1, 16, 6, 6), 8, (3, 3), (1, 1), (1, 1))
    image[0, 3, 2, 2] = float("nan")
    wanted = functional.conv2d(image, weight, bias, stride, padding)
    out = torch.empty_like(wanted)
    convolve_2d(image, weight, bias, None, True, 8, stride, padding, out=out)
    assert torch.equal(out.isnan(), wanted.isnan())


class Block(nn.Module):
    """Branches of several windows, whose results lie one after the other, and a way past them."""

    def __init__(self):
        super().__init__()
        widths = {1: 18, 3: 18, 5: 12}
        self.branches = nn.ModuleList(nn.Conv2d(32, widths[size], size, padding=size // 2) for size in widths)
        self.last = nn.Conv2d(48, 32, 1)

    def forward(self, x):
        return torch.relu(self.last(torch.cat([torch.relu(branch(x)) for branch in self.branches], 1)) + x)


def test_in_a_network_on_streams(names_on_streams):
    ours = [name for name in names_on_streams(Block) if name.startswith(convolve_2d.__name__)]
    assert [name.count(" and ") for name in sorted(ours)] == [1, 1, 1, 2]


class Fire(nn.Module):
    """Two convolutions whose results lie one after the other, and what reads both."""

    def __init__(self):
        super().__init__()
        self.squeeze = nn.Conv2d(32, 16, 1)
        self.branches = nn.ModuleList(
            nn.Conv2d(16, width, size, padding=size // 2) for size, width in ((1, 24), (3, 40))
        )
        self.last = nn.Conv2d(64, 32, 1)

    def forward(self, x):
        x = torch.relu(self.squeeze(x))
        return self.last(torch.cat([torch.relu(branch(x)) for branch in self.branches], 1))


def test_results_are_written_where_they_are_concatenated(names_on_streams):
    assert not any("cat" in name for name in names_on_streams(Fire))


class Deep(nn.Module):
    """Many small convolutions after and beside one another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))

    def forward(self, x):
        return self.blocks(x)


@pytest.mark.parametrize("engine", ["graph", "streams"])
def test_no_kernel_reads_what_the_one_in_front_has_not_written(engine):
    torch.manual_seed(0)
    model = Deep().cuda().half().eval().to(memory_format=torch.channels_last)
    images = [
        torch.randn(1, 32, 14, 14, device="cuda", dtype=torch.half).contiguous(memory_format=torch.channels_last)
        for _ in range(2)
    ]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = ms.compile(model, streams=4, engine=engine, strict=True)
        wanted = [compiled(image) for image in images]
        for image, want in zip(images, wanted, strict=True):
            networks.assert_close(want, model(image), 2e-2)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(1000):
            wrong += (compiled(images[i % 2]) != wanted[i % 2]).sum()
    assert int(wrong) == 0


class Narrow(nn.Module):
    """Small convolutions, some of which have weights that are made ready right in front."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(72, 72, 3, padding=1) for _ in range(6))
        self.last = nn.Linear(72, 40)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_weights_that_change_between_calls(layout, streams):
    torch.manual_seed(0)
    model = Narrow().half().cuda().eval().to(memory_format=layout)
    x = torch.randn(1, 72, 14, 14, device="cuda", dtype=torch.half)
    compiled = ms.compile(model, strict=True, streams=streams)
    with torch.no_grad():
        for _ in range(20):
            for layer in model.layers:
                layer.weight.copy_(torch.randn_like(layer.weight) / 26)
            networks.assert_close(compiled(x), model(x), 2e-2)
