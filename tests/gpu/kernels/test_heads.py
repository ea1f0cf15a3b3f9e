"""Products that give queries, keys and values of a token, by our kernel: against what their operator means."""

import math

import pytest
import torch

import millstream as ms
from benchmarks.decode import Decoder
from millstream._torch.workarounds import without
from millstream.kernels.early_loads import early_loads
from millstream.kernels.rows.head_products import MULTIPLY_HEADS, multiply_heads
from millstream.kernels.rows.row_products import NORMS
from tests.gpu.kernels.test_rows import randn
from tests.kernels.test_heads import Twice, halves, whole
from tests.kernels.test_rows import choose
from tests.networks import assert_close

pytestmark = pytest.mark.gpu


def product(
    length, heads, of_keys, size, dtype=torch.bfloat16, *, norm="", bias=False, half=True, merged=True, room=40, at=7
):
    """Arguments of the operator but the last; the caches lie as models keep them, in two ways."""
    widths = [heads * size, of_keys * size, of_keys * size]
    if merged:
        weights = (randn(sum(widths), length, dtype=dtype) / math.sqrt(length)).split(widths)
    else:
        weights = [randn(width, length, dtype=dtype) / math.sqrt(length) for width in widths]
    angles = torch.randn(size // 2 if half else size, device="cuda")
    return [
        randn(1, length, dtype=dtype),
        *weights,
        *(randn(width, dtype=dtype) if bias else None for width in widths),
        randn(length, dtype=dtype) if norm else None,
        randn(length, dtype=dtype) if norm == "layer" else None,
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        torch.tensor([at], device="cuda"),
        randn(1, of_keys, room, size, dtype=dtype),
        randn(1, room, of_keys, size, dtype=dtype).transpose(1, 2),
        norm,
        1e-6 if norm else 0.0,
        0 if half else size // 2,
        True,
    ]


def assert_as_meant(arguments):
    *_, keys, values, _, _, _, _ = arguments
    before, at = [keys.clone(), values.clone()], int(arguments[11])
    exact = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    wanted = MULTIPLY_HEADS(*exact, torch.double)
    out = torch.full((1, arguments[1].shape[0]), math.nan, device="cuda", dtype=torch.float32)
    multiply_heads(*arguments, out=out)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    for cache, old, new in zip((keys, values), before, exact[12:14], strict=True):
        torch.testing.assert_close(cache.double(), new, rtol=2**-8, atol=1e-4)
        cache[:, :, at] = old[:, :, at]
        assert torch.equal(cache, old)  # at other positions


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    ("length", "heads", "of_keys", "size"),
    [(2048, 32, 4, 64), (4096, 32, 8, 128), (896, 14, 2, 64), (96, 2, 2, 16), (8192, 16, 1, 256)],
)
def test_sizes(length, heads, of_keys, size, merged, dtype):
    assert_as_meant(product(length, heads, of_keys, size, dtype, merged=merged))
    assert_as_meant(product(length, heads, of_keys, size, dtype, merged=merged, norm="rms", half=False, at=-2))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("half", [True, False])
def test_what_comes_before_and_after(norm, half):
    assert_as_meant(product(1024, 8, 2, 64, norm=norm, bias=True, half=half))


def test_a_row_may_be_in_single_precision():
    arguments = product(512, 4, 2, 32, norm="layer")
    arguments[0] = arguments[0].float() * 3
    assert_as_meant(arguments)


def test_early_loads_in_a_graph_give_the_same_bits():
    torch.manual_seed(0)
    layers = [product(2048, 32, 4, 64, norm="rms") for _ in range(24)]
    outs = [torch.empty(1, 2048, device="cuda", dtype=torch.bfloat16) for _ in layers]
    caches = [cache for layer in layers for cache in layer[12:14]]

    def run():
        x = layers[0][0]
        for (_, *others), out in zip(layers, outs, strict=True):
            multiply_heads(x, *others, out=out)
            x = out

    run()
    wanted = [each.clone() for each in (*outs, *caches)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), early_loads([]):
        run()
    for _ in range(200):
        for each in outs:
            each.fill_(math.nan)
        for cache in caches:
            cache[:, :, 7] = math.nan
        graph.replay()
        assert all(map(torch.equal, (*outs, *caches), wanted))


def tokens(model, off):
    """What a model says to 500 positions one after another, and the caches that it leaves."""
    torch._dynamo.reset()
    with without(off):
        compiled = ms.compile(model, engine="graph", strict=True)
        token, found = torch.zeros(1, 1, dtype=torch.long, device="cuda"), []
        for position in range(500):
            token = found[-1].argmax(-1) if found else token
            found.append(compiled(token, torch.tensor([position], device="cuda")).clone())
    return torch.cat(found), token, ms.explain(compiled).text(limit=None)


@torch.no_grad()
def test_tokens_have_the_same_bits_without_early_loads(monkeypatch):
    choose(monkeypatch, "row-products", "head-products", "split-attention")
    results = []
    for off in ((), ("early-loads",), ("head-products",)):
        torch.manual_seed(0)
        model = Decoder(layers=4, width=512, heads=8, kv_heads=2, inner=1024, vocab=1000, length=512)
        model = model.cuda().bfloat16().eval()
        found, token, text = tokens(model, off)
        assert ("rotary_embedding" in text) is ("head-products" not in off)
        exact = model.float()(token, torch.tensor([499], device="cuda"))  # with the keys and values that are there
        assert (found[-1] - exact).norm() <= 0.03 * exact.norm()
        results.append(found)
    assert torch.equal(*results[:2])
    assert (results[2][0] - results[0][0]).norm() <= 0.03 * results[0][0].norm()


@pytest.mark.parametrize("rotate", [halves, whole])
@torch.no_grad()
def test_models_with_three_products(monkeypatch, rotate):
    torch._dynamo.reset()
    torch.manual_seed(0)
    choose(monkeypatch, "row-products", "head-products")
    model = Twice(rotate=rotate, merged=False, bias=True, norm=torch.nn.LayerNorm).cuda().bfloat16().eval()
    old = [each.clone() for each in model.buffers()]
    compiled = ms.compile(model, strict=True)
    x, position = torch.randn(1, 1, 64, device="cuda").bfloat16(), torch.tensor([9], device="cuda")
    found = compiled(x, position)
    left = [each.clone() for each in model.buffers()]
    for cache, each in zip(model.buffers(), old, strict=True):
        cache.copy_(each)
    assert_close(found.float(), model(x, position).float(), 0.02)
    for cache, each in zip(model.buffers(), left, strict=True):
        assert_close(each.float(), cache.float(), 0.02)
    assert "rotary_embedding" in ms.explain(compiled).text(limit=None)
