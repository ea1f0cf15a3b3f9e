"""What is computed comes in the right order: gradients beside what all blocks share, and readers before writers."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import millstream as ms
from tests.capture.copies.programs import make_program
from tests.capture.copies.running import run
from tests.lower.workarounds.lists import lists_as_on_a_gpu


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.main, self.beside = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(inputs, outputs, 1)
        self.time = nn.Linear(8, outputs)

    def forward(self, x, t):
        out = self.beside(x) + self.main(functional.silu(x)) + self.time(functional.silu(t))[:, :, None, None]
        return out / 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.first = nn.Linear(8, 8), nn.Conv2d(2, 8, 3, padding=1)
        self.down, self.behind = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.low, self.high, self.last = Block(32, 16), Block(24, 8), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x, t):
        t = self.time(t)
        high = self.first(x)
        low = self.down(high)
        low = self.low(torch.cat([low, low], 1), t)
        low = self.behind(functional.interpolate(low, scale_factor=2.0))
        return self.last(self.high(torch.cat([low, high], 1), t))


@pytest.mark.parametrize("way", ["step", "compile"])
def test_gradients_of_upsampling_are_right(way):
    torch.manual_seed(0)
    net = Net().double()
    x, t = torch.randn(2, 2, 8, 8).double(), torch.randn(2, 8).double()

    def gradients(model):
        model(x, t).square().sum().backward()

    gradients(net)
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    if way == "step":
        ms.step(lambda: gradients(net), engine="serial", strict=True)()
    else:
        gradients(ms.compile(net, engine="serial", strict=True))
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


ORDERS = pytest.mark.parametrize("is_last_first", [False, True])


def train_element_wise(wrap, num_weights):
    weights = [nn.Parameter(torch.tensor([1.0, 2.0]) + number) for number in range(num_weights)]
    optimizer = torch.optim.SGD(weights, 0.1)

    def step(x):
        y = x * 1.5
        for weight in weights:
            y = y * weight + 1
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, y.sum(), y * 2

    call = wrap(step)
    results = [result for number in range(3) for result in call(torch.full((2, 2), number / 4))]
    return [*results, *(weight.detach() for weight in weights)]


@pytest.mark.parametrize("num_weights", [1, 2])
def test_what_reads_parameters_comes_before_their_update(num_weights):
    with lists_as_on_a_gpu():
        ours = train_element_wise(lambda step: ms.step(step, strict=True), num_weights)
    for our, their in zip(ours, train_element_wise(lambda step: step, num_weights), strict=True):
        torch.testing.assert_close(our, their)


def test_a_reader_after_the_update_is_refused(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "foreach-reads")
    with lists_as_on_a_gpu(), pytest.raises(ms.CaptureError, match="that has been overwritten by then"):
        train_element_wise(lambda step: ms.step(step, strict=True), 1)


def copy_what_both_are_made_from(a, b, c):
    difference = b - c
    torch._foreach_copy_([a, b], [difference, difference * 2])
    return difference.sum()


@ORDERS
def test_items_made_from_one_value_do_not_wait_for_each_other(is_last_first):
    results = []
    for call in (copy_what_both_are_made_from, ms.compile(copy_what_both_are_made_from, strict=True)):
        state = [torch.arange(8.0) * number for number in (1, 2, 5)]
        with lists_as_on_a_gpu(is_last_first=is_last_first):
            results.append([call(*state), *state])
    for our, their in zip(*results, strict=True):
        assert torch.equal(our, their)


def test_items_that_wait_for_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "foreach-parts")
    state = [torch.arange(8.0) * number for number in (1, 2, 5)]
    call = ms.step(copy_what_both_are_made_from, strict=True)
    with lists_as_on_a_gpu(), pytest.raises(ms.CaptureError, match="is written meanwhile"):
        call(*state)


@ORDERS
def test_random_lists(is_last_first):
    with lists_as_on_a_gpu(is_last_first=is_last_first):
        outcomes = [run(make_program(seed, large=True)) for seed in (151, 407, 458)]
    assert all(outcome.is_captured for outcome in outcomes)
