"""What is changed about Inductor's generation of C++: work for nothing is left out."""

from __future__ import annotations

import collections
import gc
import itertools
import logging
import os
import tempfile

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch._inductor import fx_utils, ir
from torch._inductor import lowering as inductor_lowering
from torch._inductor.codegen import cpp
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.exc import OperatorIssue
from torch._inductor.graph import output_code_log
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils._pytree import tree_iter
from torch.utils._sympy.functions import FloorDiv, Max, Min, ModularIndexing

import millstream as ms
from millstream.lower import lower_graph as lowering
from millstream.lower.inductor.cpp_kernels import CppKernels
from millstream.lower.inductor.generated_kernels import is_updated
from millstream.lower.inductor.shortcuts import no_collections, shortcuts
from millstream.lower.inductor.shortcuts.leaves import leaves


@pytest.fixture
def sources(monkeypatch):
    """Sources of the kernels that are generated."""
    texts: list[str] = []
    add = CppKernels.add

    def note(self, name, definition):
        texts.append(definition)
        add(self, name, definition)

    monkeypatch.setattr(CppKernels, "add", note)
    return texts


def pointwise(x):
    return torch.relu(x * 2) + 1


X, Y, SIZE = sympy.symbols("x y s", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    "index",
    [
        *(sympy.Integer(3), X, 4 * X + 3 * Y + 1, -X, X + SIZE * Y, SIZE * X + Y, X * Y, X * X, 2 * (X + Y) + X),
        *(FloorDiv(X, 16) + X, FloorDiv(X, 3), FloorDiv(Y, 3) + 5 * X, ModularIndexing(X, 1, 16), X - X),
        *(ModularIndexing(Y, 2, 5) + ModularIndexing(X, 16, 8), FloorDiv(X + Y, 16), sympy.Ge(SIZE, 1024)),
        *(Min(5, FloorDiv(X, 2)) + 6 * Max(0, Y - 1), SIZE * Min(SIZE, X) - X, Max(0, X - 64) + Y, Min(X, X + 3)),
        *(FloorDiv(X, SIZE - 1), X + FloorDiv(FloorDiv(X, 2), SIZE - 1), ModularIndexing(X, 1, SIZE - 1)),
    ],
    ids=str,
)
def test_strides_are_those_that_inductor_finds(index):
    find = cpp.stride_at_vec_range
    with shortcuts():
        assert cpp.stride_at_vec_range is not find
        for variable, length in itertools.product((X, Y), (None, 8, 16)):
            found, expected = (each(index, variable, length) for each in (cpp.stride_at_vec_range, find))
            # Of one that changes with the variable it is never asked how.
            assert found == expected or (found.has(variable) and expected.has(variable))


def test_relations_are_those_that_sympy_finds():
    def relations():
        sides = (2, sympy.Integer(2), sympy.Integer(0), True, 2.0, sympy.Rational(1, 2), sympy.oo, X, SIZE + 3)
        kinds = (sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)
        for kind, left, right in itertools.product(kinds, sides, sides):
            if left is not True is not right or kind in kinds[:2]:
                yield kind(left, right)
        yield sympy.Eq(2, 3, evaluate=False)
        with sympy.evaluate(False):
            yield sympy.Eq(2, 3)

    expected = [*relations()]
    with shortcuts():
        assert all(type(a) is type(b) and a == b for a, b in zip(relations(), expected, strict=True))


def test_leaves_are_those_of_pytree():
    pair = collections.namedtuple("pair", "first second")
    node = torch.fx.Graph().placeholder("x")
    items = [1, 2.0, None, "a", node, slice(0, 3), torch.Size([4]), pair(5, [6]), collections.OrderedDict(b=7, a=8), ()]
    for tree in (1, None, items, (items, {"b": items, "a": [[], {}]}), immutable_list(items), immutable_dict(c=node)):
        assert [*leaves(tree)] == [*tree_iter(tree)]


def reductions(x):
    return F.softmax(x, -1), x.mean(), (x.transpose(0, 1) * 2).contiguous(), x.var(0), torch.cat([x.T, x.T.roll(1, 0)])


def windows(x):
    larger = F.interpolate(x[None, None], scale_factor=1.5, mode="bilinear")
    return F.avg_pool2d(x[None], 3, 2, 1, ceil_mode=True), larger


def updates(x):
    """Inductor replaces the products, which operators over lists use."""
    products = [torch.addmm(row, x, x.T.contiguous()) for row in x @ x.T]
    return torch._foreach_add(torch._foreach_mul(products, 2.0), products)


@pytest.mark.parametrize(
    ("function", "shape"),
    [(updates, (5, 11)), *itertools.product([pointwise, reductions], [(32, 64), (19, 21), (3, 5)]), (windows, (9, 11))],
)
def test_shortcuts_change_no_letter(function, shape, sources, monkeypatch):
    texts = []
    for without in ("", "shortcuts"):
        torch._dynamo.reset()
        sources.clear()
        monkeypatch.setenv("MILLSTREAM_WITHOUT", without)
        ms.compile(function, strict=True)(torch.randn(shape))
        texts.append(list(sources))
    assert texts[0] == texts[1] != []


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_tensors_are_supported_as_inductor_has_it():
    tensors = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64)]
    tensors += [torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()]
    expected = [*map(inductor_lowering.unsupported_input_tensor, tensors)]
    assert expected == [False, False, False, True, True, True]
    with shortcuts():
        assert [*map(inductor_lowering.unsupported_input_tensor, tensors * 2)] == expected * 2


def any_user_may_alias(node):
    """Asks as Inductor's function of that name."""
    return fx_utils.get_fake_args_kwargs(node)[0]


def test_only_users_that_return_one_tensor_are_run_to_see_whether_it_is_the_same_memory():
    def update(x):
        return torch._foreach_add([x.neg(), x.exp()], 1.0)

    graph = make_fx(update, tracing_mode="fake")(torch.ones(4)).graph
    users = {node.target: node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    several = torch.ops.aten._foreach_add.Scalar
    assert len(users) == 3
    assert all(map(any_user_may_alias, users.values()))
    with shortcuts():
        assert {target for target, node in users.items() if not any_user_may_alias(node)} == {several}
        assert all(fx_utils.get_fake_args_kwargs(node)[0] for node in users.values())  # to bring them up to date


@torch.library.custom_op("millstream_test::last", mutates_args=())
def last(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[-1].clone()


@last.register_fake
def _(tensors):
    return torch.empty_like(tensors[-1])


def test_nobody_writes_down_what_an_operator_is_given(monkeypatch):
    """An operator that Inductor has no rule for is called as it is; a log would have the text of all that led to it."""
    told = []
    monkeypatch.setattr(ir.IRNode, "str_helper", lambda self, lines, *_, **__: told.append(type(self)) or "")

    def function(x):
        y = pointwise(x)
        return last([y, y * 2])

    x = torch.randn(4)
    assert torch.equal(ms.compile(function)(x), function(x))
    assert not told


def test_switched_off_nothing_is_left_out(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "pytorch#1, shortcuts")
    threshold, generate, find = gc.get_threshold(), SchedulerNode.codegen, cpp.stride_at_vec_range
    find_fakes, is_unsupported = fx_utils.get_fake_args_kwargs, inductor_lowering.unsupported_input_tensor
    tell = OperatorIssue.operator_str
    compare, increases = sympy.Eq.__new__, Scheduler.can_fusion_increase_peak_memory
    with shortcuts(), no_collections():
        assert fx_utils.get_fake_args_kwargs is find_fakes
        assert inductor_lowering.unsupported_input_tensor is is_unsupported
        assert gc.get_threshold() == threshold
        assert SchedulerNode.codegen is generate
        assert cpp.stride_at_vec_range is find
        assert sympy.Eq.__new__ is compare
        assert OperatorIssue.operator_str is tell
        assert Scheduler.can_fusion_increase_peak_memory is increases


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_python_looks_for_garbage_again_after_the_lowering_and_in_a_forked_child(monkeypatch):
    codes, lower, before = [], lowering.compile_fx_inner, gc.get_threshold()

    def is_collecting():
        return gc.isenabled() and gc.get_threshold() == before

    def look(*args, **kwargs):
        assert not is_collecting()
        child = os.fork()  # as another thread may
        if child == 0:
            os._exit(0 if is_collecting() else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        gc.disable()  # as it may, too
        return lower(*args, **kwargs)

    monkeypatch.setattr(lowering, "compile_fx_inner", look)
    torch._dynamo.reset()
    compiled, x = ms.compile(pointwise, strict=True), torch.randn(7)
    try:
        result = compiled(x)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert codes == [0]
    assert is_collecting()
    assert torch.equal(result, pointwise(x))


def test_shortcuts_end_with_the_lowering():
    before = DtypePropagationOpsHandler.__init__, SchedulerNode.codegen, cpp.stride_at_vec_range
    torch._dynamo.reset()
    ms.compile(pointwise, strict=True)(torch.randn(7))
    assert before == (DtypePropagationOpsHandler.__init__, SchedulerNode.codegen, cpp.stride_at_vec_range)


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    """The Python files in the temporary folder, which is another one than Inductor's cache is in."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache_dir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: [*tmp_path.glob("*.py")]


def test_compiling_leaves_no_temporary_files(temporary_files):
    ms.compile(lambda x: x.sin() + 3, strict=True)(torch.ones(3))
    assert not temporary_files()


def test_output_code_is_a_file_where_it_was_asked_for(temporary_files, caplog):
    with caplog.at_level(logging.INFO, logger=output_code_log.name):
        ms.compile(lambda x: x.cos() + 3, strict=True)(torch.ones(3))
    (file,) = temporary_files()
    assert str(file) in caplog.text
    assert "def forward" in file.read_text()


@pytest.mark.parametrize("level", [1, 2])
def test_comments_about_where_kernels_come_from_are_no_failure(level):
    """``TORCH_COMPILE_DEBUG=1`` asks Inductor for them."""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"trace.provenance_tracking_level": level}):
        assert ms.compile(lambda x: x.tan() + 5, strict=True)(torch.zeros(3)).tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("name", "body", "updated"),
    [
        ("out_ptr0", "tl.store(out_ptr0 + (x0), tmp1, xmask)", False),
        ("out_ptr0", "tl.atomic_add(out_ptr0 + (tl.broadcast_to(x0, [XBLOCK])), tmp1, xmask, sem='relaxed')", True),
        ("out_ptr0", "tmp0 = tl.load(out_ptr0 + (x0), xmask)", True),
        ("out_ptr1", "tl.atomic_add(out_ptr10 + (x0), tmp1)\ntl.store(out_ptr1 + (x0), tmp1)", False),
        ("in_out_ptr0", "tl.store(in_out_ptr0 + (x0), tmp1)", True),
    ],
)
def test_an_input_that_a_triton_kernel_overwrites_is_no_input_of_it(name, body, updated):
    """Else kernels that write other parts of one bucket would wait for each other."""
    assert is_updated(name, body) == updated
