"""Products of a few rows, and attention of a few queries, by our kernels: against what their operators mean."""

import math

import pytest
import torch
import torch.nn.functional as F

import millstream as ms
from benchmarks.decode import Decoder
from millstream._torch.workarounds import without
from millstream.kernels.early_loads import early_loads
from millstream.kernels.rows.attention import ATTEND, JOIN, attend_parts, join_parts
from millstream.kernels.rows.row_products import ACTIVATIONS, MULTIPLY, NORMS, multiply_rows
from tests.kernels.test_rows import choose

pytestmark = pytest.mark.gpu


def randn(*sizes, dtype=torch.bfloat16):
    return torch.randn(sizes, device="cuda").to(dtype)


def product(
    number, length, width, dtype=torch.bfloat16, *, gate=False, bias=False, norm="", activation="", added=False
):
    """Arguments of the operator but the last."""
    rows, weight = randn(number, length, dtype=dtype), randn(width, length, dtype=dtype) / math.sqrt(length)
    return [
        rows,
        weight,
        randn(width, length, dtype=dtype) / math.sqrt(length) if gate else None,
        randn(width, dtype=dtype) if bias else None,
        randn(length, dtype=dtype) if norm else None,
        randn(length, dtype=dtype) if norm == "layer" else None,
        randn(number, width, dtype=dtype) if added else None,
        norm,
        1e-6 if norm else 0.0,
        activation,
        True,
    ]


def assert_as_meant(arguments):
    out = torch.full((arguments[0].shape[0], arguments[1].shape[0]), math.nan, device="cuda", dtype=torch.float32)
    multiply_rows(*arguments, out=out)
    exact = MULTIPLY(*[each.double() if isinstance(each, torch.Tensor) else each for each in arguments], torch.double)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize(("length", "width"), [(16, 5), (768, 768), (2048, 2560), (5632, 2048), (14336, 72)])
def test_sizes(number, length, width):
    assert_as_meant(product(number, length, width))
    assert_as_meant(product(number, length, width, gate=True, activation="silu", added=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_comes_before_and_after(norm, activation, dtype):
    for number in (1, 3):
        assert_as_meant(product(number, 3072, 96, dtype, norm=norm, activation=activation, bias=True, added=True))


def test_rows_may_be_in_single_precision():
    arguments = product(2, 512, 64, norm="layer")
    arguments[0] = arguments[0].float() * 3
    assert_as_meant(arguments)


def test_early_loads_in_a_graph_give_the_same_bits():
    torch.manual_seed(0)
    layers = [product(1, 2048, 2048, norm="rms", added=True) for _ in range(24)]
    outs = [torch.empty(1, 2048, device="cuda", dtype=torch.bfloat16) for _ in layers]

    def run():
        x = layers[0][0]
        for (_, *others), out in zip(layers, outs, strict=True):
            multiply_rows(x, *others, out=out)
            x = out

    run()
    wanted = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), early_loads([]):
        run()
    for _ in range(200):
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        assert all(map(torch.equal, outs, wanted))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "of_keys", "queries", "keys", "size"),
    [
        (1, 4, 4, 8, 1024, 64),
        (1, 12, 12, 1, 129, 64),
        (2, 32, 8, 1, 4096, 128),
        (3, 6, 3, 5, 200, 32),
        (1, 2, 1, 8, 40000, 256),
    ],
)
@pytest.mark.parametrize("masked", ["no", "late", "rows"])
def test_attention(batch, heads, of_keys, queries, keys, size, masked, dtype):
    torch.manual_seed(1)
    query = randn(batch, queries, heads, size, dtype=dtype).transpose(1, 2)
    key, value = (randn(batch, of_keys, keys, size, dtype=dtype) for _ in range(2))
    mask = None
    if masked != "no":
        mask = torch.zeros(batch, 1, queries, keys, device="cuda", dtype=dtype)
        mask[..., keys // 3 :] = -math.inf
        if masked == "rows":
            mask[:, :, -1] = -math.inf
            mask += randn(batch, 1, queries, keys, dtype=dtype)
    scale = 1 / math.sqrt(size)
    parts = ATTEND(query, key, value, mask, scale)
    found = torch.full_like(parts, math.nan)
    attend_parts(query, key, value, mask, scale, out=found)
    layout = [batch, heads, queries, size], [queries * heads * size, size, heads * size, 1]
    out = JOIN(parts, of_keys, *layout, dtype).fill_(math.nan)
    join_parts(found, of_keys, out=out)
    wanted = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask if mask is None else mask.double(), enable_gqa=True
    )
    if masked == "rows":
        wanted[:, :, -1] = 0
    close = {"rtol": 0, "atol": 8e-3 if dtype is torch.bfloat16 else 1e-3}
    torch.testing.assert_close(JOIN(parts, of_keys, *layout, torch.double), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), wanted, **close)


@torch.no_grad()
def test_tokens_have_the_same_bits_without_early_loads(monkeypatch):
    choose(monkeypatch, "row-products", "split-attention")
    results = []
    for off in ((), ("early-loads",)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Decoder(layers=4, width=512, heads=8, kv_heads=2, inner=1024, vocab=1000, length=512)
        model = model.cuda().bfloat16().eval()
        with without(off):
            compiled = ms.compile(model, engine="graph", strict=True)
            token, found = torch.zeros(1, 1, dtype=torch.long, device="cuda"), []
            for position in range(500):
                token = found[-1].argmax(-1) if found else token
                found.append(compiled(token, torch.tensor([position], device="cuda")).clone())
        text = ms.explain(compiled).text(limit=None)
        assert "rms_norm, linear, silu" in text
        assert "attention" in text
        results.append(torch.cat(found))
    assert torch.equal(*results)
    exact = model.float()(token, torch.tensor([499], device="cuda"))  # with the keys and values that are there
    assert (results[-1][-1] - exact).norm() <= 0.03 * exact.norm()
