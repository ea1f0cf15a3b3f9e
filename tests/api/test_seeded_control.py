"""Random numbers in functions of control flow: from a seed, however often these run, and again for the gradients."""

import warnings

import pytest
import torch
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import millstream as ms
from millstream._torch.seeded_randoms import DrawnFrom
from millstream._torch.workarounds import without
from millstream.errors import LoweringError
from tests.api.test_control import ENGINES

NUM_CALLS = 4  # of a step, the first is eager


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # which is written in half the time
        yield


def dropped(a, w):
    return torch.dropout(a * w, 0.5, True)


def scanned(x, w):
    return scan(lambda carry, row: ((new := dropped(row, w)), new + carry * 0), x[0] * 0, x)[1]


GRADED = {
    "cond": lambda x, w: torch.cond(x.sum() > 0, lambda a: dropped(a, w), lambda a: a * w * 3, (x,)),
    "map": lambda x, w: map_slices(lambda row: dropped(row, w), x),
    "scan": scanned,
    "nested": lambda x, w: map_slices(
        lambda row, w: torch.cond(row.sum() > 0, dropped, lambda a, w: a * w, (row, w)), x, w
    ),
}


def runs_of(function, device="cpu", **options):
    """Results and gradients of each call, wrapped in both ways; with a seed that two calls after each other share."""
    w = torch.ones(32, device=device, requires_grad=True)
    x = torch.ones(4, 32, device=device)

    def step(x, inner=function):
        w.grad = None
        result = inner(x, w)
        result.sum().backward()
        return result.detach(), w.grad.clone()

    compiled = ms.compile(function, strict=True, **options)
    found = []
    for call in (ms.step(step, strict=True, **options), lambda x: step(x, compiled)):
        call(x)
        for number in range(NUM_CALLS):
            torch.manual_seed(number // 2)
            found.append(call(x))
    return found


@pytest.mark.parametrize("name", GRADED)
def test_gradients_are_those_of_what_was_drawn(name):
    found = [runs_of(GRADED[name], engine=engine) for engine in ENGINES]
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))
    check_dropped(found[0])


def check_dropped(found):
    for place in (0, NUM_CALLS):
        calls = [result for result, _ in found[place : place + NUM_CALLS]]
        assert torch.equal(calls[0], calls[1])
        assert not torch.equal(calls[1], calls[2])
        assert not torch.equal(calls[0][0], calls[0][1])  # each turn draws its own
    for result, gradient in found:
        assert torch.equal(result.sum(0), gradient)
        assert 0.7 < result.mean() < 1.3
        assert {*result.unique().tolist()} == {0.0, 2.0}


def noisy(x):
    """All that the turns of a loop have drawn, those of a branch within them too."""

    def turn(number, drawn):
        inner = torch.cond(drawn.sum() > 1e9, lambda a: a * 0, lambda a: torch.rand_like(a), (drawn[0, 0],))
        new = torch.stack([torch.rand_like(drawn[0, 0]), torch.randn_like(drawn[0, 0]), inner])
        return number + 1, torch.cat([drawn[1:], new.unsqueeze(0)])

    start = torch.zeros((), dtype=torch.int64, device=x.device)
    end = 4 + (x.sum() > 0)
    return while_loop(lambda number, _: number < end + (torch.rand_like(x[0]) > 2), turn, (start, x.repeat(4, 3, 1)))


def check_noisy(call, device="cpu"):
    """Return what it draws in some calls, and where that leaves the generator."""
    found = []
    for number in range(4):
        torch.manual_seed(number // 2)
        turns, drawn = call(torch.full((256,), number % 2 - 0.5, device=device))
        assert turns == 4 + number % 2
        found.append([drawn, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()])
    first, second = found[0][0], found[1][0]
    assert torch.equal(first[1:], second[:3])  # of the same seed, one turn fewer
    assert torch.equal(found[0][1], found[1][1])  # and however often it has turned
    rows = torch.cat([first.flatten(0, 1), found[2][0].flatten(0, 1)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert ((rows.mean(1) - torch.tensor([0.5, 0, 0.5] * 8, device=device)).abs() < 0.25).all()
    return found


@torch.no_grad()
def test_turns_draw_numbers_of_their_own():
    found = []
    for engine in ENGINES:
        step = ms.step(noisy, engine=engine, strict=True)
        step(torch.ones(256))
        found += [check_noisy(step), check_noisy(ms.compile(noisy, engine=engine, strict=True))]
    for one in found[1:]:
        for ours, theirs in zip(one, found[0], strict=True):
            assert all(map(torch.equal, ours, theirs))


def sampled(table, tokens):
    """Tokens after each other, each drawn from the row of the one before, until all sequences have met the last."""

    def turn(number, token, tokens):
        new = torch.multinomial(table[token], 1).squeeze(1)
        return number + 1, new, tokens.index_copy(1, number.view(1), new.unsqueeze(1))

    zero = torch.zeros((), dtype=torch.int64, device=tokens.device)
    number, _, tokens = while_loop(
        lambda number, token, _: (number < 60) & (token != 0).any(), turn, (zero, tokens[:, 0].clone(), tokens)
    )
    return number, tokens


def check_sampled(call, device="cpu"):
    table = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0]], device=device)
    number, tokens = call(table, torch.full((4096, 60), 3, device=device))
    assert 10 < number < 60
    assert (tokens[:, number:] == 3).all()
    assert (tokens[:, number - 1] == 0).all()
    assert (tokens[:, 0] == 2).all()
    pairs = tokens[:, : number - 1] * 4 + tokens[:, 1:number]
    counts = pairs.flatten().bincount(minlength=16).view(4, 4)[:3]
    torch.testing.assert_close(counts / counts.sum(1, keepdim=True), table[:3], atol=0.03, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
def test_samples_are_drawn_until_an_end_token(wrap):
    call = wrap(sampled, engine="serial", strict=True)
    for _ in range(3):
        check_sampled(call)


def test_without_the_pass_they_are_drawn_as_always():
    def function(x):
        return torch.cond(x.sum() > 0, lambda a: torch.dropout(a, 0.5, True), lambda a: a * 2, (x,))

    x = torch.ones(3, requires_grad=True)
    with without({"seeded-bodies"}):
        with pytest.raises(LoweringError, match="draws random numbers, which PyTorch draws again"):
            ms.compile(function, strict=True)(x).sum().backward()
        with pytest.raises(ms.CaptureError, match="which PyTorch draws again in the backward pass"):
            ms.step(lambda: function(x).sum().backward(), strict=True)()


DRAWS = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn": lambda x: torch.randn(x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(2, 7, x.shape).to(x),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.1, 0.5),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_().clamp(-3, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 3),
    "normal of tensors": lambda x: torch.normal(x, x + 1),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(2.0, x),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, x.shape),
    "dropout": lambda x: torch.dropout(x, 0.3, True),
    "dropout of channels": lambda x: torch.feature_dropout(x.view(1, 5000, 4), 0.3, True),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.3, True),
    "gumbel_softmax": lambda x: torch.nn.functional.gumbel_softmax(x.view(2000, 10)),
    "one sample": lambda x: torch.multinomial(torch.tensor([0.1, 0.5, 0.4]).expand(len(x), 3), 1).to(x),
    "two samples": lambda x: torch.multinomial(torch.tensor([0.1, 0.5, 0.4]).expand(len(x), 3), 2)[:, 1].to(x),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_draw_by_a_seed_as_by_a_generator(name, dtype):
    torch.manual_seed(0)
    x = torch.rand(20_000, dtype=dtype)
    wanted, state = DRAWS[name](x), torch.get_rng_state()
    found = []
    for seed, first in ((5, 0), (5, 0), (5, 1), (6, 0)):
        with DrawnFrom(torch.tensor(seed), first) as drawn:
            found.append(DRAWS[name](x))
        assert drawn.number > first
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    for each in found:
        assert (each.shape, each.dtype, each.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        assert (each.mean() - wanted.mean()).abs() < 0.06 * wanted.std()
        assert 0.9 < each.std() / wanted.std() < 1.1


def test_what_has_no_rule_is_drawn_by_the_generator():
    with warnings.catch_warnings(), DrawnFrom(torch.tensor(1)) as drawn:
        warnings.simplefilter("error")
        state = torch.get_rng_state()
        torch.poisson(torch.ones(3))
        assert not torch.equal(torch.get_rng_state(), state)
        generator = torch.Generator().manual_seed(3)
        assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=generator.manual_seed(3)))
    assert drawn.number == 0
