"""Operators that write: new values in their place change neither results nor inputs, and loops are found."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import millstream as ms
from millstream._torch.workarounds import without
from millstream.passes import new_values, rolling
from millstream.passes.equal_turns import is_changing
from millstream.passes.new_values import give_new_values
from millstream.passes.rolling import roll_loops


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(new_values, "FEWEST_TURNS", 1)


def changed(function, *given):
    """How many operators write before and after; the graph as it was, and as it is."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    before = copy.deepcopy(gm)
    give_new_values(gm)
    return before, gm


def num_writes(gm):
    return sum(map(is_changing, gm.graph.nodes))


def check(before, after, given):
    """Results and inputs are the same, bits and layouts; so are the values that nodes say they have."""
    runs = []
    for each in (before, after):
        inputs = [x.clone(memory_format=torch.preserve_format) for x in given]
        with torch.no_grad():
            runs.append([*each(*inputs), *inputs])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    check_values(after, given)


class Checked(torch.fx.Interpreter):
    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and isinstance(n.meta.get("val"), torch.Tensor):
            said = n.meta["val"]
            assert (value.shape, value.stride(), value.dtype) == (said.shape, said.stride(), said.dtype), n
        return value


def check_values(gm, given):
    with torch.no_grad():
        Checked(gm).run(*(x.clone(memory_format=torch.preserve_format) for x in given))


WRITES = (
    lambda a, b: a.add_(b),
    lambda a, b: a.mul_(b),
    lambda a, b: a.sigmoid_(),
    lambda a, b: a.copy_(b),
    lambda a, b: a.zero_(),
    lambda a, b: a.clamp_(min=0.1),
    lambda a, b: a[0].sub_(b[1]),
    lambda a, b: a.t().mul_(0.5),
    lambda a, b: a.addcmul_(b, b, value=0.3),
    lambda a, b: a.masked_fill_(b > 0, 0.25),
)
READS = (
    lambda a, b: a + b,
    lambda a, b: a @ b,
    lambda a, b: a.t(),
    lambda a, b: a.view(9).view(3, 3),
    lambda a, b: a.detach(),
    lambda a, b: torch.cat([a, b])[1:4],
    lambda a, b: a.unsafe_chunk(3, 1)[0].expand(3, 3),
    lambda a, b: torch.stack([a, b], 2).unbind(2)[1],
    lambda a, b: torch.ops.aten.unsafe_split(torch.cat([a, b, a], 1), 3, 1)[2],
    lambda a, b: a.clone(memory_format=torch.contiguous_format),
    lambda a, b: a.as_strided((3, 3), (1, 3)),
)


def random_program(seed):
    choose = random.Random(seed)
    steps = [
        (choose.random() < 0.5, choose.random(), choose.random(), choose.random())
        for _ in range(choose.randrange(4, 16))
    ]
    returned = [choose.random() for _ in range(3)]

    def program(x, y):
        pool = [x, y, x.clone(), x * y]
        for writes, which, one, other in steps:
            operators = WRITES if writes else READS
            a, b = pool[int(one * len(pool))], pool[int(other * len(pool))]
            result = operators[int(which * len(operators))](a, b.clone() if writes else b)
            if result.shape == (3, 3):
                pool.append(result)
        return [pool[int(each * len(pool))] for each in returned]

    return program


@pytest.mark.filterwarnings("ignore:Use of masked_fill_")
def test_random_programs_keep_their_results():
    converted, seed, tried = 0, 0, 0
    while tried < 150:
        seed += 1
        given = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
        program = random_program(seed)
        try:
            program(*(x.clone() for x in given))
        except RuntimeError:  # a view that there is not, or expanded memory that is written
            continue
        tried += 1
        before, after = changed(program, *given)
        check(before, after, given)
        converted += num_writes(before) - num_writes(after)
    assert converted > 100


@pytest.mark.parametrize(
    ("function", "num_left"),
    [
        (lambda x: [x.add_(1)], 1),  # an input
        (lambda x: [x.clone().t().add_(1)], 1),  # by a view
        (lambda x: [(y := x * 2), (v := y[0]), y.add_(1), v * 3][-1:], 1),  # a view reads it later
        (lambda x: [(y := x * 2), y[0] * 3, y.add_(1)][1:], 0),
        (lambda x: [(y := x * 2), y.add_(1), y[0] * 3][1:], 0),
        (lambda x: [(y := x * 2).add_(1).mul_(3).exp_(), y], 0),
        (lambda x: [(y := x * 2).add_(1), y.as_strided((2,), (2,))], 0),
        (lambda x: [(y := x * 2), y.resize_(2, 2), y.add_(1)][2:], 2),
        (lambda x: [x.bernoulli(0.5).bernoulli_(0.5)], 1),
    ],
)
def test_only_what_is_read_by_one_name_is_a_new_value(function, num_left):
    given = torch.randn(3, 3)
    torch.manual_seed(0)
    before, after = changed(function, given)
    assert num_writes(after) == num_left
    if "bernoulli" not in str(before.graph):
        check(before, after, [given])


def gru(x, h, w, u):
    for row in x.unbind():
        (r, z, n), (hr, hz, hn) = ((each @ v).unsafe_chunk(3, 1) for each, v in ((row, w), (h, u)))
        reset, update = hr.add_(r).sigmoid_(), hz.add_(z).sigmoid_()
        new = (n + hn.mul_(reset)).tanh_()
        h = (h - new).mul_(update).add_(new)
    return [h, *torch.autograd.grad(h.square().sum(), [w, u])]


def given_to_gru(turns):
    generator = torch.Generator().manual_seed(0)
    sizes = [(turns, 2, 4), (2, 3), (4, 9), (3, 9)]
    made = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    return [*made[:2], *(each.requires_grad_() for each in made[2:])]


def test_turns_that_write_their_gates_are_found(monkeypatch):
    monkeypatch.setattr(rolling, "FEWEST_SAVED", 60)
    given = given_to_gru(14)
    before, after = changed(gru, *given)
    assert num_writes(before) > 14
    assert not num_writes(after)
    check(before, after, [each.detach() for each in given])
    expected = before(*given)
    assert not roll_loops(before)
    loops = roll_loops(after)
    assert len({each.body.name for each in loops}) == 2, "forward and backward"
    with torch.no_grad():
        assert all(map(torch.equal, expected, after(*given)))


@pytest.mark.parametrize("off", [(), ("new-values",), ("loops",)])
def test_a_step_over_a_recurrent_cell_is_as_eager(monkeypatch, off):
    monkeypatch.setattr(rolling, "FEWEST_SAVED", 100)
    outcomes = []
    for captures in (False, True):
        torch.manual_seed(1)
        cell, head = nn.GRUCell(3, 5), nn.Linear(5, 2)
        optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)

        def step(x, cell=cell, head=head, optimizer=optimizer):
            h = x.new_zeros(2, 5)
            for row in x.unbind():
                h = cell(row, h)
            loss = head(h).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = ms.step(step) if captures else step
        with without(off):
            losses = [run(torch.full((16, 2, 3), value)) for value in (0.1, -0.2, 0.3)]
        outcomes.append([*losses, *cell.parameters(), *head.parameters()])
        if captures:
            assert ("equal iterations" in ms.explain(run).text()) == ("loops" not in off)
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_without_loops_that_writes_in_place_is_as_eager():
    """Its graph stays as it was captured; results lie in memory as in eager PyTorch."""

    def step(x):
        y, total = x.t() * 2, x.sum()
        for number in range(1, 15):
            y.mul_(number).sub_(total) if number % 2 else y.sigmoid_().t().add_(1 / number)
        return y, y.relu()

    x = torch.randn(3, 4, dtype=torch.float64)
    captured = ms.step(step, engine="serial", strict=True)
    for _ in range(3):
        for one, other in zip(captured(x), step(x), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
