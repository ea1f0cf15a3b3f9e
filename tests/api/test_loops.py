"""Loops in Python over many turns: one turn is lowered, and values and gradients are eager PyTorch's."""

import contextlib
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import millstream as ms
from millstream._torch.workarounds import without
from millstream.api import executables
from millstream.check import find_races
from millstream.lower import lower_graph
from millstream.passes import rolling
from millstream.testing import spread_plan
from tests.processes import bring_compiled_code

LENGTH = 24


@pytest.fixture(autouse=True)
def _early(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(rolling, "FEWEST_SAVED", 50)
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # which is written in half the time
        yield


class Cell(nn.Module):
    """A recurrent cell by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.x, self.h = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        h = x.new_zeros(2, 4)
        kept = []
        for row in x:
            h = (self.x(row) + self.h(h)).tanh()
            kept.append(h)
        return torch.stack(kept, 1)


def trained(wrap, model=None, batches=None):
    """Losses and weights of a loop of training, and what ran it."""
    model = model or Cell().double()
    if batches is None:
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(LENGTH, 2, 3, dtype=torch.float64, generator=generator) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(x).clone() for x in batches]
    return [*losses, *model.parameters()], step


def test_the_next_process_finds_the_program(monkeypatch, tmp_path):
    bring_compiled_code(tmp_path)
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
    first, _ = trained(ms.step(engine="serial", strict=True))
    monkeypatch.setattr(lower_graph, "compile_fx_inner", None)
    torch._dynamo.reset()
    found, step = trained(ms.step(engine="serial", strict=True))
    assert all(map(torch.equal, found, first))
    sources = {kernel.source.partition(" in ")[2] for kernel in ms.explain(step).programs[0].plan.graph.kernels}
    assert "forward" in sources
    assert str(ms.explain(step)).count("equal iterations of a loop") == 2


def test_a_step_lowers_one_turn_of_each_pass():
    plain, _ = trained(lambda function: function)
    found, step = trained(ms.step(engine="serial", strict=True))
    torch.testing.assert_close(found, plain)
    told = str(ms.explain(step))
    assert told.count("equal iterations of a loop") == 2
    assert "test_loops.py" in told
    (executable,) = executables(step)
    assert not find_races(spread_plan(executable.lowered.program.graph, 3, random.Random(0)))


def test_cells_that_change_their_gates_in_place():
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4).double()

    def step(x):
        h = x.new_zeros(2, 4)
        for row in x:
            h = cell(row, h)
        return h.detach(), torch.autograd.grad(h.square().sum(), [*cell.parameters()])

    captured = ms.step(step, engine="serial", strict=True)
    x = torch.randn(LENGTH, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(captured(x), step(x))
    assert str(ms.explain(captured)).count("equal iterations of a loop") == 2


class Noisy(nn.Module):
    """A cell of which each step drops a part, and draws its output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.Linear(4, 4)

    def forward(self, x):
        h, kept = x[0], []
        for row in x:
            h = self.h(torch.dropout(h, 0.25, True)).tanh() + row
            h = torch.distributions.Normal(h, 0.1, validate_args=False).rsample()
            kept.append(h)
        return torch.stack(kept, 1)


def noisy_runs(is_step, engine, off):
    """Results and gradients of calls, of which the first two are of the same seed, and whether turns were lowered."""
    torch._dynamo.reset()
    model = Noisy().double()

    def train(x, run):
        model.zero_grad()
        result = run(x)
        result.square().mean().backward()
        return [result.detach(), *(each.grad.clone() for each in model.parameters())]

    with without(off):
        compiled = ms.compile(model, engine=engine, strict=True)
        call = (
            ms.step(lambda x: train(x, model), engine=engine, strict=True) if is_step else partial(train, run=compiled)
        )
        x = torch.randn(19, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        call(x)
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(call(x))
        told = str(ms.explain(call if is_step else compiled)).count("equal iterations of a loop")
    return found, told > 0


@pytest.mark.parametrize("is_step", [True, False])
def test_turns_draw_random_numbers(is_step):
    one, is_rolled = noisy_runs(is_step, "serial", ())
    other, _ = noisy_runs(is_step, "threads", ())
    plain, is_rolled_without = noisy_runs(is_step, "serial", ("loops",))
    assert is_rolled
    assert not is_rolled_without
    assert all(map(torch.equal, tree_leaves(one), tree_leaves(other)))
    torch.testing.assert_close(one, plain, rtol=1e-9, atol=1e-9)  # turns draw all, so numbers are those of a plain loop
    assert torch.equal(one[0][0], one[1][0])
    assert not torch.equal(one[1][0], one[2][0])


def test_loops_draw_as_in_eager_where_that_is_asked_for():
    model = Noisy()
    run = ms.compile(model, engine="serial", strict=True, options={"fallback_random": True})
    x = torch.randn(16, 2, 4)
    with torch.no_grad():
        found = []
        for call in (model, run):
            torch.manual_seed(3)
            found.append(call(x))
        torch.testing.assert_close(*found)


def test_engines_give_equal_bits():
    one, _ = trained(ms.step(engine="serial", strict=True))
    other, _ = trained(ms.step(engine="threads", streams=2, strict=True))
    assert all(map(torch.equal, one, other))


def test_a_model_is_trained_as_in_eager():
    x = torch.randn(LENGTH, 2, 3, dtype=torch.float64)
    results = []
    for wrap in (lambda model: model, lambda model: ms.compile(model, strict=True)):
        model = Cell().double()
        run = wrap(model)
        value = run(x)
        value.sin().sum().backward()
        results.append([value.detach(), *(each.grad for each in model.parameters())])
    torch.testing.assert_close(*results)
    assert str(ms.explain(run)).count("equal iterations of a loop") == 2


def test_state_changed_in_place_in_each_turn():
    def integrate(x, weight):
        x = x.clone()
        for _ in range(LENGTH):
            x.add_(torch.tanh(x @ weight).mul_(0.1).sub_(x, alpha=0.01))
        return x

    given = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    step = ms.step(integrate, engine="serial", strict=True)
    for _ in range(3):
        torch.testing.assert_close(step(*given), integrate(*given))
    assert "equal iterations of a loop" in str(ms.explain(step))


@pytest.mark.parametrize("is_off", [True, False], ids=["switched-off", "failing"])
def test_without_it_the_loop_is_unrolled(monkeypatch, caplog, is_off):
    caplog.set_level("INFO", "millstream.passes")

    def fail(self, *_):
        raise RuntimeError("no")

    def wave(x):
        for row in x.unbind():
            x = (x * 0.5 + row).sin() - 0.1
        return x

    if not is_off:
        monkeypatch.setattr("millstream.lower.turns._Binder.run", fail)
    given = torch.randn(LENGTH, 3, dtype=torch.float64)
    with without(["loops"]) if is_off else contextlib.nullcontext():
        step = ms.step(wave, engine="serial", strict=True)
        for _ in range(3):
            torch.testing.assert_close(step(given), wave(given))
    assert "equal iterations" not in str(ms.explain(step))
    assert ("RuntimeError: no" in caplog.text) is not is_off
