"""State in whose place the step puts another tensor, or other memory: the same as eager, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from millstream.capture import Step
from millstream.errors import CaptureError
from tests.capture.worlds import assert_same, interpret


def numbers(count, size=2):
    return [torch.full((size,), float(number)) for number in range(1, count + 1)]


def taking_turns(model):
    def step(x):
        y = model.now + 2 * model.before + x
        model.before = model.now
        model.now = y
        return y

    return step


def attributes_in_turn(wrap):
    model = nn.Module()
    model.now, model.before = torch.ones(2), torch.zeros(2)
    step = wrap(taking_turns(model))
    return [(step(x), model.now, model.before) for x in numbers(5)]


def buffers_in_turn(wrap):
    model = nn.Module()
    model.register_buffer("now", torch.ones(2))
    model.register_buffer("before", torch.zeros(2))
    seen = []
    step = wrap(taking_turns(model))
    for x in numbers(5):
        seen += [step(x), model.before, *model.state_dict().values()]
    return seen


def entries_exchanged(wrap):
    held = {"left": torch.ones(2), "right": torch.zeros(2)}

    def step(x):
        held["left"], held["right"] = held["right"], held["left"]
        return held["left"] * 2 + held["right"] + x

    step = wrap(step)
    return [(step(x), held["left"], held["right"]) for x in numbers(4)]


def reset_to_the_first(wrap):
    zeros = hidden = torch.zeros(2)

    def step(x):
        nonlocal hidden
        hidden = torch.tanh(hidden + x)
        return hidden

    step, seen = wrap(step), []
    for number, x in enumerate(numbers(7)):
        if number % 3 == 0:
            hidden = zeros
        seen.append(step(x))
    return [*seen, zeros]


def reset_within(wrap):
    zeros = hidden = torch.zeros(2)

    def step(x, start):
        nonlocal hidden
        if start:
            hidden = zeros
        hidden = torch.tanh(hidden + x)
        return hidden

    step = wrap(step)
    return [step(x, number % 3 == 0) for number, x in enumerate(numbers(7))] + [zeros]


def history(wrap):
    mean, seen = torch.zeros(2), []

    def step(x):
        nonlocal mean
        mean = 0.9 * mean + x
        return x.sum()

    step = wrap(step)
    for x in numbers(4):
        step(x)
        seen.append(mean)
    return seen


def nothing_at_first(wrap):
    hidden = None

    def step(x):
        nonlocal hidden
        hidden = x if hidden is None else hidden * 0.5 + x
        return hidden * 2

    step, seen = wrap(step), []
    for number, x in enumerate(numbers(8)):
        if number == 5:
            hidden = None
        seen.append(step(x))
    return seen


def the_old_one_returned(wrap):
    model = nn.Module()
    model.hidden = torch.zeros(2)

    def step(x):
        old = model.hidden
        model.hidden = old + x
        return old, old[0], old * 2

    step = wrap(step)
    return [step(x) for x in numbers(4)]


def written_and_replaced(wrap):
    held = {"sum": torch.zeros(2)}
    first = held["sum"]

    def step(x):
        held["sum"].mul_(0.5)
        held["sum"] = held["sum"] + x
        return held["sum"]

    step = wrap(step)
    return [step(x) for x in numbers(4)] + [first]


def one_tensor_in_two_places(wrap):
    model = nn.Module()
    model.left = model.right = torch.zeros(2)

    def step(x):
        model.left = model.left + x
        return model.left, model.right * 1

    step = wrap(step)
    return [step(x) for x in numbers(4)] + [model.left, model.right]


def shape_of_the_batch(wrap):
    hidden = torch.zeros(4)

    def step(x):
        nonlocal hidden
        hidden = torch.tanh(hidden[: len(x)] + x)
        return hidden.sum()

    step = wrap(step)
    return [step(torch.ones(size)) for size in (4, 4, 3, 3)]


def results_of_changing_shape(wrap):
    model = nn.Module()
    model.last = torch.zeros(1)

    def step(x):
        model.last = x * 2
        return x.sum()

    step = wrap(step)
    seen = [(step(torch.ones(size)), model.last) for size in (4, 3, 2, 3, 4, 2, 3)]
    assert not isinstance(step, Step) or len(step.graphs) == 2
    return seen


def data_of_parameters(wrap):
    model = nn.Linear(2, 1)

    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
            parameter.grad = None
        return loss, model.weight

    step = wrap(step)
    return [copy.deepcopy([value.detach() for value in step(x)]) for x in numbers(4)] + [*model.parameters()]


def data_of_an_average(wrap):
    model = nn.Linear(2, 1)
    average = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.data = 0.9 * mean.data + 0.1 * now.data
        return loss

    step = wrap(step)
    return [step(x) for x in numbers(4)] + [*average.parameters()]


def data_of_a_gradient(wrap):
    weight = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], lr=1.0)

    def step(x):
        (weight * x).sum().backward()
        weight.grad.data = weight.grad.data.clamp(-0.1, 0.1)
        opt.step()
        return weight.grad

    step = wrap(step)
    return [step(x).clone() for x in numbers(4)] + [weight, weight.grad]


def data_put_back(wrap):
    weight = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], lr=0.1)

    def step(x):
        (weight.square() * x).sum().backward()
        old = weight.data
        weight.data = old + 0.5 * weight.grad
        opt.zero_grad()
        loss = (weight.square() * x).sum()
        loss.backward()
        moved = weight.data - old
        weight.data = old
        opt.step()
        opt.zero_grad()
        return loss, moved

    step = wrap(step)
    return [step(x) for x in numbers(4)] + [weight]


def the_old_gradient_returned(wrap):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)

    def step(x):
        old = weight.grad
        weight.grad = None
        (weight * x).sum().backward()
        return old

    step = wrap(step)
    return [step(x).clone() for x in numbers(4)]


def gradients_exchanged(wrap, *, inside):
    left, right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def exchange():
        left.grad, right.grad = right.grad, left.grad

    def step(x):
        (left * x).sum().backward()
        (right * x * 2).sum().backward()
        if inside:
            exchange()
        return x.sum()

    step, seen = wrap(step), []
    for x in numbers(5):
        step(x)
        seen += [left.grad.clone(), right.grad.clone()]
        if not inside:
            exchange()
    return seen


def gradients_exchanged_inside(wrap):
    return gradients_exchanged(wrap, inside=True)


def gradients_exchanged_between(wrap):
    return gradients_exchanged(wrap, inside=False)


CAPTURED = [
    attributes_in_turn,
    buffers_in_turn,
    entries_exchanged,
    reset_to_the_first,
    reset_within,
    history,
    nothing_at_first,
    the_old_one_returned,
    written_and_replaced,
    one_tensor_in_two_places,
    shape_of_the_batch,
    results_of_changing_shape,
    data_of_parameters,
    data_of_an_average,
    data_of_a_gradient,
    data_put_back,
    the_old_gradient_returned,
    gradients_exchanged_inside,
    gradients_exchanged_between,
]


@pytest.mark.parametrize("scenario", CAPTURED, ids=lambda scenario: scenario.__name__)
def test_the_same_as_eager(scenario):
    torch.manual_seed(0)
    ours = scenario(lambda step: Step(step, build=interpret, strict=True))
    torch.manual_seed(0)
    assert_same(ours, scenario(lambda step: step))


def test_a_tensor_that_is_replaced_between_calls_is_read_from_its_place():
    held = {"mean": torch.zeros(2)}

    def update(x):
        held["mean"] = held["mean"] * 0.5 + x
        return held["mean"]

    def read(x):
        return held["mean"] * x

    steps = [Step(function, build=interpret, strict=True) for function in (update, read)]
    expected = torch.zeros(2)
    for x in numbers(20):
        expected = expected * 0.5 + x
        assert_same([step(x) for step in steps], [expected, expected * x])
    assert [len(step.graphs) for step in steps] == [1, 2]


def test_an_argument_that_is_stored_is_the_very_object():
    model = nn.Module()

    def step(x):
        model.last = x
        return x.sum()

    ours = Step(step, build=interpret, strict=True)
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        ours(x)
        assert model.last is x


def shared_data(left, right, x):
    left.data = right.data


def transposed_data(left, right, x):
    left.data = left.data.t()


def other_shape(left, right, x):
    left.data = x[:1]


def other_memory(left, right, x):
    left.data.set_(x)


def shared_gradient(left, right, x):
    left.grad = right.grad = x * 2


def gradient_in_state(left, right, x):
    left.grad = right.data


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (shared_data, "assigns to .data what shares memory"),
        (transposed_data, "assigns to .data what shares memory"),
        (other_shape, "another shape"),
        (other_memory, r"set_\(\)"),
        (shared_gradient, "shares memory with state or with another gradient"),
        (gradient_in_state, "shares memory with state or with another gradient"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_of_two_is_refused(function, reason):
    left, right = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(2, 2))
    ours = Step(lambda x: function(left, right, x), build=interpret, strict=True)
    with pytest.raises(CaptureError, match=reason):
        ours(torch.ones(2, 2))
    assert_same([left, right, left.grad], [torch.ones(2, 2), torch.zeros(2, 2), None])


def test_storing_a_view_of_written_state_is_refused():
    model, total = nn.Module(), torch.zeros(4)
    model.first = torch.zeros(2)

    def step(x, *, add):
        if add:
            total.add_(x)
        model.first = total[:2]
        return x.sum()

    ours = Step(step, build=interpret, strict=True)
    with pytest.raises(CaptureError, match=r"stores in model\.first a view of state"):
        ours(torch.ones(4), add=True)
    ours(torch.ones(4), add=False)
    assert_same([total, model.first], [torch.zeros(4), torch.zeros(2)])


@pytest.mark.parametrize("kind", [nn.Parameter, lambda x: x.detach().requires_grad_()], ids=["parameter", "leaf"])
def test_replacing_what_requires_a_gradient_is_refused(kind):
    model = nn.Linear(2, 2)

    def step(x):
        model.weight = nn.Parameter(model.weight * 0.5)
        model.other = kind(x * 2)
        return model(x)

    ours, before = Step(step, build=interpret, strict=True), model.weight
    with pytest.raises(CaptureError, match="requires a gradient"):
        ours(torch.ones(1, 2))
    assert model.weight is before
