"""Workarounds for faults of PyTorch's: listed, switchable, and still needed.

What each of them mends is tested where it belongs (``test_patterns``, ``test_tiles``, ...). Here the same programs run
without: where one is right all the same, its xfail is strict and says that the workaround can go.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch._inductor.codecache import PersistentCache

import millstream as ms
from millstream._torch import workarounds
from millstream._torch.compiler.lookups import compile_for
from millstream.lower import compile as compiling
from millstream.lower.workarounds import WORKAROUNDS, decompose, lowering, options, tracing, without
from tests.api import test_control
from tests.capture.trace import test_recurrence
from tests.lower.inductor import test_equal_randoms
from tests.lower.workarounds import test_copies, test_kept_reads, test_ordering, test_patterns, test_pooling, test_tiles


def shuffle():
    x = torch.randn(4, 2)
    result = ms.compile(lambda x: x[torch.randperm(4)], strict=True)(x)
    assert torch.equal(result.sort(0).values, x.sort(0).values)


def reduce_in_tiles():
    test_tiles.test_results_are_right(test_tiles.reduce, (1, 8, 66, 66), 1)


def fold_in_tiles():
    test_tiles.test_results_are_right(test_tiles.fold, (1, 6, 196, 9, 32), 2)


def train_complex_parameters():
    runs = []
    for wrap in (lambda step: step, partial(ms.step, strict=True)):
        torch.manual_seed(0)
        model = [torch.nn.Parameter(torch.randn(3, 3, dtype=torch.complex64)) for _ in range(2)]
        optimizer = torch.optim.SGD(model, 0.1, momentum=0.9, weight_decay=0.1)

        def step(x, model=model, optimizer=optimizer):
            loss = (x @ model[0] @ model[1]).abs().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call, x = wrap(step), torch.randn(2, 3, dtype=torch.complex64)
        runs.append([*(call(x) for _ in range(4)), *(each.detach() for each in model)])
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs)


def train_parameters_by_each_other():
    runs = []
    for wrap in (lambda step: step, partial(ms.step, strict=True)):
        torch.manual_seed(0)
        model = [*(nn.Parameter(torch.randn(3, 4)) for _ in range(2)), nn.Parameter(torch.randn(40, 40))]
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD([*model, *layers.parameters()], 0.1, momentum=0.9, weight_decay=0.1)

        def step(row, model=model, layers=layers, optimizer=optimizer):
            a, b, square = model
            loss = (a * b).sum() + (square - square.T).square().sum() + layers(row).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = wrap(step)
        runs.append([call(torch.ones(1, 4)) for _ in range(3)])
        runs[-1] += [each.detach() for each in [*model, *layers.parameters()]]
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs)


def write_lists_in_turn():
    def write(a, b, c):
        parts = a * 2
        torch._foreach_sub_([a, b], [b, a])
        torch._foreach_copy_([b, c], [c, b])
        torch._foreach_addcmul_([c, a], [b, c], [b, b], value=2)
        torch._foreach_mul_([c, c.view(2, 4)], 2.0)
        torch._foreach_add_([a[:4], a[4:]], [a[4:], a[:4]], alpha=3)
        torch._foreach_add_([parts[:4], parts[4:]], [b[:4], c[4:]])  # which do not meet
        return parts

    def run(call, num_calls=1):
        states = [torch.arange(8.0) + i for i in range(3)]
        return [[each.clone() for each in (call(*states), *states)] for _ in range(num_calls)]

    assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_equal(run(ms.compile(write, strict=True)), run(write))
    assert_equal(run(ms.step(write, strict=True), 2), run(write, 2))


def unpool_channels_last():
    x = torch.randn(1, 2, 4, 6).contiguous(memory_format=torch.channels_last)
    pooled, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    expected = torch.nn.functional.max_unpool2d(pooled, indices, 2)
    result = ms.compile(lambda x, i: torch.nn.functional.max_unpool2d(x, i, 2), strict=True)(pooled, indices)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()


def sum_what_was_pooled():
    def total(x):
        return torch.nn.functional.adaptive_avg_pool2d(x, 7).flatten(1).sum(-1)

    padding = {"disable_padding_cpu": False}  # as on a GPU
    x = torch.randn(3, 33, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(ms.compile(total, strict=True, options=padding)(x), total(x))
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 38 * 38, 10)
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, 3, 40, 40)
    ours, theirs = (
        torch.autograd.grad(call(x).square().mean(), [*model.parameters()])
        for call in (ms.compile(model, strict=True, options=padding), model)
    )
    torch.testing.assert_close(ours, theirs)


def view_a_part():
    x = torch.arange(20.0)[5:15]
    result = ms.compile(lambda x: x.as_strided((3, 2), (3, 1), 6) + 1, strict=True)(x)
    assert torch.equal(result, x.as_strided((3, 2), (3, 1), 6) + 1)


def read_by_strides():
    def read(dense, part, turned):
        dense.add_(1)
        part[0] = 5
        slices, table = (dense * 2)[1:], torch.stack([dense, part]).t() * 2
        return (
            torch.as_strided_copy(dense, (2,), (2,), 1),
            torch.as_strided_copy(part, (2,), (2,)),
            torch.as_strided_copy(turned, (2, 3), (3, 1)),
            torch.as_strided_copy(slices, (2,), (2,)),
            torch.as_strided(slices, (3,), (1,), 0) + 1,
            torch.as_strided_copy(table, (2, 5), (5, 1)),
        )

    def refused(strided):
        strided.add_(1)
        return torch.as_strided_copy(strided, (3,), (2,)), strided.as_strided((2,), (4,)) * 2

    def inputs():
        return torch.arange(5.0), torch.arange(7.0)[2:], torch.arange(6.0).view(3, 2).t()

    torch.testing.assert_close(ms.compile(read, strict=True)(*inputs()), read(*inputs()))
    step = ms.step(read, strict=True)
    torch.testing.assert_close([step(*inputs()) for _ in range(2)], [read(*inputs())] * 2)
    with pytest.warns(ms.FallbackWarning, match="lie densely"):
        found = ms.compile(refused)(torch.arange(10.0)[::2])
    torch.testing.assert_close(found, refused(torch.arange(10.0)[::2]))


def write_into_what_shares_memory():
    index, weights = torch.tensor([0, 2]), torch.tensor([1.0, -1.0])

    def pick(row):
        return (row.index_select(0, index) * weights).sum()

    def write(x):
        row = x[0] + 1
        rows, windows = row.expand(4, 4), x.flatten().square().unfold(0, 4, 2)[:4]
        return (
            torch.func.vmap(torch.func.grad(pick))(x),
            torch.func.vmap(lambda row: torch.zeros(4).index_put((index,), row[:2]))(x),
            rows.index_add(1, index, x[:, :2]),
            rows.index_copy(0, index, x[:2]),
            windows.index_put((index,), x[:2], accumulate=True),
        )

    x = torch.randn(4, 4)
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.testing.assert_close(ms.compile(write, strict=True, dynamic=dynamic)(x), write(x))
    step = ms.step(write, strict=True)
    torch.testing.assert_close([step(x) for _ in range(2)], [write(x)] * 2)


def scatter_into_expanded():
    def scatter(x):
        rows = (x[0] + 1).expand(4, 4)
        return rows.slice_scatter(x[:2], 0, 1, 3), rows.select_scatter(x[1], 0, 2), rows.diagonal_scatter(x[1])

    x = torch.randn(4, 4)
    torch.testing.assert_close(ms.compile(scatter, strict=True)(x), scatter(x))


@torch.library.custom_op("millstream_tests::reverse_into", mutates_args=("into",))
def reverse_into(rows: list[torch.Tensor], into: torch.Tensor) -> None:
    for row in rows:
        for i in range(len(row)):
            into[-1 - i] = row[i]


def give_operators_copies():
    def reverse_parts(x, y, twice):
        part, z = y * 2, y + 1
        reverse_into([z.clone(), z[:2]], z)  # the second one is to see what it writes
        reverse_into([x.clone()], x)
        reverse_into([x[:6].clone()], x[:6])
        reverse_into([x[2:6].clone(), x[:4] + 0], x[4:])
        reverse_into([part.clone().view(2, 4)[1]], part[1:])
        reverse_into([twice], twice)  # likewise
        return part, z, x.sum()

    def run(call, num_calls=1):
        states = [torch.arange(8.0) + i for i in range(3)]
        return [[each.clone() for each in (*call(*states), *states)] for _ in range(num_calls)]

    assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_equal(run(ms.compile(reverse_parts, strict=True)), run(reverse_parts))
    assert_equal(run(ms.step(reverse_parts, strict=True), 2), run(reverse_parts, 2))


def multiply_by_zero():
    def weighted(x):
        return x * 0, 0 * x, x * False, torch.mul(x, 0), x.int() * 0

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.tensor([float("inf"), float("nan"), 1.0], dtype=dtype)
        results = ms.compile(weighted, strict=True)(x)
        torch.testing.assert_close(results, weighted(x), rtol=0, atol=0, equal_nan=True)


def scatter_without_what_was_there():
    index = torch.tensor([[0, 1, 1, 4], [3, 1, 0, 2]])

    def scatter(x):
        values, row = x[:2, :4] + 1, x[0, 0] * 2
        results = [
            x.scatter_reduce(dim, index, values, reduce, include_self=include_self)
            for reduce, dim in (("sum", 0), ("prod", 1), ("mean", 0), ("amax", -1), ("amin", 0))
            for include_self in (False, True)
        ]
        x.scatter_reduce_(1, index, values, "amax", include_self=False)
        return *results, row.scatter_reduce(0, index[0, 0], values[1, 1], "amin", include_self=False)

    first = torch.randn(5, 5) * 3
    torch.testing.assert_close(ms.compile(scatter, strict=True)(x := first.clone()), scatter(y := first.clone()))
    torch.testing.assert_close(x, y)


def reorder_loops_of_several_updates():
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    outer, inner = (ForeachKernelSchedulerNode.__new__(ForeachKernelSchedulerNode) for _ in range(2))
    outer.snodes, inner.snodes = [inner], []
    with lowering():
        assert not outer.reorder_loops_by_dep_pair(None, None)


def read_beside_on_two_threads():
    torch.set_num_threads(2)
    x, index = torch.arange(20_000.0), torch.arange(20_000)
    picked = ms.compile(lambda x, index: torch.tanh(x[index] + 1), strict=True)
    assert torch.equal(picked(x, index), torch.tanh(x + 1))
    with pytest.raises(IndexError):
        picked(x, index + 1)


def call_from_threads():
    num_compiled = 0

    def backend(gm, inputs):
        nonlocal num_compiled
        num_compiled += 1
        return gm.forward

    layer = nn.Linear(8, 8)
    model = compile_for(layer, backend, fullgraph=True, dynamic=False)
    inputs = [torch.ones(size, 8) for size in (1, 2, 3)]
    expected = [layer(x).detach() for x in inputs]
    model(inputs[0])  # torch 2.11 can crash if the first calls come from several threads

    def serve(start):
        for i in range(start, start + 2000):
            assert torch.equal(model(inputs[i % 3]), expected[i % 3])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(serve, range(4)))
    assert num_compiled == len(inputs)


def tune_with_the_newer_precision():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with lowering():
            assert PersistentCache().lookup([], "mm", "inputs", lambda choices: {}) == {}
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def read_what_is_updated():
    with without(["pytorch#198094"]):  # which copies what is kept for the backward pass, too
        test_kept_reads.assert_gradients_are_right(test_kept_reads.RunningScale())


def normalize_batches_of_any_size():
    norm = nn.BatchNorm1d(2)
    step = ms.step(lambda x: norm(x), strict=True, dynamic=True, engine="serial")
    for rows in (3, 4):
        step(torch.ones(rows, 2))
    assert len(step.graphs) == 1


def multiply_by_a_part():
    torch.manual_seed(0)
    x, *weights = (torch.randn(4, 4, dtype=torch.float64) for _ in range(4))
    weights = [each.requires_grad_() for each in weights]

    def train(x):
        first, second, last = weights
        a = torch.tanh(x @ first.T)
        b = torch.tanh(x @ second.T + a.mm(a.T).mm(a))
        return torch.autograd.grad((torch.cat([a, b]) @ last).square().sum(), weights)

    torch.testing.assert_close(ms.step(train, strict=True)(x), train(x))


def drop_channels():
    step = ms.step(lambda x: nn.functional.dropout2d(x, 0.5), strict=True, options={"fallback_random": True})
    step(torch.ones(2, 3, 4, 1))


def transform_along_any_dimension():
    x, frequencies = torch.randn(5, 10, 7), torch.randn(5, 6, 7)

    def run(wrap):
        results = [
            wrap(partial(torch.fft.rfftn, dim=dim))(x).clone() for dim in ((1,), (0, 1), (1, 0), (0,), (-1,), (0, 1, 2))
        ]
        given = frequencies.clone().requires_grad_()
        result = wrap(partial(torch.fft.irfft, n=10, dim=1, norm="ortho"))(given)
        result.mul(x).sum().backward()
        return *results, result.detach(), given.grad

    def wrap(call):
        return ms.compile(lambda x: torch.view_as_real(y) if (y := call(x)).is_complex() else y, strict=True)

    for ours, theirs in zip(run(wrap), run(lambda call: call), strict=True):
        torch.testing.assert_close(ours, torch.view_as_real(theirs) if theirs.is_complex() else theirs)


SHOWN_BY = {
    "pytorch#118260": call_from_threads,
    "pytorch#133512": read_by_strides,
    "pytorch#167313": lambda: test_patterns.test_what_is_added_is_scaled("product first"),
    "pytorch#175860": scatter_without_what_was_there,
    "pytorch#176591": reorder_loops_of_several_updates,
    "pytorch#180848": sum_what_was_pooled,
    "pytorch#183988": shuffle,
    "pytorch#184232": view_a_part,
    "pytorch#185873": lambda: test_ordering.test_gradients_of_upsampling_are_right("compile"),
    "pytorch#187173": unpool_channels_last,
    "pytorch#187580": multiply_by_zero,
    "pytorch#188084": write_into_what_shares_memory,
    "pytorch#191837": fold_in_tiles,
    "pytorch#195402": read_beside_on_two_threads,
    "pytorch#195977": lambda: test_control.assert_as_eager(test_control.recurrence),
    "pytorch#196681": reduce_in_tiles,
    "pytorch#196728": tune_with_the_newer_precision,
    "pytorch#197039": read_what_is_updated,
    "pytorch#197094": train_complex_parameters,
    "pytorch#198031": give_operators_copies,
    "expanded-scatter": scatter_into_expanded,
    "fft-strides": transform_along_any_dimension,
    "pytorch#197829": lambda: test_copies.assert_right([test_copies.mix_in_place], "step"),
    "pytorch#198094": lambda: test_copies.assert_right([test_copies.return_edited, test_copies.store_edited], "step"),
    "pytorch#198101": lambda: test_copies.assert_right([test_copies.read_bits], "compile", [1]),
    "pytorch#198131": lambda: test_copies.assert_right([test_copies.remember, test_copies.swap], "step"),
    "pytorch#198270": lambda: test_copies.assert_right([test_copies.flip_what_was_put], "step"),
    "foreach-order": write_lists_in_turn,
    "float-of-size": normalize_batches_of_any_size,
    "foreach-parts": lambda: test_ordering.test_items_made_from_one_value_do_not_wait_for_each_other(False),
    "foreach-reads": train_parameters_by_each_other,
    "parts-of-buffers": multiply_by_a_part,
    "second-writes": lambda: test_copies.assert_right([test_copies.write_twice], "step"),
    "dropout-in-order": drop_channels,
    "checkpointed-randoms": lambda: test_equal_randoms.test_a_compiled_model_draws_what_eager_draws(
        test_equal_randoms.Checkpointed
    ),
    "rnn-dropout": lambda: test_recurrence.assert_as_eager(nn.LSTM(3, 4, 2, dropout=0.5)),
    "pytorch#198119": lambda: test_pooling.test_gradients_are_those_of_eager(*test_pooling.CASES[1].values),
}
ON_A_GPU = {"pytorch#189895", "pytorch#193061"}
SHOWN_ELSEWHERE = {"pytorch#160532", "pytorch#176752"}  # test_threads.py and test_generators.py
CORRUPTS_MEMORY = ("pytorch#191837", "pytorch#195402", "pytorch#196681", "pytorch#180848")
WRONG = (AssertionError, ms.CaptureError, subprocess.CalledProcessError)


def run_elsewhere(issue, *, without):
    code = f"from tests.lower.workarounds.test_workarounds import SHOWN_BY; SHOWN_BY[{issue!r}]()"
    environment = {**os.environ, "MILLSTREAM_WITHOUT": without, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


def by_issue(issue):
    return next(each for each in WORKAROUNDS if each.issue == issue)


def test_each_is_listed_once_and_shown_by_a_program():
    issues = [each.issue for each in WORKAROUNDS]
    assert len(set(issues)) == len(issues)
    assert {*issues} == {*SHOWN_BY} | ON_A_GPU | SHOWN_ELSEWHERE


@pytest.mark.parametrize("issue", SHOWN_BY)
@pytest.mark.xfail(
    strict=True, reason="PyTorch is wrong without the workaround; where it is not, the workaround can go"
)
def test_pytorch_does_without(issue, monkeypatch):
    if not by_issue(issue).applies:
        pytest.xfail("this PyTorch does without")
    monkeypatch.setattr(compiling, "other_tries", lambda error: ())  # which leave out what fails, too
    torch._dynamo.reset()
    torch.manual_seed(0)
    if issue in CORRUPTS_MEMORY:  # and the process may die of it
        run_elsewhere(issue, without=issue)
    else:
        with without([issue]):
            SHOWN_BY[issue]()


PROGRAMS = [
    call_from_threads,
    reorder_loops_of_several_updates,
    read_by_strides,
    scatter_without_what_was_there,
    shuffle,
    sum_what_was_pooled,
    view_a_part,
    multiply_by_zero,
    train_complex_parameters,
    train_parameters_by_each_other,
    tune_with_the_newer_precision,
    unpool_channels_last,
    write_lists_in_turn,
    write_into_what_shares_memory,
    scatter_into_expanded,
    give_operators_copies,
    multiply_by_a_part,
    transform_along_any_dimension,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*complex", "ignore:.*check.* is deprecated:FutureWarning")
def test_with_it_the_program_is_right(program):
    torch._dynamo.reset()
    program()


def test_a_process_is_right_with_them():
    run_elsewhere(CORRUPTS_MEMORY[0], without="")


def test_one_that_is_mended_is_left_out(monkeypatch):
    mended = [each for each in WORKAROUNDS if each.until]
    assert mended
    monkeypatch.setattr(torch, "__version__", "2.14.0a0+git1234")
    assert workarounds.torch_version() == (2, 14)
    assert not any(each.applies for each in mended)


def test_all_can_be_switched_off(monkeypatch):
    assert options()
    monkeypatch.setenv("MILLSTREAM_WITHOUT", ", ".join(each.issue for each in WORKAROUNDS))
    assert not any(each.applies for each in WORKAROUNDS)
    assert not options()
    assert decompose({}) == {}


@pytest.mark.parametrize("patch", [lowering, tracing])
def test_what_was_patched_is_put_back(patch):
    from torch._inductor import pattern_matcher
    from torch._inductor.codegen.cpp import CppKernelProxy, CppTile2DKernel
    from torch._inductor.scheduler import SchedulerNode

    def patched():
        return (
            pattern_matcher.is_match,
            CppTile2DKernel.store,
            CppKernelProxy.aggregate_reduction_buffers,
            SchedulerNode.recompute_size_and_body,
        )

    before = patched()
    with patch():
        assert patched() != before
    assert patched() == before


@pytest.mark.parametrize("kind", [staticmethod, classmethod, lambda function: function])
def test_a_replaced_function_is_back_as_the_kind_it_was(kind):
    class Owner:
        find = kind(lambda *_: "old")

    before = vars(Owner)["find"]
    with workarounds.replaced(Owner, "find", kind(lambda *_: "new")):
        assert Owner().find() == "new"
    assert vars(Owner)["find"] is before
