"""Random programs on a virtual device that runs streams in any order they allow: the bits of one stream."""

import pytest
import torch

from millstream.manual.ordering import Ordering
from millstream.manual.scope import SerialScope, streams
from tests.device.virtual_device import make_virtual_context
from tests.manual.programs import NUM_INPUTS, SIZE, make_program, run_program
from tests.manual.virtual_torch import VirtualTorch

NUM_STREAMS = 4


def run(steps, seed, context=None, mood="random", *, starve=()):
    """Run a program on a virtual device; give the bits of what is left, and of all that was ever written."""
    context, device = context or make_virtual_context(mood, seed)
    device.starved = starve
    values = make_inputs(seed)
    with VirtualTorch(device) as virtual, torch.no_grad():
        inputs = [virtual.tensor(value) for value in values]
        left = run_program(steps, inputs, lambda n: streams(n, context), NUM_STREAMS)
        values = [virtual.read(tensor) for tensor in left]
    assert context.current_stream() is device.default
    return values, virtual.written


def make_inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(SIZE, SIZE, generator=generator) for _ in range(NUM_INPUTS)]


def run_on_one_stream(steps, seed):
    with torch.no_grad():
        return run_program(steps, make_inputs(seed), SerialScope, NUM_STREAMS)


def agree(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mood", ["eager", "lazy", "random"])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_bits_of_one_stream(seed, mood):
    steps = make_program(seed, 60, NUM_STREAMS)
    values, _ = run(steps, seed, mood=mood)
    assert agree(values, run_on_one_stream(steps, seed))


class Dropped:
    """Leaves out one wait of all that an ordering asks for.

    Those at forks do not count: a stream that is entered waits for its fork whatever is done there.
    """

    def __init__(self, monkeypatch, which):
        self.count = 0
        wait = Ordering._wait

        def drop(ordering, event, stream, steps):
            wait(ordering, event, stream, steps)
            if event % 2 == 0:  # a tail
                if self.count == which:
                    steps.pop()
                self.count += 1

        monkeypatch.setattr(Ordering, "_wait", drop)


def differs_without(monkeypatch, steps, seed, which, expected):
    """Whether leaving out a wait shows when the device runs what it waited for as late as it may."""
    every = range(NUM_STREAMS)
    for starve in (*([one] for one in every), *([other for other in every if other != one] for one in every)):
        with monkeypatch.context() as patch:
            Dropped(patch, which)
            _, written = run(steps, seed, mood="lazy", starve=starve)
        if written != expected:
            return True
    return False


@pytest.mark.parametrize("seed", [0, 1])
def test_every_wait_of_a_program_is_needed(seed, monkeypatch):
    steps = make_program(seed, 40, NUM_STREAMS, flat=True)
    with monkeypatch.context() as patch:
        counted = Dropped(patch, None)
        _, expected = run(steps, seed, mood="eager")
    assert counted.count > 10
    found = [differs_without(monkeypatch, steps, seed, which, expected) for which in range(counted.count)]
    assert all(found), found
