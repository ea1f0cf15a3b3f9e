"""Checks of values that are known after the graph: captured, and what they raise or print is as in eager Python."""

import warnings

import pytest
import torch

from millstream.capture.step.step import Step
from millstream.errors import CaptureError
from tests.capture.effects.checking import CHECKS, NO_CHECKS, WAYS
from tests.capture.worlds import interpret

VALUES = 1.0, 2.0, 1e6, 3.0, float("nan"), 1.5, float("inf"), 0.5


def outcomes(step, capsys, caplog):
    w, told = torch.ones(3), []
    for value in VALUES:
        caplog.clear()
        w.fill_(1)
        try:
            result = step(torch.full((2, 3), value), w)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            last = error.__traceback__
            while last.tb_next is not None:
                last = last.tb_next
            told.append((type(error), [*map(str, error.args)], vars(error).get("loss"), last.tb_lineno))
        else:
            told.append((result, w.clone()))
        told.append((capsys.readouterr().out, caplog.messages[:]))
    return told


@pytest.mark.parametrize("check", [*CHECKS, *WAYS], ids=lambda check: check.__name__)
def test_check_is_captured_and_raises_after_the_graph(check, capsys, caplog):
    step = Step(check, build=interpret, strict=True)
    ours, theirs = outcomes(step, capsys, caplog), outcomes(check, capsys, caplog)
    assert len(step.graphs) == 1
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("step", NO_CHECKS, ids=lambda step: step.__name__)
def test_what_decides_more_is_refused(step):
    with pytest.raises(CaptureError, match=r"branches on|caught"):
        Step(step, build=interpret, strict=True)(torch.ones(2, 3), torch.ones(3))


def test_step_is_done_where_a_check_raises():
    w = torch.ones(2)

    def train(x):
        loss = (w * x).sum()
        if torch.isnan(loss):
            raise ValueError("nan")
        w.sub_(1)

    step = Step(train, build=interpret, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(2))
        with pytest.raises(ValueError, match="nan") as raised:
            step(torch.full((2,), float("nan")))
    assert "after a captured step, which is done" in raised.value.__notes__[0]
    assert w.tolist() == [-1, -1]
