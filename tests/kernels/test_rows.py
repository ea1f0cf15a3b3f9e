"""Products of a few rows, with what is around them, and attention of a few queries are found in graphs.

What our kernels compute is tested on a GPU.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import millstream as ms
from millstream._torch.workarounds import without
from millstream.kernels import launches, nodes
from millstream.kernels.early_loads import early_loads, may_load_early
from millstream.kernels.rows import attention, attention_patterns, product_patterns, row_launches, row_products
from millstream.kernels.rows.attention import ATTEND, JOIN
from millstream.kernels.rows.attention_patterns import find_attention, rewrite_attention
from millstream.kernels.rows.product_patterns import find_products, rewrite_products
from millstream.kernels.rows.row_products import MULTIPLY
from millstream.lower.alternatives import table
from tests.lower.inductor.texts import pretended_gpu
from tests.networks import assert_close

aten = torch.ops.aten
SIZE, INNER = 32, 48


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """In double precision there is nothing to round."""
    for module in (row_products, product_patterns):
        monkeypatch.setattr(module, "DTYPES", (torch.double, torch.bfloat16))


class LikeLlama(nn.RMSNorm):
    """A norm as it is written by hand."""

    def forward(self, x):
        y = x.to(torch.float64)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


NORMS = {
    "no": nn.Identity,
    "rms": lambda: nn.RMSNorm(SIZE, eps=1e-5),
    "by hand": lambda: LikeLlama(SIZE),
    "layer": lambda: nn.LayerNorm(SIZE),
    "without scale": lambda: nn.LayerNorm(SIZE, elementwise_affine=False),
}
ACTIVATIONS = {
    "silu": F.silu,
    "by hand": lambda x: x / (1 + torch.exp(-x)),
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "new gelu": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "relu": F.relu,
}


class Block(nn.Module):
    """A norm, a product or a pair of them, an activation, another product and a sum."""

    def __init__(self, norm="rms", activation="silu", kind="merged", *, bias=False):
        super().__init__()
        self.norm, self.activation, self.kind = NORMS[norm](), ACTIVATIONS[activation], kind
        for name, weight in self.norm.named_parameters():
            nn.init.normal_(weight, name == "weight")
        self.up = nn.Linear(SIZE, INNER * (2 if kind == "merged" else 1), bias=bias)
        self.gate = nn.Linear(SIZE, INNER, bias=bias)
        self.down = nn.Linear(INNER, SIZE, bias=bias)

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "merged":
            gate, up = self.up(y).chunk(2, -1)
            y = self.activation(gate) * up
        elif self.kind == "pair":
            y = self.activation(self.gate(y)) * self.up(y)
        else:
            y = self.activation(self.up(y))
        return x + self.down(y)


def graph_of(model, *inputs):
    """The graph of a model in double precision, whose parameters are inputs after the others."""
    model = model.double()
    names, given = [name for name, _ in model.named_parameters()], [each.detach() for each in model.parameters()]

    def run(*args):
        parameters = dict(zip(names, args[len(inputs) :], strict=True))
        return torch.func.functional_call(model, parameters, args[: len(inputs)])

    with torch.no_grad():
        gm = make_fx(run, select_decomp_table(), "fake")(*inputs, *given)
        return make_fx(torch.func.functionalize(gm), {}, "fake")(*inputs, *given), [*inputs, *given]


def rewritten(model, *inputs):
    """How often our kernels are in the graph of a model, which computes the same."""
    torch.manual_seed(0)
    gm, given = graph_of(model, *inputs)
    wanted = gm(*given)
    rewrite_products(gm, find_products(gm.graph))
    torch.testing.assert_close(gm(*given), wanted, rtol=1e-9, atol=1e-9)
    return [node for node in gm.graph.nodes if node.target is MULTIPLY], gm


def left(gm):
    """What else a graph computes."""
    plain = {MULTIPLY, *product_patterns._VIEWS, aten.permute.default, aten.slice.Tensor}
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target not in plain]


@pytest.mark.parametrize("kind", ["merged", "pair", "plain"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_block_is_two_kernels(norm, kind):
    numbers = itertools.cycle((1, 3) if kind == "pair" else (3, 1))
    for activation, rows in zip(ACTIVATIONS, numbers, strict=False):
        ours, gm = rewritten(Block(norm, activation, kind), torch.randn(1, rows, SIZE, dtype=torch.double))
        assert len(ours) == 2
        assert not left(gm), activation


def test_biases_belong_to_products():
    ours, gm = rewritten(Block("layer", "gelu", "plain", bias=True), torch.randn(2, SIZE, dtype=torch.double))
    assert len(ours) == 2
    assert not left(gm)
    ours, _ = rewritten(Block("layer", "silu", "pair", bias=True), torch.randn(2, SIZE, dtype=torch.double))
    assert len(ours) == 3  # a gate has no bias


def test_layers_one_after_another():
    blocks = (Block(kind=kind) for kind in ("merged", "pair", "plain"))
    ours, gm = rewritten(nn.Sequential(*blocks), torch.randn(1, SIZE, dtype=torch.double))
    assert len(ours) == 6
    assert not left(gm)
    assert all(node.args[10] is True for node in ours)  # nothing writes the weights


class ReadTwice(nn.Module):
    """What follows a product is read by something else, too."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.norm = function, nn.Linear(SIZE, SIZE, bias=False), nn.RMSNorm(SIZE)

    def forward(self, x):
        return self.function(x, self.first, self.norm)


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (lambda x, f, norm: (f(norm(x)), norm(x).sum()), 1),  # the norm is there anyway
        (lambda x, f, norm: (F.silu(f(x)), f(x).sum()), 2),
        (lambda x, f, norm: F.silu(f(x)) * f(x).exp(), 2),
        (lambda x, f, norm: f(x) + f(x).cos(), 2),  # the sum needs the product
        (lambda x, f, norm: (y := f(x)) + y.cos(), 1),
        (lambda x, f, norm: F.silu(f(x)) * F.silu(f(x)), 2),
        (lambda x, f, norm: f(x).clamp(max=1), 1),
        (lambda x, f, norm: torch.add(f(x), x, alpha=2), 1),
        (lambda x, f, norm: f(x) + x[:1], 1),  # not of its shape
        (lambda x, f, norm: f(x).mul_(2).add_(x), 1),
        (lambda x, f, norm: norm(f(norm(f(x)))), 2),
    ],
)
def test_what_is_read_elsewhere_stays(function, kernels):
    ours, _ = rewritten(ReadTwice(function), torch.randn(2, SIZE, dtype=torch.double))
    assert len(ours) == kernels


@pytest.mark.parametrize(("rows", "size"), [(9, SIZE), (1, 24), (1, 30_000)])
def test_other_sizes_stay(rows, size):
    ours, _ = rewritten(nn.Linear(size, 8, bias=False), torch.randn(rows, size, dtype=torch.double))
    assert not ours


def test_weights_that_are_written_are_not_loaded_early():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.other = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)

        def forward(self, x):
            y = self.other(self.linear(x))
            self.linear.weight.copy_(self.linear.weight * 2)
            return y

    gm, _ = graph_of(Writing(), torch.randn(1, SIZE, dtype=torch.double))
    rewrite_products(gm, find_products(gm.graph))
    assert [node.args[10] for node in gm.graph.nodes if node.target is MULTIPLY] == [False, True]


def test_loads_are_early_in_captures_of_whole_graphs_alone():
    weight, slot = torch.ones(2), torch.ones(4)
    assert not may_load_early(weight)
    with early_loads([slot]):
        assert may_load_early(weight)
        assert not may_load_early(slot[2:])
        with without({"early-loads"}):
            assert not may_load_early(weight)
    assert not may_load_early(weight)


# --- attention -------------------------------------------------------------------------------------------------------

OPERATORS = [
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
]


def attend(operator, heads=4, of_keys=4, queries=8, keys=512, size=64, dtype=torch.bfloat16, **options):
    """The graph of attention on a GPU that need not be there."""
    with FakeTensorMode():
        query = torch.empty(1, queries, heads, size, device="cuda", dtype=dtype).transpose(1, 2)
        key = torch.empty(1, of_keys, keys, size, device="cuda", dtype=dtype)
        mask = torch.empty(1, 1, 1, keys, device="cuda", dtype=dtype)
        added = () if "flash" in str(operator) else (mask, False)
        return make_fx(lambda *given: operator(*given, **options)[0] * 2)(query, key, key, *added)


@pytest.mark.parametrize("operator", OPERATORS)
def test_attention_of_each_library_is_taken(operator):
    gm = attend(operator)
    rewrite_attention(gm, find_attention(gm.graph))
    found = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert found == [ATTEND, JOIN, aten.mul.Tensor]


def test_keys_need_not_be_repeated():
    def attend(query, key, value, mask):
        key, value = (x.unsqueeze(2).expand(1, 2, 4, 512, 64).reshape(1, 8, 512, 64) for x in (key, value))
        return OPERATORS[1](query, key, value, mask, False)[0]

    with FakeTensorMode():
        sizes = (1, 8, 1, 64), (1, 2, 512, 64), (1, 2, 512, 64), (1, 8, 1, 512)
        gm = make_fx(attend)(*(torch.empty(size, device="cuda", dtype=torch.half) for size in sizes))
    rewrite_attention(gm, find_attention(gm.graph))
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [ATTEND, JOIN]


@pytest.mark.parametrize(
    "other",
    [{"queries": 17}, {"heads": 8, "queries": 9}, {"keys": 100}, {"size": 48}, {"is_causal": True}, {"dropout_p": 0.1}],
)
def test_other_attention_stays(other):
    heads = {"of_keys": 4 if "heads" in other else 8, "heads": 8, "queries": 1}
    assert not find_attention(attend(OPERATORS[2], **{**heads, **other}).graph)


@pytest.mark.parametrize(("heads", "queries", "keys"), [(4, 1, 130), (8, 2, 700), (4, 3, 4096)])
def test_parts_come_to_the_whole(heads, queries, keys):
    torch.manual_seed(0)
    query, key = torch.randn(2, heads, queries, 16), torch.randn(2, 4, keys, 16)
    mask = torch.randn(1, 1, queries, keys).masked_fill(torch.rand(keys) < 0.3, -math.inf)
    mask[..., : keys // 2] = -math.inf
    parts = ATTEND(query, key, key.flip(3), mask, 0.25)
    found = JOIN(parts, 4, [*query.shape], [*query.stride()], torch.float)
    wanted = F.scaled_dot_product_attention(query, key, key.flip(3), mask, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(found, wanted)


# --- in a program ----------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.block, self.norm = nn.Linear(SIZE, 3 * SIZE, bias=False), Block(), nn.RMSNorm(SIZE)
        self.register_buffer("cache", torch.randn(1, 2, 200, SIZE // 2))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, 3, 2, 1, SIZE // 2).unbind(1)
        y = F.scaled_dot_product_attention(q, self.cache * k, self.cache + v)
        return self.block(x + y.view(x.shape))


@pytest.fixture
def stand_ins(monkeypatch):
    """Names of our kernels as a program calls them on a computer that has no GPU."""
    called = []

    def multiply_rows(*arguments, out):
        called.append("multiply_rows")
        out.copy_(MULTIPLY(*arguments, out.dtype))

    def attend_parts(*arguments, out):
        called.append("attend_parts")
        out.copy_(ATTEND(*arguments))

    def join_parts(parts, heads, *, out):
        called.append("join_parts")
        out.copy_(JOIN(parts, heads, [*out.shape], [*out.stride()], out.dtype))

    monkeypatch.setattr(nodes, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(nodes, "_has_triton", lambda: True)
    monkeypatch.setattr(launches, "_asynchronous_mode", lambda: None)
    own = {aten._scaled_dot_product_flash_attention_for_cpu.default}
    monkeypatch.setattr(attention_patterns, "OPERATORS", attention_patterns.OPERATORS | own)
    for function in (multiply_rows, attend_parts, join_parts):
        for module in (row_products, attention, row_launches):
            if hasattr(module, function.__name__):
                monkeypatch.setattr(module, function.__name__, function)
    return called


def choose(monkeypatch, *alternatives):
    """Have programs lowered with some alternatives from the start."""
    from millstream.lower import lower_graph

    def rewrite(_, gm):
        offers = table.find_offers(gm.graph, is_step=False, is_all=True)
        chosen = (offer[:2] for offer in offers if offer.alternative in alternatives)
        table.rewrite_for(frozenset(chosen), gm)

    monkeypatch.setattr(lower_graph, "rewrite_for", rewrite)


@pytest.mark.parametrize("off", ["", "rows", "own-kernels"])
@torch.no_grad()
def test_programs_call_our_kernels(monkeypatch, stand_ins, off):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Decoder().bfloat16().eval(), torch.randn(1, SIZE).bfloat16()
    choose(monkeypatch, "row-products", "split-attention")
    with without({off, "conv2d"} - {""}):
        compiled = ms.compile(model, engine="serial", strict=True)
        assert_close(compiled(x).float(), model(x).float(), 0.02)
    kernels = ["multiply_rows", "attend_parts", "join_parts", "multiply_rows", "multiply_rows"]
    assert stand_ins == ([] if off else kernels)


def test_offers_are_for_gpus():
    with FakeTensorMode(), pretended_gpu():
        given = (torch.empty(number, 64, dtype=torch.bfloat16) for number in (1, 64))
        gm = make_fx(lambda x, w: x @ w.t())(*given)
    offers = table.find_offers(gm.graph, is_step=False, is_all=False)
    assert [each.alternative for each in offers] == ["few-rows"]
