"""Nested arguments and results, and results that are arguments, state or views."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

from millstream.capture import Step
from millstream.errors import CaptureError
from tests.capture.worlds import assert_same, interpret

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None
    name: str = "batch"


def captured(function, **options):
    return Step(function, build=interpret, strict=True, **options)


def test_nested_arguments_and_results():
    def step(batch, pairs, *, options):
        y = batch.x * options["scale"]
        if batch.mask is not None:
            y = y * batch.mask
        return {
            "y": y,
            "pair": Pair(y + 1, None),
            "list": [y.sum(), (batch.x, 3, "text")],
            "batch": Batch(y, None, batch.name),
            "pairs": pairs.left - pairs.right[0],
            "ordered": collections.OrderedDict(a=y),
        }

    ours = captured(step)
    for number in range(3):
        batch = Batch(torch.full((2,), float(number)), torch.tensor([1.0, 0.0]))
        pairs = Pair(torch.ones(2), [torch.full((2,), float(number))])
        assert_same(ours(batch, pairs, options={"scale": 2.0}), step(batch, pairs, options={"scale": 2.0}))
    assert len(ours.graphs) == 1
    assert list(ours.graphs[0].signature) == ["batch.x", "batch.mask", "pairs.left", "pairs.right[0]"]
    ours(Batch(torch.ones(2), None), pairs, options={"scale": 2.0})
    assert len(ours.graphs) == 2


def test_results_without_tensors():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()

    ours = captured(step)
    for _ in range(3):
        assert ours(torch.ones(1, 2)) is None
    assert ours.graphs[0].num_runs == 2


def test_an_argument_that_is_returned_is_the_very_object():
    ours = captured(lambda x, y: (x, x * y))
    for _ in range(2):
        x, y = torch.ones(2), torch.ones(2)
        assert ours(x, y)[0] is x


def test_state_that_is_returned_is_the_very_object():
    model = nn.Linear(2, 2)

    def step(x):
        with torch.no_grad():
            model.weight.add_(1)
        return model.weight, model(x)

    ours = captured(step)
    for _ in range(2):
        weight, _ = ours(torch.ones(1, 2))
        assert weight is model.weight


def test_views_become_tensors_of_their_own():
    model = nn.Linear(2, 2)

    def step(x):
        y = x * 2
        return model.weight[0], x[1:], y, y.view(-1), y.t()

    ours = captured(step)
    x = torch.randn(2, 2)
    for _ in range(2):
        results = ours(x)
        assert_same(results, tuple(value.detach() for value in step(x)))
        addresses = {value.untyped_storage().data_ptr() for value in results}
        assert len(addresses) == 5
        assert not addresses & {x.untyped_storage().data_ptr(), model.weight.untyped_storage().data_ptr()}


def test_results_are_detached_and_stay():
    model = nn.Linear(2, 2)

    def step(x):
        return model(x)

    ours = captured(step)
    first = ours(torch.ones(1, 2))
    kept = first.clone()
    ours(torch.zeros(1, 2))
    assert not first.requires_grad
    assert torch.equal(first, kept)


def test_the_same_tensor_twice_in_the_result():
    def step(x):
        y = x + 1
        return y, y

    left, right = captured(step)(torch.ones(2))
    assert left is right


def test_an_argument_that_is_written():
    def step(hidden, x):
        hidden.mul_(0.5).add_(x)
        return hidden.sum()

    ours = captured(step)
    hidden, expected = torch.ones(3), torch.ones(3)
    for number in range(3):
        x = torch.full((3,), float(number))
        assert_same(ours(hidden, x), step(expected, x))
        assert_same(hidden, expected)


def test_closure_tensors_are_read_and_written():
    total = torch.zeros(())
    weights = [torch.ones(2), torch.full((2,), 2.0)]

    def step(x):
        total.add_(x.sum())
        return x * weights[0] + weights[1]

    ours = captured(step)
    for number in range(1, 4):
        assert ours(torch.ones(2)).tolist() == [3, 3]
        assert total.item() == 2 * number
    weights[1].fill_(5.0)
    assert ours(torch.ones(2)).tolist() == [6, 6]
    assert len(ours.graphs) == 1
    weights[1] = torch.zeros(2)
    assert ours(torch.ones(2)).tolist() == [1, 1]


def test_constants_made_in_the_step():
    def step(x):
        return x * torch.tensor([1.0, 2.0]) + torch.arange(2) + torch.tensor(3.0).item()

    ours = captured(step)
    for _ in range(2):
        assert ours(torch.ones(2)).tolist() == [4, 6]


def test_arguments_in_containers_are_not_changed_by_tracing():
    def step(batch):
        return batch.pop("x") * 2

    batch = {"x": torch.ones(2)}
    with pytest.raises(CaptureError, match="changes a container or an object among its arguments"):
        captured(step)(batch)
    assert list(batch) == ["x"]


def test_a_parameter_passed_as_an_argument_is_state():
    weight = nn.Parameter(torch.ones(2))

    def step(weight, x):
        loss = (weight * x).sum()
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        return loss

    ours = captured(step)
    for number in range(3):
        ours(weight, torch.ones(2))
        torch.testing.assert_close(weight.detach(), torch.full((2,), 1 - 0.1 * (number + 1)))


@pytest.mark.parametrize("count", [0, 1])
def test_empty_tensors(count):
    assert captured(lambda x: x.sum())(torch.ones(count, 3)).item() == 3 * count


def test_method_of_a_class():
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(2, 1)
            self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.epoch = 0

        def loss(self, x):
            return self.model(x).square().mean()

        def train(self, x):
            loss = self.loss(x)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            return loss

    class Stepping(Trainer):
        train = Step(Trainer.train, build=interpret, strict=True)

    torch.manual_seed(0)
    ours = Stepping()
    torch.manual_seed(0)
    theirs = Trainer()
    for number in range(5):
        ours.epoch = number  # not read by the step
        assert_same(ours.train(torch.ones(1, 2)), theirs.train(torch.ones(1, 2)))
    assert len(Stepping.__dict__["train"].graphs) == 1


def test_tensors_stored_by_the_step_are_stored_after_every_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.aux = None

        def forward(self, x):
            hidden = self.layer(x)
            self.aux = hidden.square().mean()
            return hidden

    def make():
        torch.manual_seed(0)
        net = Net()
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        logs = {}
        last = None

        def step(x):
            nonlocal last
            last = net(x).sum()
            loss = last + net.aux
            loss.backward()
            opt.step()
            opt.zero_grad()
            logs["loss"] = loss

        return step, lambda: (net.aux, logs["loss"], last)

    ours, read_ours = make()
    theirs, read_theirs = make()
    captured_step = captured(ours)
    earlier = None
    for number in range(5):
        x = torch.full((3, 2), float(number))
        captured_step(x)
        theirs(x)
        assert_same(read_ours(), read_theirs())
        assert all(value is not old for value, old in zip(read_ours(), earlier or (None,) * 3, strict=True))
        earlier = read_ours()
    assert len(captured_step.graphs) == 1
    assert captured_step.graphs[0].num_runs == 4


def test_a_stored_tensor_that_the_step_reads_is_state():
    mean = torch.zeros(())

    def step(x):
        nonlocal mean
        mean = mean * 0.5 + x.mean() * 0.5
        return mean

    ours, before, expected = captured(step), mean, torch.zeros(())
    for number in range(1, 5):
        x = torch.full((2,), float(number))
        expected = expected * 0.5 + x.mean() * 0.5
        assert_same(ours(x), expected)
        assert_same(mean, expected)
    assert before.item() == 0  # it may be the user's by another name
    assert len(ours.graphs) == 1


def test_a_learning_rate_in_the_result_is_a_number():
    weight = nn.Parameter(torch.ones(2))
    opt = torch.optim.SGD([weight], lr=0.5, momentum=0.9)

    def step(x):
        (weight * x).sum().backward()
        opt.step()
        opt.zero_grad()
        return opt.param_groups[0]["lr"]

    ours = captured(step)
    assert [ours(torch.ones(2)) for _ in range(3)] == [0.5] * 3
    opt.param_groups[0]["lr"] = 0.25
    assert ours(torch.ones(2)) == 0.25
    assert type(ours(torch.ones(2))) is float


def test_state_that_is_only_returned_is_watched():
    class Holder:
        def __init__(self):
            self.table = torch.ones(2)

    holder = Holder()
    ours = captured(lambda x: (x * 2, holder.table))
    for value in (1.0, 1.0, 2.0, 3.0):
        holder.table = torch.full((2,), value)
        assert ours(torch.ones(2))[1] is holder.table


def test_modules_and_optimizers_as_arguments():
    def step(model, opt, x, *, clip=None):
        loss = model(x).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        return loss

    def make():
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    ours, theirs = make(), make()
    captured_step = captured(step)
    for _ in range(4):
        assert_same(captured_step(*ours, torch.ones(1, 2), clip=0.5), step(*theirs, torch.ones(1, 2), clip=0.5))
    assert captured_step.graphs[0].state_names[0] == "model.weight"
    assert captured_step.graphs[0].state_names[2] == "opt.momentum_buffer[model.weight]"


@pytest.mark.parametrize("has_state", [False, True], ids=["captured at once", "after an eager call"])
def test_a_view_of_state_in_the_result_is_a_copy_from_the_first_call_on(has_state):
    """What a step returns is the caller's: the next call does not change it."""
    table, model = torch.zeros(4), nn.Linear(4, 1)
    opt = torch.optim.Adam(model.parameters(), 0.1) if has_state else torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        model(x).sum().backward()
        opt.step()
        opt.zero_grad()
        table.add_(1)
        return table[1:3], table, x[0]

    captured = Step(step, build=interpret, strict=True)
    x = torch.ones(2, 4)
    results = [captured(x) for _ in range(3)]
    for number, (view, whole, row) in enumerate(results):
        assert view.tolist() == [number + 1] * 2
        assert whole is table
        assert row.data_ptr() != x.data_ptr()
