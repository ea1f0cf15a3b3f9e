"""Where alternatives can be had, and that only the products of a choice are lowered under options of their own."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from millstream.kernels import registry
from millstream.lower.alternatives import products, table
from millstream.lower.alternatives.alternative import WHOLE, Alternative, name_product
from tests.lower.inductor.texts import pretended_gpu

aten = torch.ops.aten


def layer(x, q, k, v, out):
    q, k, v = (x @ weight.t() for weight in (q, k, v))
    return (q * k + v.flip(0)) @ out.t()


def graph_of(rows, device="cpu"):
    """The graph of a layer on a device that need not be there."""
    with FakeTensorMode(), pretended_gpu():
        return make_fx(layer, select_decomp_table())(
            *(torch.empty(size, 64, device=device) for size in (rows, *[64] * 4))
        )


def offered(graph, **how):
    return {(each.alternative, each.sites) for each in table.find_offers(graph.graph, **how)}


def test_offers_are_of_what_a_graph_has():
    inference = {"is_step": False, "is_all": True}
    assert offered(graph_of(4), **inference) == {("few-rows", 4)}
    assert offered(graph_of(600), **inference) == {("siblings", 1)}  # with fewer rows a copy costs more
    assert offered(graph_of(64), **inference) == set()
    whole = {("combo-kernels", 1), ("coordinate-descent", 1)}
    step = {"is_step": True, "is_all": True}
    assert offered(graph_of(4, "cuda"), **step) == {*whole, ("few-rows", 4), ("tuned-rows", 4)}
    assert offered(graph_of(64, "cuda"), **step) == {*whole, ("triton-products", 4)}
    assert offered(graph_of(4, "cuda"), is_step=True, is_all=False) == {("few-rows", 4)}


def test_merged_siblings_compute_the_same():
    tensors = [torch.randn(size, 64) for size in (600, *[64] * 4)]
    gm = make_fx(layer, select_decomp_table(), "fake")(*tensors)
    (offer,) = table.find_offers(gm.graph, is_step=True, is_all=True)
    assert offer.group == "product 600 x 64 x (64 + 64 + 64) float32"
    table.rewrite_for(frozenset({(offer.alternative, offer.group)}), gm)
    assert sum(node.target is aten.mm.default for node in gm.graph.nodes) == 2
    torch.testing.assert_close(gm(*tensors), layer(*tensors))


class Sized:
    def __init__(self, *size):
        self._size = size

    def get_size(self):
        return self._size

    def get_dtype(self):
        return torch.float32


def test_only_products_of_a_group_have_its_options(monkeypatch):
    seen = []
    monkeypatch.setitem(lowerings, aten.mm.default, lambda *args: seen.append(config.max_autotune_gemm_backends))
    usual, lower = config.max_autotune_gemm_backends, lowerings[aten.mm.default]
    group = name_product((32, 64), (64, 16), torch.float32)
    with products.with_options({group: {"max_autotune_gemm_backends": "TRITON"}}):
        for rows in (32, 33):
            lowerings[aten.mm.default](Sized(rows, 64), Sized(64, 16))
    assert seen == ["TRITON", usual]
    assert lowerings[aten.mm.default] is lower


@pytest.mark.parametrize("alternative", table.ALTERNATIVES, ids=lambda each: each.name)
def test_options_are_inductors(alternative: Alternative):
    with config.patch({**alternative.options, **alternative.of_products}), table.options_of(frozenset()) as options:
        assert options == {}
    with table.options_of(frozenset({(alternative.name, "product 1 x 1 x 1 float32")})) as options:
        assert options == alternative.options


def test_libraries_leave_what_alternatives_chose_to_our_kernels():
    with table.options_of(frozenset({("library-kernels", WHOLE)})):
        assert [each.name for each in registry.families()] == [registry.ROWS]
