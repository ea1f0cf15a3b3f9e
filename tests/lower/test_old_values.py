"""Programs that would read a value after it has been overwritten are found before they run; others are left alone."""

import pytest
import torch

import millstream as ms
from millstream.errors import FallbackWarning, MisreadError
from millstream.lower.workarounds import without

OFF = ("pytorch#197829", "pytorch#198094", "pytorch#198131", "pytorch#198270")
"""The workarounds without which there are such programs."""


def swap(a, b, x):
    t = a.clone()
    a.copy_(b)
    b.copy_(t)
    a.add_(x)


def move_on(a, b, x):
    b.copy_(a)
    a.copy_(x)


def return_old(a, b, x):
    old = a[1:].clone()
    old[0] = 7
    a.copy_(x)
    return old


def flip_what_was_put(a, b, x):
    a.index_put_((torch.arange(3),), x[:3] * 2)
    a.add_(a.flip(0))


def run(update, wrap, size=6, calls=3, **settings):
    a, b = torch.arange(float(size)), torch.arange(float(size)) * 10
    if wrap is ms.step:

        def step(x):
            return update(a, b, x)

        call = ms.step(step, **settings)
    else:
        function = wrap(update, **settings) if wrap else update

        def call(x):
            return function(a, b, x)

    results = [call(torch.arange(float(size)) + 100 * number) for number in range(calls)]
    return [a, b, *(each for each in results if each is not None)]


@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
@pytest.mark.parametrize("update", [swap, move_on, flip_what_was_put])
def test_a_program_that_reads_what_is_overwritten_is_not_run(update, wrap):
    torch._dynamo.reset()
    expected = run(update, None)
    with without(OFF):
        if wrap is ms.compile and update is move_on:  # whose inputs come in an order that is right
            found = run(update, wrap, strict=True)
        else:
            with pytest.warns(
                FallbackWarning, match=rf"{update.__name__}\) reads a value of .* (overwritten|meanwhile)"
            ):
                found = run(update, wrap)
    assert all(map(torch.equal, found, expected))


def test_without_the_check_it_is_run():
    with without((*OFF, "values")):
        found = run(swap, ms.step, strict=True)
    assert not all(map(torch.equal, found, run(swap, None)))


def test_sizes_may_be_symbolic():
    expected = run(flip_what_was_put, None, size=7)
    with without(OFF), pytest.raises(MisreadError, match="meanwhile"):
        run(flip_what_was_put, ms.compile, size=7, dynamic=True, strict=True)
    with without(OFF), pytest.warns(FallbackWarning, match="plain Python"):
        found = run(flip_what_was_put, ms.compile, size=7, dynamic=True)
    assert all(map(torch.equal, found, expected))


def test_a_forward_pass_that_is_not_lowered_has_the_right_gradients():
    def forward(a, b, w, x):
        t = a.clone()
        a.copy_(b)
        b.copy_(t)
        return (t * w).sum() + (a * w * x).sum()

    def gradients(function):
        a, b, w = torch.arange(4.0), torch.ones(4), torch.nn.Parameter(torch.ones(4))
        for _ in range(3):
            function(a, b, w, torch.full((4,), 2.0)).backward()
        return [a, b, w.grad]

    with without(OFF), pytest.warns(FallbackWarning, match="overwritten"):
        found = gradients(ms.compile(forward))
    assert all(map(torch.equal, found, gradients(forward)))


def write_beside(a, b, x):
    """Reads and writes of one tensor by one loop that do not meet, or only within an iteration."""
    a[:3].copy_(a[3:])
    b[::2] = b[1::2]
    square = torch.arange(16.0).view(4, 4) + x[0]
    square[0].copy_(square.sum(0))
    square[:, :2] = square[:, 2:]
    square.sub_(square.amax(1, keepdim=True))
    square.copy_(square.cumsum(1))
    a.copy_(torch.cat([a[:2], a[2:] * 2]))
    b.mul_(b.sum()).add_(a)
    return square


@pytest.mark.parametrize("wrap", [ms.step, ms.compile])
def test_reads_of_other_places_are_no_reason_to_refuse(wrap):
    torch._dynamo.reset()
    assert all(map(torch.equal, run(write_beside, wrap, strict=True), run(write_beside, None)))
