"""Control flow in models: branches and loops are kernels of one graph, with eager PyTorch's values and gradients."""

import random
from functools import partial

import pytest
import torch
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils._pytree import tree_leaves

import millstream as ms
from millstream.api import executables
from millstream.check import check_plan, find_races
from millstream.graph import KernelKind, Wait
from millstream.testing import drop_step, spread_plan
from tests.api.random_control import WRITES, Operators, Plain

ENGINES = "serial", "threads"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # which is written in half the time
        yield


def tensors(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]


def branch(x, w):
    y = x @ w
    return torch.cond(y.sum() > 0, lambda a, b: a.sin() @ b, lambda a, b: a.cos() - b, (y, w))


def slices(x, w):
    return map_slices(lambda row, w: (row @ w).sin() * row, x, w)


def recurrence(x, w):
    def turn(carry, row):
        new = torch.tanh(carry @ w + row)
        return new, new * row

    last, rows = scan(turn, x[:, 0] * 0, x, dim=1, reverse=True)
    return rows + last.unsqueeze(1)


def counted(x, w):
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda turn, a: turn < 5, lambda turn, a: (turn + 1, torch.tanh(a @ w)), (start, x))[1]


def values_and_gradients(function, *given, has_gradients=True):
    """What a function gives, and the gradients of what it is given."""
    given = [each.clone().requires_grad_(has_gradients) for each in given]
    result = function(*given)
    if has_gradients:
        result.square().sum().backward()
    return [result.detach(), *(each.grad for each in given if each.grad is not None)]


def all_three(x, w):
    return branch(x, w) + slices(x, w) * recurrence(x, w)


@pytest.mark.parametrize("engine", ENGINES)
def test_values_and_gradients_are_those_of_eager(engine):
    assert_as_eager(all_three, engine)


def test_gradients_that_are_expanded_are_carried():
    def step(x, w):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        last, _ = scan(lambda carry, row: ((new := (carry @ w + row).softmax(0)), new * 2), x[0] * 0, x)
        return torch.autograd.grad(last.sum(-1).square().sum(), (x, w))

    captured = ms.step(step, engine="serial", strict=True)
    for seed in range(2):
        given = tensors((5, 4, 4), (4, 4), seed=seed)
        for ours, theirs in zip(captured(*given), step(*given), strict=True):
            torch.testing.assert_close(ours, theirs)


def assert_as_eager(function, engine="serial"):
    compiled = ms.compile(function, engine=engine, strict=True)
    for seed in range(3):  # either way
        given = tensors((4, 4), (4, 4), seed=seed)
        for result, wanted in zip(
            values_and_gradients(compiled, *given), values_and_gradients(function, *given), strict=True
        ):
            torch.testing.assert_close(result, wanted)


@torch.no_grad()
def test_loops_turn_as_often_as_their_values_say():
    def loop(x, w, end):
        start = torch.zeros((), dtype=torch.int64)

        def turn(number, a, b):
            return number + 1, torch.tanh(a @ w), b + a

        return while_loop(lambda number, a, b: number < end, turn, (start, x, x * 0))

    x, w = tensors((3, 3), (3, 3))
    for engine in ENGINES:
        torch._dynamo.reset()
        compiled = ms.compile(loop, engine=engine, strict=True)
        for end in (0, 1, 7, 10_000):
            number, *results = compiled(x, w, torch.tensor(end))
            assert number == end
            for ours, theirs in zip(results, in_python(x, w, end), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
            assert all(result.data_ptr() != x.data_ptr() for result in results)


@torch.no_grad()
def test_operands_lie_as_the_functions_were_compiled_for():
    def function(x, w):
        rows = x.relu().transpose(0, 1).contiguous()  # TorchInductor may lay out otherwise what it computes
        column = (w * 2).t().contiguous()
        last, stacked = scan(lambda carry, row: (carry @ column + row, row * 2), rows[0] * 0, rows)
        return torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a.sin() * b, (last @ column, column)), stacked

    given = tensors((4, 5, 4), (4, 4))
    compiled = ms.compile(function, engine="serial", strict=True)
    for ours, theirs in zip(compiled(*given), function(*given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_constants_that_functions_write_are_copied_as_they_are_then():
    def yes(x):
        table = torch.tensor([1.0, 2.0])
        table[0] = 5.0
        return x * table.to(torch.float64)

    def function(x):
        return torch.cond(x.sum() > 0, yes, lambda x: x + 1, (x,))

    captured = ms.step(function, engine="serial", strict=True)
    for x in tensors((2,), (2,)):
        torch.testing.assert_close(captured(x), function(x))


def in_python(x, w, end):
    a, b = x, x * 0
    for _ in range(end):
        a, b = torch.tanh(a @ w), b + a
    return a, b


@torch.no_grad()
@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="PyTorch's scan stacks along the first dimension, whatever dim="
)
def test_scans_are_as_long_as_what_they_are_given():
    x, w = tensors((3, 10_000, 3), (3, 3))
    compiled = ms.compile(recurrence, strict=True)
    torch.testing.assert_close(compiled(x, w), recurrence(x, w), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_slices_are_written_where_they_are_stacked():
    def both(x, w):
        def turn(carry, row):
            new = torch.tanh(carry * w + row)
            return new, (new * row, row + 1)

        last, (rows, others) = scan(turn, x[0] * 0, x)
        return last, rows, others, map_slices(lambda row, w: (row * w).sin(), x, w)

    given = tensors((5, 3, 3), (3, 3))
    compiled = ms.compile(both, engine="serial", strict=True)
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            results = compiled(*given)
    assert "aten::copy_" not in {event.key for event in profile.key_averages()}
    for ours, theirs in zip(results, both(*given), strict=True):
        torch.testing.assert_close(ours, theirs)


def two_branches(x, w, buffer):
    left = torch.cond(x.sum() > 0, lambda a, b: (a + buffer) @ b, lambda a, b: a - b, (x, w))
    right = torch.cond(w.sum() > 0, lambda a: torch.sin(a) @ w, lambda a: a * 3, (x,))
    buffer.mul_(2)
    return left, right


@torch.no_grad()
def test_what_bodies_read_counts_for_dependencies():
    given = tensors((64, 64), (64, 64), (64, 64))
    compiled = ms.compile(two_branches, engine="serial", strict=True)
    compiled(*given)
    (executable,) = executables(compiled)
    graph = executable.plan.graph
    branches = [kernel for kernel in graph.kernels if kernel.kind is KernelKind.CONTROL]
    assert [kernel.name for kernel in branches] == ["cond", "cond"]
    assert all(kernel.flops and kernel.num_bytes and "mm" in kernel.ops for kernel in branches)
    written = {name for kernel in graph.kernels for name in kernel.writes}
    (buffer,) = {name for name in graph.inputs if name in written and ":" not in name}
    assert buffer in branches[0].reads  # by a closure of one of its bodies
    races = set()
    for seed in range(3):
        plan = spread_plan(graph, 3, random.Random(seed))
        check_plan(plan)
        waits = [at for at, step in enumerate(plan.steps) if isinstance(step, Wait)]
        races |= {(race.buffer, race.first.kernel) for at in waits for race in find_races(drop_step(plan, at))}
    assert (buffer, branches[0].id) in races


@torch.no_grad()
def test_random_numbers_in_bodies_are_those_of_eager():
    def draw(x):
        kept = torch.cond(x.sum() > 0, lambda a: torch.dropout(a, 0.5, True), lambda a: a * 2, (x,))
        start = torch.zeros((), dtype=torch.int64)
        _, noisy = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a + torch.rand_like(a)), (start, kept))
        return noisy * torch.rand_like(x)

    compiled = ms.compile(draw, strict=True, options={"fallback_random": True})
    for x in (torch.ones(5), -torch.ones(5)):
        torch.manual_seed(3)
        wanted, state = draw(x), torch.get_rng_state()
        torch.manual_seed(3)
        torch.testing.assert_close(compiled(x), wanted)
        assert torch.equal(torch.get_rng_state(), state)


class Recurrent(torch.nn.Module):
    """A recurrent network that normalises some of its steps, and takes one of two heads for all of them."""

    def __init__(self):
        super().__init__()
        self.cell, self.heads = torch.nn.Linear(8, 4), torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        def turn(carry, row):
            new = torch.tanh(self.cell(torch.cat([carry, row], 1)))
            return new, new * self.scale

        last, rows = scan(turn, x.new_zeros(x.shape[1:]), x)
        (result,) = torch.cond(
            last.mean() > 0, lambda a: (self.heads[0](a),), lambda a: (self.heads[1](a).sin(),), (last,)
        )
        return map_slices(lambda row: self.heads[0](row) * result, rows)


def train(wrap, batches):
    torch.manual_seed(1)
    model = Recurrent().double().to(batches[0].device)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    call = wrap(step)
    return [*(call(x) for x in batches), list(model.state_dict().values())]


def test_steps_are_trained_as_in_eager():
    batches = [tensors((5, 2, 4), seed=seed)[0] for seed in range(6)]
    wanted = train(lambda step: step, batches)
    runs = [train(partial(ms.step, engine=engine, strict=True), batches) for engine in ENGINES]
    assert all(map(torch.equal, *map(tree_leaves, runs)))
    for ours, theirs in zip(*map(tree_leaves, (runs[0], wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def branch_of_slices(x, w, v):
    yes, no = (lambda a: map_slices(lambda row: (row * w).sin(), a) * v), (lambda a: a - w)
    return torch.cond(x.sum() > 0, yes, no, (x,))


def slices_of_branches(x, w, v):
    def inner(a):
        return torch.cond(a.mean() > 0, lambda b: b * w, lambda b: b / v, (a,))

    return map_slices(lambda row: torch.cond(row.sum() > 0, lambda a: inner(a + v), lambda a: a - w, (row,)), x)


@pytest.mark.parametrize("function", [branch_of_slices, slices_of_branches])
def test_functions_within_functions_use_parameters_of_a_step(function):
    """Autograd runs the inner ones again when the outer ones have ended."""

    def trained(wrap):
        parameters = [each.requires_grad_() for each in tensors((4,), (4,), seed=1)]
        optimizer = torch.optim.SGD(parameters, 0.05)

        def step(x):
            loss = function(x, *parameters).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = wrap(step)
        return [call(x).clone() for x in tensors(*[(3, 4)] * 4)] + parameters

    torch.testing.assert_close(trained(partial(ms.step, strict=True)), trained(lambda step: step))


def test_steps_loop_and_draw_as_eager_does():
    weight = tensors((3, 3))[0]

    @torch.no_grad()
    def step(x):
        start = torch.zeros((), dtype=torch.int64)
        turns, y = while_loop(
            lambda i, a: (i < 50) & (a.norm() < 10), lambda i, a: (i + 1, a @ weight + torch.rand_like(a)), (start, x)
        )
        return turns, y * torch.rand_like(y)

    captured = ms.step(step, strict=True, options={"fallback_random": True})
    for x in (*tensors((3, 3), (3, 3)), torch.full((3, 3), 9.0, dtype=torch.float64)):
        runs = []
        for call in (step, captured):
            torch.manual_seed(3)
            runs.append([*call(x), torch.get_rng_state()])
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.skipif(not WRITES, reason="PyTorch refuses it")
def test_sampling_until_an_end_token_is_one_graph():
    table = tensors((5, 5))[0].softmax(1)

    def sample(flow, token):
        tokens = torch.full((20,), -1)

        def turn(number, token):
            new = torch.multinomial(table.index_select(0, token.view(1)), 1).view(())
            tokens.scatter_(0, number.view(1), new.view(1))
            return number + 1, new

        zero = torch.zeros((), dtype=torch.int64)
        number, _ = flow.while_loop(lambda number, token: (number < 20) & (token != 0), turn, (zero, token))
        return number, tokens

    captured = ms.step(sample, strict=True, options={"fallback_random": True})
    for seed in range(6):
        runs = []
        for flow, function in ((Plain, sample), (Operators, captured)):
            torch.manual_seed(seed)
            runs.append([*function(flow, torch.tensor(seed % 5)), torch.get_rng_state()])
        assert all(map(torch.equal, *runs))


def test_branches_of_both_kinds_are_captured_together():
    def step(x):
        y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))
        for _ in range(6):
            y = y.exp().cumsum(0).sigmoid()
        if y.sum() > 2.99:
            y = y * 2
        return y

    captured = ms.step(step, strict=True)
    for x in tensors((3,), (3,), (3,), (3,)):
        torch.testing.assert_close(captured(x), step(x))


def written(flow, x, total, counts):
    """Branches and loops that write tensors beside their arguments, in parts, by views and within each other."""

    def yes(a):
        total.add_(a)
        row = total[0]
        row.mul_(2)
        return a * torch.tensor([1.0, 2.0, -1.0], dtype=a.dtype)

    def no(a):
        counts[1] = 5
        a = a.clone()
        a[0] = 3
        return a

    def turn(number, a):
        counts[0].add_(1)
        return number + 1, flow.cond(a.mean() > 0, yes, no, (a,)) - 0.5

    y = flow.cond(x.sum() > 0, yes, no, (x,)) + total
    number, y = flow.while_loop(lambda number, a: number + counts[1] < 8, turn, (torch.zeros((), dtype=torch.int64), y))
    return y, number, total.sum()


@torch.no_grad()
@pytest.mark.skipif(not WRITES, reason="PyTorch refuses it")
@pytest.mark.parametrize(("engine", "wrap"), [*zip(ENGINES, [ms.step, ms.compile], strict=True)])
def test_functions_write_tensors(engine, wrap, lowered_once):
    runs = []
    captured = wrap(written, engine=engine, strict=True)
    for flow, function in ((Plain, written), (Operators, captured)):
        total, counts = tensors((3, 3))[0], torch.tensor([0, 0])
        made = [function(flow, x, total, counts) for x in tensors(*[(3, 3)] * 4, seed=3)]
        runs.append([*tree_leaves(made), total, counts])
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def written_twice(x):
    y = x * 2
    row = y[0]
    return torch.cond(x.sum() > 0, lambda a, b: a.mul_(2) + b, lambda a, b: a - b, (y, row))


W = torch.nn.Parameter(torch.ones(3, 3))
REFUSED = {
    "memory that is given twice": (
        lambda x: written_twice(x.detach()),
        "writes memory that it is given twice",
    ),
    "gradients of a loop": (
        lambda x: while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a @ W), (torch.tensor(0), x))[1],
        "gradients of a while_loop",
    ),
    "a value": (
        lambda x: torch.cond(x.sum() > 0, lambda a: a * 2 if a[0, 0] > 0 else a * 3, lambda a: a * 4, (x,)),
        "reads a tensor's value",
    ),
    "another device": (
        lambda x: torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x.to("meta"),)),
        "gives cond tensors on cpu and meta",
    ),
    "randomness drawn again": (
        lambda x: torch.cond(x.sum() > 0, lambda a: torch.poisson(a) * (a @ W), lambda a: a @ W, (x,)),
        "draws again in the backward pass",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_steps_cannot_capture_is_refused_with_its_reason(function, reason):
    def step(x):
        function(x).sum().backward()

    W.grad = torch.zeros(3, 3)
    captured = ms.step(step, strict=True)
    with pytest.raises(ms.CaptureError, match=reason) as caught:
        captured(torch.ones(3, 3))
    assert caught.value.where.startswith(__file__)
