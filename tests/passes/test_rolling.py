"""Loops that were unrolled: the node in their place computes the same bits, and what is no loop stays."""

import copy
import random

import pytest
import torch
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from millstream._torch.seeded_randoms import may_follow_seed
from millstream.passes import equal_turns, rolling
from millstream.passes.rolling import TURNS, roll_loops
from millstream.passes.seeded_draws import seed_draws

TURNS_TAKEN = 20


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(rolling, "FEWEST_SAVED", 12)
    monkeypatch.setattr(equal_turns, "FEWEST_TURNS", 4)
    monkeypatch.setattr(rolling, "MOST_RESULTS", 16)


def rolled(function, *given):
    """What a graph gives and what it gives rolled, the number of turns, and the operators that are left."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    expected = gm(*given)
    loops = roll_loops(gm)
    with torch.no_grad():
        found = gm(*given)
    assert len(gm.graph.find_nodes(op="call_function", target=TURNS)) == len(loops)
    return expected, found, sum(len(each.sources) for each in loops), len(gm.graph.nodes)


def random_loop(seed):
    """A loop of random operators over carried values, inputs by turn, and what was two turns ago, with gradients."""
    choose = random.Random(seed)
    length, num_carried, dim = choose.choice([6, 9, 14]), choose.choice([1, 2, 3]), choose.choice([0, 1])
    start = choose.choice(["zeros", "given", "expanded", "transposed"])
    odd = choose.choice([None, None, choose.randrange(length)])
    other = choose.random() < 0.3
    keeps = choose.choice(["stack", "sum", "some", "last"])
    steps = [(choose.randrange(7), choose.random(), choose.random()) for _ in range(choose.choice([2, 3, 5]))]
    operators = [
        lambda a, b, w, bias: torch.tanh(a @ w + bias),
        lambda a, b, w, bias: a + b.sigmoid(),
        lambda a, b, w, bias: torch.cat([a, b], 1).chunk(2, 1)[1] * a,
        lambda a, b, w, bias: torch.nn.functional.layer_norm(a, (3,)),
        lambda a, b, w, bias: torch.where(b > 0, a, a * 0.5),
        lambda a, b, w, bias: a.max(-1, keepdim=True)[0] + b,
        lambda a, b, w, bias: (a.unsqueeze(1) @ w.unsqueeze(0)).squeeze(1),
    ]

    def loop(x, w, bias, h):
        first = {
            "zeros": torch.zeros_like(h),
            "given": h,
            "expanded": bias.expand(2, 3),
            "transposed": h.t().clone().t(),
        }
        carried, outputs, total = [first[start]] * num_carried, [], h.sum()
        before = carried[0]
        for turn in range(length):
            pool = [x.select(dim, turn), *carried, before]
            for number, one, two in steps:
                pool.append(operators[number](pool[int(one * len(pool))], pool[int(two * len(pool))], w, bias))
            new = pool[-1] * 3 if turn == odd else pool[-1]
            before, carried = carried[0], [new * 0.7 + carried[0] * 0.1, *(c * 0.9 + new * 0.2 for c in carried[1:])]
            if keeps == "stack" or (keeps == "some" and turn % 2):
                outputs.append(carried[0])
            if keeps == "sum":
                total = total + carried[-1].square().sum()
        if other:
            total = total + torch.stack(outputs or carried, dim).tanh().sum()
        total = total + sum(each.sum() for each in (*outputs, *carried)) + 0 * (w.sum() + x.sum() + bias.sum())
        return [total, *carried, *torch.autograd.grad(total, [x, w, bias, h])]

    generator = torch.Generator().manual_seed(seed)
    sizes = [(length, 2, 3) if dim == 0 else (2, length, 3), (3, 3), (3,), (2, 3)]
    return loop, [torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.parametrize("seed", range(6))
def test_random_loops_keep_their_bits(seed):
    loop, given = random_loop(seed)
    expected, found, num_turns, _ = rolled(loop, *given)
    assert num_turns
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_what_is_left_does_not_grow_with_the_turns_but_for_inputs_and_results(monkeypatch):
    monkeypatch.setattr(rolling, "MOST_FUSED", 1)

    def loop(x):
        h = x[0]
        for row in x.unbind():
            h = ((h * 2 + row).sin() - 1).cos()
        return h

    sizes = [rolled(loop, torch.randn(length, 3)) for length in (TURNS_TAKEN, 2 * TURNS_TAKEN)]
    assert [turns for _, _, turns, _ in sizes] == [TURNS_TAKEN, 2 * TURNS_TAKEN]
    assert sizes[1][3] - sizes[0][3] <= 2 * TURNS_TAKEN


@pytest.mark.parametrize("most", [16, 64])
def test_several_pointwise_turns_are_one(monkeypatch, most):
    monkeypatch.setattr(rolling, "MOST_FUSED", most)

    def loop(x):
        before, now = x[0], x[1]
        for row in x.unbind():
            before, now = now, (now * 2 - before * 0.5 + row).sin()
        return now, torch.autograd.grad(now.square().sum(), x)[0]

    x = torch.randn(TURNS_TAKEN + 1, 3, dtype=torch.float64, requires_grad=True)
    expected, found, num_turns, _ = rolled(loop, x)
    assert 4 <= num_turns < TURNS_TAKEN
    assert all(map(torch.equal, expected, found))


def test_several_results_of_one_operator_stay_in_a_turn():
    """As those of a fused cell do: there the fewest tensors would go from one turn to the next."""

    def loop(x, w):
        h, scale, shift = x[0], x[0, 0], x[0, 1]
        for row in x.unbind():
            h, mean, _ = torch.native_layer_norm(h @ w + row, (3,), scale, shift, 1e-5)
            scale, shift = (h + mean).sum(0).tanh(), (h * mean).sum(0).tanh()
        return h, scale, shift

    x, w = torch.randn(TURNS_TAKEN, 2, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    expected, found, num_turns, _ = rolled(loop, x, w)
    assert num_turns >= TURNS_TAKEN - 3
    assert all(map(torch.equal, expected, found))


def noisy(x, w):
    """A loop whose turns draw by several operators, with gradients."""
    h = x[0]
    for row in x.unbind():
        h = torch.native_dropout(h @ w, 0.3, True)[0] + row
        h = h + torch.bernoulli(h.detach().sigmoid()) * torch.rand(3, dtype=h.dtype)
        h = (h - torch.randint(3, (2, 1)) * torch.randn_like(h)).sin()
    return h, *torch.autograd.grad(h.square().sum(), [x, w])


def test_turns_draw_by_seeds():
    x, w = torch.randn(TURNS_TAKEN, 2, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    given = x.requires_grad_(), w.requires_grad_()
    gm = make_fx(noisy, tracing_mode="fake")(*given)
    plain = copy.deepcopy(gm)
    nodes = [node for node in plain.graph.nodes if may_follow_seed(node.target)]
    seed_draws(plain.graph, nodes, detect_fake_mode([node.meta.get("val") for node in nodes]))
    plain.recompile()
    loops = roll_loops(gm)
    assert sum(len(each.sources) for each in loops) >= 2 * TURNS_TAKEN - 3
    runs = []
    for each in (gm, plain):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                runs.append(each(*given))
    for one, other in zip(runs[:3], runs[3:], strict=True):
        assert all(map(torch.equal, one, other))
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[1][0], runs[2][0])


def layers(x, *weights):
    for weight in weights:
        x = torch.tanh(x @ weight).sigmoid() * 2
    return x


def changes(x):
    y = x.clone()
    for _ in range(TURNS_TAKEN):
        y.mul_(0.5)
        y = y.sin()
    return y


def draws(x):
    for _ in range(TURNS_TAKEN):
        x = torch.poisson(x.sin().square() * 2)
    return x


def counts(x):
    for turn in range(TURNS_TAKEN):
        x = (x * turn).sin()
    return x


@pytest.mark.parametrize("function", [layers, changes, draws, counts])
def test_other_repetitions_stay_as_they_are(function):
    weights = [torch.randn(3, 3) for _ in range(TURNS_TAKEN)] if function is layers else []
    gm = make_fx(function, tracing_mode="fake")(torch.randn(3, 3), *weights)
    before = str(gm.graph)
    assert not roll_loops(gm)
    assert str(gm.graph) == before
