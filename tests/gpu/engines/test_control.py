"""Branches and loops on a GPU: in one CUDA graph the device decides, with eager PyTorch's values and gradients."""

import gc
import warnings
from functools import partial

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves

import millstream as ms
from millstream.api import executables
from tests.api import test_control as on_cpu
from tests.api.random_control import WRITES, Operators, Plain, Program
from tests.api.test_random_control import results_of

pytestmark = pytest.mark.gpu

SEEDS = [seed for seed in range(40) if not Program(seed, Plain, has_gradients=seed % 2 == 1).draws]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def tensors(*sizes, seed=0):
    return [each.cuda() for each in on_cpu.tensors(*sizes, seed=seed)]


def zero():
    return torch.zeros((), dtype=torch.int64, device="cuda")


def assert_one_graph(compiled):
    """It replays CUDA graphs only."""
    assert {each.name for each in executables(compiled)} == {"graph"}
    assert all(each.is_captured for each in executables(compiled))


def assert_close(ours, theirs, **tolerance):
    for one, other in zip(*map(tree_leaves, (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("engine", ["graph", "streams", "serial"])
def test_values_and_gradients_are_those_of_eager(engine):
    compiled = ms.compile(on_cpu.all_three, engine=engine, strict=True)
    for seed in range(6):  # either way
        given = tensors((4, 4), (4, 4), seed=seed)
        ours, theirs = (on_cpu.values_and_gradients(each, *given) for each in (compiled, on_cpu.all_three))
        assert_close(ours, theirs)
    if engine == "graph":
        assert_one_graph(compiled)


@torch.no_grad()
def test_loops_turn_as_often_as_their_values_say():
    def loop(x, w, end):
        def turn(number, a, b):
            return number + 1, torch.tanh(a @ w), b + a

        return while_loop(lambda number, a, b: number < end, turn, (zero(), x, x * 0))

    x, w = tensors((3, 3), (3, 3))
    compiled = ms.compile(loop, engine="graph", strict=True)
    for end in (1, 0, 1, 7, 0, 10_000):
        number, *results = compiled(x, w, torch.tensor(end, device="cuda"))
        assert number == end
        assert_close(results, on_cpu.in_python(x, w, end), rtol=1e-9, atol=1e-9)
    assert_one_graph(compiled)


@torch.no_grad()
def test_a_way_that_was_never_taken_is_captured_with_its_libraries():
    w = torch.randn(128, 128, device="cuda", dtype=torch.half)

    def function(x):
        return torch.cond(
            x.sum() > 0, lambda a: a * 2, lambda a: torch.addmm(a[0], (a @ w).softmax(1), w).cumsum(1), (x,)
        )

    compiled = ms.compile(function, strict=True)
    x = torch.rand(128, 128, device="cuda", dtype=torch.half)
    for _ in range(4):
        assert torch.equal(compiled(x), function(x))
    assert_one_graph(compiled)
    for sign in (-1, 1, -1):
        torch.testing.assert_close(compiled(sign * x), function(sign * x), rtol=2e-3, atol=2e-3)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # nothing of the graph's may be among what is free
        others = [torch.ones(1 << 20, device="cuda") for _ in range(8)]
        assert all(each.min() == 1 for each in others)


@torch.no_grad()
def test_several_at_a_time_do_not_share_what_bodies_need():
    def part(x, number):
        yes = lambda a: (a @ a).softmax(1).cumsum(0) + number  # noqa: E731
        return torch.cond(x.sum() > 0, yes, lambda a: (a.t() @ a).cumsum(1) * number, (x,))

    def function(*given):
        return [part(x, number) for number, x in enumerate(given, 1)]

    given = tensors(*[(96, 96)] * 4)
    wanted = function(*given)
    for streams in (1, 4):
        torch._dynamo.reset()
        compiled = ms.compile(function, streams=streams, engine="graph", strict=True)
        for _ in range(20):
            assert_close(compiled(*given), wanted)
        assert_one_graph(compiled)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_give_what_plain_python_gives(seed):
    wanted = results_of(seed, Plain, lambda function: function, "cuda")
    wrap = partial(ms.step if seed % 4 < 2 else ms.compile, engine="graph", strict=True)
    assert_close(results_of(seed, Operators, wrap, "cuda"), wanted, rtol=1e-9, atol=1e-9)


def test_steps_are_trained_as_in_eager():
    batches = [tensors((5, 2, 4), seed=seed)[0] for seed in range(8)]
    captured = []

    def wrap(step):
        captured.append(ms.step(step, engine="graph", strict=True))
        return captured[0]

    assert_close(on_cpu.train(wrap, batches), on_cpu.train(lambda step: step, batches), rtol=1e-9, atol=1e-9)
    assert_one_graph(captured[0])


@torch.no_grad()
def test_slices_need_not_be_aligned():
    def function(x):
        rows = x.relu().transpose(0, 1).contiguous()  # TorchInductor may lay out otherwise what it computes
        return scan(lambda carry, row: (carry * 0.5 + row, (row * 2).sin()), rows[0] * 0, rows)

    x = torch.randn(3, 7, 5, device="cuda")
    compiled = ms.compile(function, strict=True)
    for _ in range(3):
        assert_close(compiled(x), function(x))
    assert_one_graph(compiled)


@torch.no_grad()
def test_long_scans_are_one_graph():
    x, w = tensors((2_000, 16, 32), (32, 32))

    def recurrence(x, w):
        def turn(carry, row):
            new = torch.tanh(carry @ w * 0.1 + row)
            return new, new * 2

        return scan(turn, x[0] * 0, x)

    compiled = ms.compile(recurrence, strict=True)
    for _ in range(3):
        assert_close(compiled(x, w), recurrence(x, w), rtol=1e-9, atol=1e-9)
    assert_one_graph(compiled)


@torch.no_grad()
def test_what_draws_random_numbers_is_decided_on_the_host():
    def draw(x):
        y = torch.cond(x.sum() > 0, lambda a: torch.dropout(a, 0.5, True), lambda a: a * 2, (x,))
        return y + torch.rand_like(x)

    compiled = ms.compile(draw, options={"fallback_random": True})
    with pytest.warns(UserWarning, match="draws random numbers"):
        compiled(torch.ones(5, device="cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sign in (1, -1, 1, -1):
            x, runs = torch.full((5,), 1.0 * sign, device="cuda"), []
            for call in (draw, compiled):
                torch.manual_seed(3)
                runs.append([call(x), torch.cuda.get_rng_state()])
            assert_close(*runs)


@torch.no_grad()
def test_scans_draw_in_a_graph():
    def draw(flow, x):
        def turn(carry, row):
            new = torch.dropout(carry + row, 0.5, True)
            return new, new * torch.rand_like(row)

        return flow.scan(turn, x[0] * 0, x)

    x = torch.rand(4, 6, device="cuda")
    compiled = ms.compile(partial(draw, Operators), strict=True, options={"fallback_random": True})
    for seed in range(4):
        runs = []  # PyTorch's own scan draws once more than it turns
        for call in (partial(draw, Plain), compiled):
            torch.manual_seed(seed)
            runs.append([call(x), torch.cuda.get_rng_state()])
        assert_close(*runs)
    assert_one_graph(compiled)


@torch.no_grad()
@pytest.mark.skipif(not WRITES, reason="PyTorch refuses it")
@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
def test_functions_write_tensors(wrap):
    def written(flow, x, total):
        def yes(a):
            total.add_(a)
            total[0].mul_(2)
            return a * 2

        def turn(number, a):
            return number + 1, flow.cond(a.mean() > 0, yes, lambda a: a + 1, (a,)) - 0.5

        return flow.while_loop(lambda number, a: number < 5, turn, (zero(), x)), total.sum()

    runs = []
    captured = wrap(written, engine="graph", strict=True)
    for flow, function in ((Plain, written), (Operators, captured)):
        total = tensors((3, 3))[0]
        runs.append([[function(flow, x, total) for x in tensors(*[(3, 3)] * 4, seed=3)], total])
    assert_close(*runs, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_what_is_on_two_devices_is_refused_with_its_reason():
    def function(x):
        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (start, x))[1]

    with pytest.raises(ms.CaptureError, match="gives while_loop tensors on cpu and cuda:0"):
        ms.step(function, strict=True)(torch.ones(3, device="cuda"))
