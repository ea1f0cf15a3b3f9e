"""Products that give queries, keys and values are found in graphs, however their rotation by the position is written.

What our kernel computes is tested on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream._torch.workarounds import without
from millstream.api import executables
from millstream.check import check_plan
from millstream.cost import Roofline
from millstream.kernels.rows import head_patterns, head_products, row_launches
from millstream.kernels.rows.head_patterns import find_heads, rewrite_heads
from millstream.kernels.rows.head_products import MULTIPLY_HEADS
from millstream.kernels.rows.product_patterns import find_products, rewrite_products
from millstream.schedule import plan_graph
from tests.kernels.test_rows import choose, exact, graph_of, stand_ins
from tests.networks import assert_close

__all__ = ["exact", "stand_ins"]

aten = torch.ops.aten
HEADS, KV, HEAD, ROOM = 4, 2, 16, 200
WIDTH = HEADS * HEAD


@pytest.fixture(autouse=True)
def doubles(monkeypatch):
    """In double precision there is nothing to round."""
    monkeypatch.setattr(head_patterns, "DTYPES", (torch.double, torch.bfloat16))


def halves(x, angles):
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def whole(x, angles):
    cos, sin = (each.repeat(1, 2).to(x.dtype)[None, None] for each in (angles.cos()[None], angles.sin()[None]))
    return x * cos + torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), -1) * sin


def wider(x, angles):
    return halves(x.to(torch.float64), angles.double()).to(x.dtype)


def neighbours(x, angles):
    pairs = x.unflatten(-1, (-1, 2))
    left, right = pairs[..., 0], pairs[..., 1]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([left * cos - right * sin, left * sin + right * cos], -1).flatten(-2)


class Attention(nn.Module):
    """Attention of a token over a cache, as models write it."""

    def __init__(self, rotate=halves, *, merged=True, bias=False, norm=nn.RMSNorm, room=ROOM):
        super().__init__()
        self.rotate, self.norm, self.merged = rotate, norm(WIDTH), merged
        widths = (WIDTH, KV * HEAD, KV * HEAD)
        if merged:
            self.qkv = nn.Linear(WIDTH, sum(widths), bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias=bias) for width in widths)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("keys", torch.randn(1, KV, room, HEAD))
        self.register_buffer("values", torch.randn(1, KV, room, HEAD))

    def forward(self, x, position):
        y = self.norm(x)
        if self.merged:
            q, k, v = self.qkv(y).unflatten(-1, (-1, HEAD)).transpose(1, 2).split([HEADS, KV, KV], 1)
        else:
            q, k, v = (f(y).view(1, 1, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        angles = position * 100.0 ** -(torch.arange(HEAD // 2, device=x.device) / HEAD)
        q, k = self.rotate(q, angles), self.rotate(k, angles)
        return x + self.out(self.attend(q, k, v, position).transpose(1, 2).reshape(x.shape))

    def attend(self, q, k, v, position):
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = (torch.arange(self.keys.shape[2], device=q.device) <= position).view(1, 1, 1, -1)
        return F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)


class Twice(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.layers = nn.ModuleList(Attention(**how) for _ in range(2))

    def forward(self, x, position):
        for layer in self.layers:
            x = layer(x, position)
        return x


def rewritten(model, x=None, *, products_first=False):
    """How often our kernel is in the graph of a model, which computes the same and leaves the same caches."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, WIDTH) if x is None else x
    model = model.double()
    names = [name for name, _ in model.named_buffers()]

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, position, *caches):
            return torch.func.functional_call(self.model, dict(zip(names, caches, strict=True)), (x, position))

    caches = [each.clone() for each in model.buffers()]
    gm, given = graph_of(Functional(), x.double(), torch.tensor([7]), *caches)

    def run():
        copies = [each.clone() for each in given]
        return [gm(*copies), *copies]

    wanted = run()
    assert not all(map(torch.equal, wanted[1:], given))  # caches have changed
    if products_first:
        rewrite_products(gm, find_products(gm.graph))
    named = {each.name for each in find_heads(gm.graph)}
    rewrite_heads(gm, lambda heads: heads.name in named)
    torch.testing.assert_close(run(), wanted, rtol=1e-9, atol=1e-9)
    target = torch.ops.higher_order.auto_functionalized
    return [node for node in gm.graph.nodes if node.target is target and node.args[0] is MULTIPLY_HEADS], gm


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("rotate", [halves, whole, wider])
def test_each_layer_is_one_kernel(rotate, merged):
    for bias, norm, products_first in ((False, nn.RMSNorm, True), (True, nn.LayerNorm, False)):
        model = Twice(rotate=rotate, merged=merged, bias=bias, norm=norm)
        ours, gm = rewritten(model, products_first=products_first)
        assert len(ours) == 2
        left = [node.target for node in gm.graph.nodes]
        assert aten.index_put.default not in left
        assert left.count(aten.cos.default) == left.count(aten.sin.default) == 1  # for all layers
        assert not {aten.cat.default, aten.rsqrt.default} & {*left} or rotate is whole


def test_of_what_is_read_elsewhere_all_stays():
    class Reading(Attention):
        def __init__(self, read):
            super().__init__()
            self.read = read

        def attend(self, q, k, v, position):
            return super().attend(q, k, v, position) + self.read(self, q, k, v)

    reads = {
        lambda self, q, k, v: self.keys.sum(): 1,  # the new one
        lambda self, q, k, v: q.sum(): 1,
        lambda self, q, k, v: v.sum(): 0,
        lambda self, q, k, v: k.sum(): 0,
    }
    for read, number in reads.items():
        ours, _ = rewritten(Reading(read))
        assert len(ours) == number

    class Before(Attention):
        def attend(self, q, k, v, position):
            old = self.values.sum()
            return super().attend(q, k, v, position) * old

    assert not rewritten(Before())[0]


def test_other_rotations_and_sizes_stay():
    assert not rewritten(Attention(neighbours))[0]
    assert not rewritten(Attention(lambda x, angles: halves(x, -angles) * 2))[0]
    assert not rewritten(Attention(lambda x, angles: x))[0]

    class Swapped(Attention):
        def attend(self, q, k, v, position):
            return super().attend(q, v, k, position)  # keys are not rotated

    assert len(rewritten(Swapped())[0]) == 1  # as whichever is rotated is a key to the kernel


def test_angles_the_other_way_round():
    ours, _ = rewritten(Attention(lambda x, angles: halves(x, -angles)))
    assert len(ours) == 1


# --- in a program ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own(stand_ins, monkeypatch):
    """Names of our kernels as a program calls them on a computer that has no GPU."""

    def multiply_heads(*arguments, out):
        stand_ins.append("multiply_heads")
        out.copy_(MULTIPLY_HEADS(*arguments, out.dtype))

    for module in (head_products, row_launches):
        monkeypatch.setattr(module, "multiply_heads", multiply_heads)
    return stand_ins


@pytest.mark.parametrize("off", ["", "head-products", "rows"])
@torch.no_grad()
def test_programs_call_our_kernel(monkeypatch, own, off):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Twice(merged=False, rotate=whole).bfloat16().eval()
    caches = [each.clone() for each in model.buffers()]
    choose(monkeypatch, "row-products", "head-products")
    inputs = [(torch.randn(1, 1, WIDTH).bfloat16(), torch.tensor([position])) for position in (7, 8, 199)]
    with without({off, "conv2d"} - {""}):
        compiled = ms.compile(model, engine="serial", strict=True)
        found = [compiled(*each).float() for each in inputs]
    left = [each.clone() for each in model.buffers()]
    for cache, old in zip(model.buffers(), caches, strict=True):
        cache.copy_(old)
    for result, each in zip(found, inputs, strict=True):
        assert_close(result, model(*each).float(), 0.02)
    for cache, own_cache in zip(model.buffers(), left, strict=True):
        assert_close(own_cache.float(), cache.float(), 0.02)
    program = executables(compiled)[0].lowered.program
    assert len(program.mutated) == 4
    check_plan(plan_graph(program.graph, Roofline().estimate(program.graph), 4, "list"))
    alone = ["multiply_heads", "multiply_rows"]
    apart = ["multiply_rows"] * 4
    assert own == {"": alone, "head-products": apart, "rows": []}[off] * 2 * len(inputs)
