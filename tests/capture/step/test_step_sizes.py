"""Sizes of a step's arguments that change: one graph for all, equal to eager, and no Python value that is stale."""

import math
import numbers
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api.explaining import executables
from millstream.capture.step.regions.islands import step_of
from millstream.capture.step.step import Step
from millstream.engine import by_size
from tests.capture.worlds import interpret

ROWS = (6, 5, 9, 3, 6, 7)
TABLE = torch.randn(20, 4)


def kinds(x):
    rows = x.shape[0]
    is_int = isinstance(rows, int) and isinstance(rows // 2, numbers.Integral)
    return x * (2 if is_int and isinstance(rows / 2, float) and not isinstance(rows, float) else 3)


def padded(x):
    mask = torch.arange(x.size(0)) > 2
    return torch.cat([x, x.new_zeros(x.shape[0], 4)]).view(2, *x.shape).sum(0).masked_fill(mask[:, None], 0.0)


ONE_FOR_ALL = {
    "mean": lambda x: x.sum() / x.shape[0],
    "results": lambda x: (x * 2, x.shape[0], x.shape, x.shape[0] / 2, {"rows": 3 * x.size(0) + 1}, x.numel()),
    "text": lambda x: (
        f"{x.shape[0]} of {x.shape[0] / 3:.2f}, {x.sum().item() * x.size(0):.2f}",
        x[0, 0].item() / x.size(0),
    ),
    "kinds": kinds,
    "padded": padded,
    "positions": lambda x: x + TABLE[: x.shape[0]] + TABLE[torch.arange(x.size(0))],
    "random": lambda x: F.dropout(x) + torch.rand(x.shape),
    "gradient": lambda x: torch.autograd.grad((TABLE.requires_grad_() @ x.T).square().mean(), TABLE),
    "statistics": lambda x: F.batch_norm(x, None, None, training=True) + x.std(0),
    "resized": lambda x: F.interpolate(x[None], scale_factor=1.7),
    "math": lambda x: (x / math.sqrt(x.shape[0]) + math.log(x.size(0)), math.pow(x.shape[0], 0.3)),
    "powers": lambda x: x / x.shape[0] ** 0.5 * (x.shape[0] % 4),
}


def run(function, rows=ROWS, **how):
    """Compare a step with eager at each size; returns the step."""
    step = Step(function, build=interpret, strict=True, **how)
    for number in rows:
        x = torch.randn(number, 4)
        expected, got = (_seeded(each, x) for each in (function, step))
        assert _kinds_in(got) == _kinds_in(expected)
        assert_alike(got, expected)
    return step


def _seeded(function, x):
    torch.manual_seed(0)
    return function(x)


def assert_alike(left, right):
    if isinstance(left, tuple | list):
        for one, other in zip(left, right, strict=True):
            assert_alike(one, other)
    elif isinstance(left, str):
        assert left == right
    else:
        torch.testing.assert_close(left, right)


def _kinds_in(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return type(value), [_kinds_in(part) for part in parts]


@pytest.mark.parametrize("name", ONE_FOR_ALL)
def test_the_second_size_is_compiled_for_all(name):
    assert len(run(ONE_FOR_ALL[name]).graphs) == 2


def test_dynamic_is_from_the_first_call_or_never():
    assert len(run(ONE_FOR_ALL["mean"], dynamic=True).graphs) == 1
    assert len(run(ONE_FOR_ALL["mean"], dynamic=False).graphs) == len({*ROWS})


def test_marked_dimension_is_symbolic_from_the_first_call():
    step = Step(lambda x: x.sum(0), build=interpret, strict=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(step(x), x.sum(0))
    assert len(step.graphs) == 1


def test_zero_and_one_have_graphs_of_their_own():
    assert len(run(lambda x: x.sum(0), (5, 3, 1, 0, 8, 1, 0)).graphs) == 4


def test_condition_that_divides_by_a_size_does_not_hold_for_zero():
    assert len(run(lambda x: x.chunk(2), (6, 5, 9, 0, 7)).graphs) == 3


def test_size_that_happens_to_be_broadcast_is_a_graph_of_its_own_and_others_share_one():
    assert len(run(lambda x: x[:-1] * x[1:], (6, 2, 9, 3, 7, 2)).graphs) == 3
    assert len(run(lambda x: x if x.shape == (5, 4) else x * 2).graphs) == 3


def test_size_past_memory_is_an_error_and_the_others_share_a_graph():
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    def train(x):
        loss = (torch.outer(x, x).cumsum(0).mean() * weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = Step(train, build=interpret)
    for number in (4, 4, 3_000_000, 5, 3_000_000, 7):
        before = weight.detach().clone()
        if number > 7:
            with pytest.raises(RuntimeError, match="allocate memory"):
                step(torch.ones(number))
            assert torch.equal(weight, before)
        else:
            step(torch.ones(number))
            torch.testing.assert_close(weight.detach(), before - 0.1 * (number + 1) / 2)
    assert len(step.graphs) == 2


def test_dimensions_that_change_places():
    step = Step(lambda x: x.sum(1) * x.shape[0], build=interpret, strict=True)
    for shape in ((3, 8), (8, 3), (5, 5), (2, 30), (30, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(step(x), x.sum(1) * x.shape[0])
    x = torch.randn(8, 3).t()  # the batch comes second
    torch.testing.assert_close(step(x), x.sum(1) * x.shape[0])


def test_comparison_of_a_size_guards_its_outcome():
    assert len(run(lambda x: x * 2 if x.shape[0] > 5 else x * 3).graphs) == 3
    assert len(run(lambda x: x * 2 if x.shape == (6, 4) else x).graphs) == 2
    assert len(run(lambda x: x * max(x.shape[0], 4)).graphs) == 3


@pytest.mark.parametrize("function", [lambda x: x * len(x), lambda x: sum(x[i] for i in range(x.shape[0]))])
def test_size_that_python_takes_for_a_number_stays_one_and_padding_is_advised(function):
    with pytest.warns(ms.FallbackWarning) as told:
        step = run(function)
    assert len(step.graphs) == len({*ROWS})
    line = f"{__file__}:{function.__code__.co_firstlineno}"
    assert ["dimension 0 of x" in str(each.message) and line in str(each.message) for each in told] == [True]
    assert "pad_to" in str(told[0].message)


def test_size_that_is_looked_up_has_a_graph_for_each():
    assert len(run(lambda x: x * {6: 1, 5: 2, 9: 3, 3: 4, 7: 8}[x.shape[0]]).graphs) == len({*ROWS})
    assert len(run(lambda x: x * (2 if x.shape[0] in {3, 5} else 1)).graphs) == len({*ROWS})


def test_what_leaves_the_step_has_the_size_of_the_call(capsys):
    class Meter:
        num_rows = 0

    meter, told = Meter(), []

    def count(x):
        meter.num_rows += x.size(0)
        ms.callback(told.append, (x.shape[0], x.sum().item() * x.size(0)))
        sys.stdout.write(f"rows {x.shape[0]}\n")
        return x

    ms.callback  # what it imports is imported before the step is traced  # noqa: B018
    step = Step(count, build=interpret, strict=True)
    batches = [torch.full((rows, 4), 0.25) for rows in ROWS]
    for x in batches:
        step(x)
    assert meter.num_rows == sum(ROWS)
    assert told == [(rows, float(rows * rows)) for rows in ROWS]
    assert capsys.readouterr().out.split("\n")[:-1] == [f"rows {rows}" for rows in ROWS]
    assert len(step.graphs) == 1  # the first call is eager, as the meter is seen to count


def test_number_that_changes_beside_a_size_that_changes():
    step = Step(lambda x, scale: x * (scale * x.shape[0] + 1), build=interpret, strict=True)
    for number, rows in enumerate(ROWS):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x, number / 4), x * (number / 4 * rows + 1))
    assert len(step.graphs) <= 3


def test_independent_sizes_equal_eager():
    sizes = [(3, 5, False), (4, 2, True), (5, 5, False), (0, 1, False), (1, 0, True), (7, 3, False), (2, 6, True)]

    def mix(a, b):
        return torch.cat([a, b]).softmax(0), a @ b.T, a.sum() + b.mean(0), a.shape[0] * 2 - b.shape[0]

    step = Step(mix, build=interpret, strict=True)
    for first, second, is_turned in sizes:
        a, b = torch.randn(first, 3), torch.randn(3, second).T if is_turned else torch.randn(second, 3)
        torch.testing.assert_close(step(a, b), mix(a, b), equal_nan=True)


def trainer(optimizer, region=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 3))
    opt = optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.9)
    scaler = torch.amp.GradScaler("cpu")

    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        scaler.scale(loss / x.shape[0]).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scheduler.step()
        return loss

    def accumulating(x, y):
        for part in (0, 1):
            F.cross_entropy(net(x * (part + 1)), y).backward()
        with ms.eager_region():
            norm = float(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        opt.step()
        opt.zero_grad()
        return torch.tensor(norm)

    return net, accumulating if region else step


@pytest.mark.parametrize(
    ("optimizer", "region"),
    [(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), True), (torch.optim.Adam, False)],
    ids=["region", "scaler"],
)
def test_training_goes_on_from_size_to_size(optimizer, region):
    (theirs, eager), (ours, function) = trainer(optimizer, region), trainer(optimizer, region)
    captured = step_of(function, build=interpret, strict=True)
    for number, rows in enumerate((8, 8, 8, 5, 9, 2, 8)):
        torch.manual_seed(number)
        x, y = torch.randn(rows, 4), torch.randint(3, (rows,))
        torch.manual_seed(number)
        expected = eager(x, y).detach()
        torch.manual_seed(number)
        torch.testing.assert_close(captured(x, y), expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


class Text(nn.Module):
    """Embedding, attention over all positions, layer norm and GELU."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + F.scaled_dot_product_attention(hidden, hidden, hidden)
        return self.out(F.gelu(self.linear(self.norm(hidden))))


def text_step(wrap):
    torch.manual_seed(0)
    model = Text()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(tokens):
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return model, wrap(step)


@pytest.mark.usefixtures("lowered_once")
def test_engines_give_the_same_bits_at_each_size_and_keep_few_ready(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_SIZES", 3)
    wraps = [lambda step, engine=engine: ms.step(step, engine=engine, strict=True) for engine in ("serial", "threads")]
    made = [text_step(wrap) for wrap in (lambda step: step, *wraps)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ms.FallbackWarning)
        for length in (7, 16, 33, 5, 16, 16, 40, 7, 2, 33):
            tokens = torch.randint(20, (3, length))
            eager, serial, threads = [step(tokens).detach() for _, step in made]
            torch.testing.assert_close(serial, eager)
            assert torch.equal(serial, threads)
    theirs, ours, others = (model for model, _ in made)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name))
        assert torch.equal(parameter, others.get_parameter(name))
    kept = executables(made[2][1])
    assert len(kept) == 3
    assert {each.name for each in kept} == {"threads"}
