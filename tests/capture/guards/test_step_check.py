"""``check=N``: what changes without any guard noticing is found by capturing again."""

from types import SimpleNamespace

import pytest
import torch

import millstream as ms
from millstream.capture import Step
from millstream.capture.guards.guards import Guards
from millstream.errors import ArgumentError, CaptureError
from tests.capture.worlds import batches, interpret, mlp

scales = dict.fromkeys(range(20_000), 1.5)  # of which only the length is looked at in each call


def scaled(x):
    return x * max(scales.values())  # the line that is named


def test_unnoticed_change_is_an_error_with_value_and_line(monkeypatch):
    step = Step(scaled, build=interpret, strict=True, check=3)
    x = torch.ones(2)
    for _ in range(4):
        assert step(x).tolist() == [1.5, 1.5]
    monkeypatch.setitem(scales, 15_000, 2.5)
    assert [step(x).tolist() for _ in range(2)] == [[1.5, 1.5]] * 2  # until the sixth
    with pytest.raises(CaptureError, match=r"(?s)out of date: it has .*1\.5.* where the step has .*2\.5") as caught:
        step(x)
    assert f"{__file__}:{scaled.__code__.co_firstlineno + 1}" in str(caught.value)


@pytest.mark.parametrize("check", [1, 2])
def test_nothing_is_found_where_nothing_changes(check):
    torch.manual_seed(0)
    results = []
    for options in ({}, {"check": check}):
        torch.manual_seed(0)
        world = mlp(torch.optim.Adam, 0.01, lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))
        step = Step(world.step, build=interpret, strict=True, **options)
        for batch in batches(7, 6, 4):
            step(*batch)
            world.plan.step()
        results.append([parameter.detach().clone() for parameter in world.parameters()])
        assert len(step.graphs) == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_change_of_the_result_alone_is_found(monkeypatch):
    monkeypatch.setattr(Guards, "hold", lambda self: [])
    label = ["a"]
    step = Step(lambda x: (x * 2, label[0]), build=interpret, strict=True, check=2)
    for _ in range(2):
        step(torch.ones(2))
    label[0] = "b"
    with pytest.raises(CaptureError, match=r"the result .*'a'.* where the step has .*'b'"):
        step(torch.ones(2))


def test_it_is_set_by_the_environment_where_it_is_left_out(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CHECK", "7")
    assert ms.step(scaled).check == 7
    assert ms.step(scaled, check=0).check == 0
    monkeypatch.setenv("MILLSTREAM_CHECK", "often")
    with pytest.raises(ArgumentError, match="MILLSTREAM_CHECK is a number of calls"):
        ms.step(scaled)


@pytest.mark.parametrize("check", [-1, 1.5, "2x", True])
def test_what_is_no_number_of_calls_is_refused(check):
    with pytest.raises(ArgumentError, match="check is a number of calls"):
        ms.step(scaled, check=check)


def test_nothing_is_found_in_a_step_with_a_schedule_and_branches():
    results = []
    for wrap in (lambda step: step, lambda step: Step(step, build=interpret, strict=True, check=1)):
        torch.manual_seed(0)
        model, pace = torch.nn.Linear(4, 2), SimpleNamespace(count=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def call(x, model=model, pace=pace, optimizer=optimizer, plan=plan):
            pace.count += 1
            loss = model(x).square().mean() * (pace.count / 4 if pace.count < 4 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plan.step()
            return loss.detach()

        step = wrap(call)
        results.append([*(step(torch.ones(3, 4)) for _ in range(8)), torch.tensor(plan.get_last_lr())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inputs_are_known_by_name():
    """A graph that leaves the optimizer alone is older than the optimizer's state, which comes before arguments."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def call(x, is_due):
        model(x).sum().backward()
        if is_due:
            optimizer.step()

    step = Step(call, build=interpret, strict=True, check=1)
    for number in range(6):
        step(torch.ones(3, 4), number % 3 == 2)
    assert len(step.graphs) == 2
