"""Measuring while a program runs: nobody may see that kernels were launched again."""

import types

import pytest
import torch

from millstream.engine.plan_source import compile_plan
from millstream.engine.planning.measure import CostMeter
from millstream.schedule import plan_serial
from tests import networks
from tests.networks import lowered


@pytest.mark.parametrize("kind", networks.ALL)
def test_launching_again_and_putting_back_changes_nothing(kind):
    torch._dynamo.reset()
    restored = []

    def observe(kernel, launch, written):
        result = launch()
        saved = [tensor.clone() for tensor in written]
        restored.extend(saved)
        for _ in range(3):
            launch()
        for tensor, value in zip(written, saved, strict=True):
            tensor.copy_(value)
        return result

    with torch.no_grad():
        program, inputs, expected = lowered(kind().eval(), networks.example(kind)[0])
        run = compile_plan(program.program, plan_serial(program.program.graph), observe=observe)
        assert torch.equal(run(list(inputs))[0], expected)
    if kind is networks.Lstm:
        assert restored, "its cell updates the state in place"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, RuntimeError])
def test_an_interrupted_measurement_changes_nothing(monkeypatch, error):
    """What was written is as one launch leaves it; a call that cannot be captured is noted, anything else passes."""
    counter = torch.zeros(3)

    def launch():
        counter.add_(1)

    def measure(self, kernel, launch, rewind):
        for _ in range(100):
            launch()
        raise error

    monkeypatch.setattr(CostMeter, "__init__", lambda self: None)
    monkeypatch.setattr(CostMeter, "_measure", measure)
    meter = CostMeter()
    meter.costs, meter.error, meter._wanted = {}, None, {0: "key"}
    meter._program = types.SimpleNamespace(graph=types.SimpleNamespace(kernels=[None]))
    if error is RuntimeError:
        meter.observe(0, launch, (counter,))
        assert isinstance(meter.error, RuntimeError)
    else:
        with pytest.raises(error):
            meter.observe(0, launch, (counter,))
    assert counter.tolist() == [1, 1, 1]
