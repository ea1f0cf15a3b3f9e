"""Numbers that reach a graph through Python's own functions: computed by the host before each replay, in one graph."""
# ruff: noqa: UP031, F507  of how numbers are put into text

import math
import threading
from math import cos

import numpy as np
import pytest
import torch
from torch import nn
from torch._C import DisableTorchFunction  # by this name a trace does not see it

from millstream.capture.step.step import Step
from millstream.capture.trace.patches.number_conversions import can_be_seen
from tests.capture.worlds import interpret

SCHEDULE = [0.1 * number for number in range(40)]
TABLE = tuple(SCHEDULE)
ARRAY = np.linspace(0, 1, 40)
ROWS = {"weights": [SCHEDULE, ARRAY]}

ONE_GRAPH = {
    "float": lambda s: float(s) / 100,
    "int": lambda s: int(s * 0.5) + 1.0,
    "float of int": lambda s: float(int(s / 3)) * 2,
    "mapped": lambda s: sum(map(float, [s, s + 1])),
    "floor": lambda s: math.floor(s / 3) + math.ceil(s / 7) - math.trunc(s / 2),
    "cos": lambda s: 0.5 * (1 + math.cos(math.pi * s / 100)),
    "pow": lambda s: math.pow(0.99, s) + 0.99**s + pow(int(s), 3, 7),
    "log": lambda s: math.log(s + 1, 2) + math.atan2(s, 3) + math.exp(-5 * (1 - s / 100) ** 2),
    "bits": lambda s: (s & 1) + (s | 4) + (s ^ 5) + (s << 2) + (s >> 1) + ~s,
    "divmod": lambda s: divmod(s, 10)[1] + divmod(100, s)[0],
    "round": lambda s: round(s / 7, 3) + round(s / 3),
    "clip": lambda s: float(np.clip(s / 20, 0, 1)) + np.clip(s, a_min=1, a_max=9),
    "interp": lambda s: float(np.interp(s, [0, 100], [0, 1])) + np.interp(s, ARRAY * 30, ARRAY),
    "ufunc": lambda s: np.cos(s / 100) + np.maximum(s, 3) * 1.0 + np.float32(2) * s + np.sqrt(s) + np.sin(float(s)),
    "round of NumPy": lambda s: np.round(s / 7, 2) + np.searchsorted(ARRAY, s / 50) + np.polyval([1.0, 2.0], s),
    "list": lambda s: SCHEDULE[s] + SCHEDULE[-s] + SCHEDULE[int(s / 2)],
    "tuple": lambda s: TABLE[s % 10],
    "array": lambda s: ARRAY[s] * 2,
    "nested": lambda s: ROWS["weights"][0][s] + ROWS["weights"][1][s],
    "made here": lambda s: [number / 8 for number in range(40)][s],
}


class Counter:
    def __init__(self, count):
        self.count = count


def every_form(counter, x):
    counter.count += 1
    return [x * form(counter.count) for form in ONE_GRAPH.values()]


def captures(function, calls, start=0):
    """How many graphs a step takes that is equal to eager in each call; ``function`` gets a counter and a tensor."""
    made, ours, theirs = [], Counter(start), Counter(start)
    step = Step(lambda x: function(ours, x), build=lambda *given: made.append(1) or interpret(*given), strict=True)
    for _ in range(calls):
        result, known = step(torch.ones(2)), function(theirs, torch.ones(2))
        for one, two in zip(result, known, strict=True):
            assert torch.equal(one, two)
        assert type(ours.count) is type(theirs.count)
        assert ours.count == theirs.count
    return len(made)


@pytest.fixture
def waiting_thread():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    yield thread
    ends.set()
    thread.join()


needs_compiler = pytest.mark.skipif(not can_be_seen(), reason="needs a compiler")


@needs_compiler
@pytest.mark.parametrize("kind", [int, np.int64])
def test_numbers_through_python_take_one_graph(kind):
    assert captures(every_form, 9, kind(1)) == 1


NOT_YET = {
    "bound by name": lambda s: cos(s),
    "constructor of NumPy": lambda s: np.float64(s) * 2,
    "array without dimensions": lambda s: float(np.array(s) * 2),
    "list of NumPy's": lambda s: np.mean([s, 1.0, 2 * s]),
    "bit_length": lambda s: s.bit_length() * 1.0,
    "looked up in a dict": lambda s: {n: n / 2 for n in range(40)}[int(s)],
}


@pytest.mark.xfail(strict=True, reason="C asks the number for a plain one")
@pytest.mark.parametrize("name", NOT_YET)
def test_numbers_through_c_take_one_graph(name):
    def step(counter, x):
        counter.count += 1
        return [x * NOT_YET[name](counter.count)]

    assert captures(step, 5, 1) == 1


@needs_compiler
def test_schedule_is_read_as_it_is_in_each_call():
    """Other items, another list, and one whose items nobody compares, as they are many."""
    for length in (20, 20_000):
        schedule = [0.5 * number for number in range(length)]
        holder = {"schedule": schedule}
        step = Step(lambda x, it, holder=holder: x * holder["schedule"][it], build=interpret, strict=True)
        for it in range(4):
            assert step(torch.ones(2), it).tolist() == [0.5 * it] * 2
        assert len(step.graphs) == 2
        schedule[5] = 7.0
        assert step(torch.ones(2), 5).tolist() == [7.0] * 2
        holder["schedule"] = [float(number) for number in range(length)]
        assert step(torch.ones(2), 6).tolist() == [6.0] * 2
        with pytest.raises(IndexError):
            Step(step.function, build=interpret)(torch.ones(2), length)


@needs_compiler
def test_rate_of_an_optimizer_from_a_schedule(waiting_thread):
    """Another thread that may write takes nothing from it, such as one that loads data."""

    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def step(x, it):
            for group in optimizer.param_groups:
                group["lr"] = SCHEDULE[it] / 10
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    ours, theirs = make(), make()
    step = Step(ours[2], build=interpret, strict=True)
    for it in range(7):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(it))
        torch.testing.assert_close(step(x, it), theirs[2](x, it).detach())
        torch.testing.assert_close(ours[0].weight, theirs[0].weight)
        assert ours[1].param_groups[0]["lr"] == theirs[1].param_groups[0]["lr"]
    assert len(step.graphs) <= 2


def test_items_that_are_no_numbers_select_what_the_step_does():
    names = ["warm", 2.0, None, True, "hot", 3]

    def use(x, it):
        name = names[it]
        return x * (5 if name == "warm" else 7 if name is None else 9 if isinstance(name, str) else name)

    step = Step(use, build=interpret, strict=True)
    for it in (1, 5, 0, 2, 3, 4, 1, 5):
        assert torch.equal(step(torch.ones(2), it), use(torch.ones(2), it))


def test_list_that_the_step_goes_on_changing_is_taken_as_it_was():
    def use(x, it):
        points = [0.0, 10.0]
        value = np.interp(it, points, [0.0, 1.0]) + points[it % 2]
        points[1] = 99.0
        return x * value

    step = Step(use, build=interpret, strict=True)
    for it in range(6):
        assert torch.equal(step(torch.ones(2), it), use(torch.ones(2), it))


def test_number_that_c_takes_plainly_has_a_graph_for_each_value():
    """As before there were numbers of the graph for conversions."""

    def use(x, n):
        with DisableTorchFunction():
            return torch.add(x, x, alpha=float(n))

    step = Step(use, build=interpret, strict=True)
    for n in (1.0, 2.0, 3.0, 2.0):
        assert torch.equal(step(torch.ones(2), n), use(torch.ones(2), n))
    assert len(step.graphs) == 3


CONVERT = {
    "float": lambda x: x * float(x.sum().item()),
    "float of a tensor": lambda x: float(x.sum()),
    "float of a whole number": lambda x: float((x > 1).sum()),
    "int": lambda x: (int(x.sum().item() / 2), int(-x.sum()), int((x > 1).sum()), f"{int((x > 1).any())}"),
    "rounded": lambda x: (math.floor(x.mean().item()), math.ceil(x.mean().item()), round(float(x.sum()), 1)),
    "formatted": lambda x: "%5.2f|%s|%-6d|%%|%r|%e" % (x.sum(), x.sum(), x.sum().item(), x.mean().item(), x.sum()),
    "formatted by name": lambda x: "%(loss).3f after %(n)d" % {"loss": x.sum().item(), "n": len(x)},
    "formatted alone": lambda x: "%g" % x.mean().item(),
}


@pytest.mark.parametrize("use", CONVERT.values(), ids=CONVERT)
def test_what_is_read_from_tensors_is_known_after_the_graph(use):
    step = Step(use, build=interpret, strict=True)
    for start in range(3):
        x = torch.arange(3.0) + start
        result, expected = step(x), use(x)
        assert type(result) is type(expected)
        torch.testing.assert_close(result, expected) if isinstance(result, torch.Tensor) else None
        assert isinstance(result, torch.Tensor) or result == expected
    assert len(step.graphs) == 1


def to_infinity(x):
    try:
        return math.exp(x.sum().item())
    except OverflowError:
        return math.inf


def divided(x):
    try:
        return 1 / x.sum().item()
    except ZeroDivisionError:
        return "by zero"


def to_whole(x):
    try:
        return int(x.sum() / 0)
    except (OverflowError, ValueError):
        return None


def to_text(x):
    try:
        return "%d" % (x.sum() / 0)
    except (OverflowError, ValueError):
        return "none"


@pytest.mark.parametrize("use", [to_infinity, divided, to_whole, to_text])
@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_an_error_comes_to_the_code_that_catches_it(use):
    step = Step(use, build=interpret)
    for value in (1.0, 0.0, 900.0, 2.0):
        x = torch.full((2,), value)
        assert step(x) == use(x)


@pytest.mark.parametrize("use", [lambda x: "%d %d" % x.sum().item(), lambda x: "none" % x.sum().item()])
@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_wrong_formats_are_errors_as_in_eager(use):
    with pytest.raises(TypeError, match="format"):
        Step(use, build=interpret)(torch.ones(2))
