import pytest

from millstream.errors import GraphError
from millstream.graph import Buffer, Kernel, KernelGraph, KernelKind, Role


def graph_of(*buffers):
    return KernelGraph("g", (), buffers)


def test_views_of_views_end_at_the_owner_of_the_memory():
    t = Buffer("t", 8, "cpu", Role.TEMPORARY)
    v = Buffer("v", 8, "cpu", Role.TEMPORARY, alias_of="t")
    w = Buffer("w", 8, "cpu", Role.TEMPORARY, alias_of="v")
    graph = graph_of(w, v, t)  # a view may stand before its owner
    assert graph.storage_of == {"t": "t", "v": "t", "w": "t"}
    assert graph.storage("w") == "t"
    assert graph.buffer_of["v"] is v


def test_ten_thousand_views_in_one_chain():
    views = [Buffer(f"v{i}", 8, "cpu", Role.TEMPORARY, f"v{i - 1}" if i else None) for i in range(10_000)]
    assert set(graph_of(*reversed(views)).storage_of.values()) == {"v0"}


def test_a_view_of_itself_is_refused():
    a = Buffer("a", 8, "cpu", Role.TEMPORARY, alias_of="b")
    b = Buffer("b", 8, "cpu", Role.TEMPORARY, alias_of="a")
    with pytest.raises(GraphError, match="cycle, 'a' of 'b' of 'a'") as caught:
        graph_of(a, b).storage("a")
    assert caught.value.buffer in ("a", "b")


def test_a_view_of_nothing_is_refused():
    with pytest.raises(GraphError, match="'a' is a view of unknown buffer 'b'"):
        graph_of(Buffer("a", 8, "cpu", Role.TEMPORARY, alias_of="b")).storage("a")


def test_a_kernel_says_who_it_is():
    kernel = Kernel(3, "mm", KernelKind.GEMM, "cpu", (), (), source="model.py:7 in forward")
    assert kernel.label == "kernel 3 'mm' (model.py:7 in forward)"
    assert Kernel(3, "mm", KernelKind.GEMM, "cpu", (), ()).label == "kernel 3 'mm'"
