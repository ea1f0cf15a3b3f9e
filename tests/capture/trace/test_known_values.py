"""Masks and tables that depend on no input have their values while a step is traced; what a call brings has none."""

import warnings

import pytest
import torch

import millstream as ms
from millstream.capture.step.step import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import assert_same, interpret


def written_by_views(x):
    mask = torch.zeros(4, dtype=torch.bool)
    mask[1] = True
    mask[2:].logical_not_()
    return x[mask] * 2


def copied_to_a_view(x):
    mask = torch.zeros(4)
    mask[1:].view(3, 1).copy_(x[1:, :1] > 0)
    return x[mask > 0]


def memory_shared_by_data(x):
    mask, other = torch.zeros(4), torch.ones(4)
    other.data = mask
    other.copy_(x[:, 0] > 0)
    return x[mask > 0]


def written_by_a_batch(x):
    counts = torch.zeros(4)
    counts -= x.sum(1)
    return x[counts > 0]


def branches_and_numbers(x):
    order = torch.arange(4)
    if (order > 2).any() and order.sum() == 6 and int(order[2]) == 2:
        x = x * float(order[3])
    return x[[int(each) for each in order][::-1]]


def several_in_one_index(x):
    rows = torch.tensor([True, False, True, True])
    pairs = (x @ x.T)[None, torch.ones_like(x @ x.T).triu(1).bool()]
    return x[rows], x[rows, 0], x[:, torch.arange(3) != 1], x[None, rows], pairs, x.masked_select(rows[:, None])


def positions(x):
    rows, columns = torch.where(torch.tril(torch.ones(4, 4)) > 0)
    return (x @ x.T)[rows, columns], torch.unique(torch.arange(6) // 2) * x[0, 0]


def written_through_a_mask(x):
    rows, made = torch.tensor([True, False, True, True]), x.clone()
    made[rows] = x[:3]
    return made


CAPTURED = [written_by_views, branches_and_numbers, several_in_one_index, positions, written_through_a_mask]
REFUSED = [copied_to_a_view, memory_shared_by_data, written_by_a_batch, lambda x: x[torch.rand(4) > 0.5]]


def run(function):
    torch.manual_seed(0)
    return [function(torch.randn(4, 3)) for _ in range(3)]


@pytest.mark.parametrize("function", CAPTURED)
def test_values_without_input_are_known(function):
    step = Step(function, build=interpret, strict=True)
    assert_same(run(step), run(function))
    assert len(step.graphs) == 1


@pytest.mark.parametrize("function", REFUSED)
def test_values_of_a_call_are_not(function):
    step = Step(function, build=interpret)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FallbackWarning)
        ours = run(step)
    assert_same(ours, run(function))
    assert "shape of a result depends on values" in str(told[0].message)


def test_each_size_has_its_mask():
    def step(x):
        return (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)].sum()

    batches = [torch.randn(size, 3) for size in (3, 3, 5, 6, 5, 3)]
    captured = Step(step, build=interpret, strict=True)
    assert_same([captured(each) for each in batches], [step(each) for each in batches])


def test_gradients_pass_through_a_known_mask():
    weight = torch.randn(3, 3, requires_grad=True)

    def step(x):
        scores = (x @ weight)[~torch.eye(4, 3, dtype=torch.bool)]
        return torch.autograd.grad(scores.square().sum(), weight)[0]

    assert_same(run(Step(step, build=interpret, strict=True)), run(step))


def written_by_index(x):
    table = torch.tensor([1.0, 2.0])
    table[0] = 5.0
    return x * table.to(torch.float64)


def written_by_its_view(x):
    table = torch.tensor([1.0, 2.0])
    table.view(2).mul_(3)
    return x * table.to(torch.float64)


def written_after_it_is_detached(x):
    table = torch.tensor([1.0, 2.0])
    same = table.detach()
    table.add_(1)
    return x * same.to(torch.float64)


def written_after_it_is_copied(x):
    table = torch.tensor([1.0, 2.0])
    before = table.to(torch.float64)
    table.add_(1)
    return x * before * table.to(torch.float64)


WRITTEN = written_by_index, written_by_its_view, written_after_it_is_detached, written_after_it_is_copied


@pytest.mark.parametrize("function", WRITTEN, ids=lambda function: function.__name__)
def test_constants_that_are_written_are_copied_as_they_are_then(function):
    x = torch.ones(2, dtype=torch.float64)
    step = ms.step(function, engine="serial", strict=True)
    for _ in range(2):
        assert torch.equal(step(x), function(x))
