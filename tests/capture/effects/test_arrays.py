"""NumPy arrays of a step's tensors that are returned, appended, shown or given to callbacks."""

import numpy as np
import pytest
import torch
from torch import nn

import millstream as ms
from millstream.capture.step.step import Step
from millstream.errors import CaptureError
from tests.capture.worlds import interpret


def both(make, xs, capsys):
    """Results, what is left and the output of eager Python and of a captured step."""
    outcomes = []
    for wrap in (lambda step: step, lambda step: Step(step, build=interpret, strict=True)):
        torch.manual_seed(0)
        function, left = make()
        step = wrap(function)
        outcomes.append(([step(x.clone()) for x in xs], left, capsys.readouterr().out))
    return outcomes, step


def assert_equal(ours, theirs):
    if isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for one, two in zip(ours, theirs, strict=True):
            assert_equal(one, two)
    elif isinstance(theirs, dict):
        assert_equal([*ours.items()], [*theirs.items()])
    elif isinstance(theirs, np.ndarray | np.generic):
        assert type(ours) is type(theirs)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert type(ours) is type(theirs)
        assert ours == pytest.approx(theirs)


def test_arrays_of_results_are_eagers(capsys):
    def make():
        model, preds, rows, called, seen = nn.Linear(3, 2), [], [], [], []
        meter = {"total": 0.0, "best": 0.0, "weight": 1.0}
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            out = model(x)
            loss = out.square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            scores = out.detach().softmax(1).cpu().numpy()
            preds.append(scores)
            rows.extend(out.argmax(1).cpu().numpy())
            preds.extend(out.argmax(dim=1).numpy().tolist())
            ms.callback(seen.append, scores[:, 0])
            print(scores.round(1), f"{scores.mean():.3f}", scores.shape, len(scores))  # noqa: T201
            hits = (scores.argmax(axis=1) == 0).sum()
            centred = np.concatenate([scores - scores.mean(0, keepdims=True), 2 * scores[1:]]).T
            assert isinstance(scores, np.ndarray)
            meter["best"] = scores.max()
            meter["total"] += (out.argmax(1).numpy() == 1).sum() * meter["weight"]
            meter["weight"] += 0.5
            called.append([float(loss.detach().cpu().numpy()), int(out.argmax(1).numpy().sum()), float(scores.mean())])
            print("%.2f %d %s" % (scores.max(), out.argmax(1).numpy()[0], scores[0].round(1)))  # noqa: T201, UP031
            return (
                loss,
                loss.detach().numpy(),
                hits,
                hits.item() / len(scores),
                centred,
                x.numpy().max(),
                np.sqrt(scores) * meter["weight"],
            )

        return step, (preds, rows, called, seen, meter)

    xs = [torch.randn(size, 3) for size in (4, 4, 2, 4)]
    ((theirs, left, shown), (ours, mine, printed)), step = both(make, xs, capsys)
    assert_equal(ours, theirs)
    assert_equal(mine, left)
    assert printed == shown
    assert len(step.graphs) == 2


def test_an_array_is_one_object_and_has_what_is_written_to_its_tensor(capsys):
    def make():
        def step(x):
            y = x * 2
            array = y.numpy()
            y += 1
            return array, array, y, array.copy()

        return step, []

    ((theirs, *_), (ours, *_)), _ = both(make, [torch.ones(3)] * 2, capsys)
    for first, second, *rest in ours:
        assert first is second
        assert_equal((first, *rest), theirs[0][:1] + theirs[0][2:])


WEIGHT = torch.ones(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if (x * 2).numpy().sum() > 1 else x,
        lambda x: x + torch.from_numpy((x * 2).numpy()),
        lambda x: x * np.asarray(x * 2).sum(),
        lambda x: (x * 2).numpy()[(x * 2).numpy() > 1],
        lambda x: np.unique((x * 2).numpy()),
        lambda x: x * float((x * 2).numpy().mean()),
        lambda x: [1, 2, 3, 4, 5, 6, 7][int((x * 2).numpy().sum())],
        lambda x: WEIGHT.add_(x).numpy(),
        lambda x: np.add((x * 2).numpy(), 1, out=np.ones(3)),
    ],
)
def test_what_needs_the_values_at_once_is_refused(function):
    before = WEIGHT.clone()
    with pytest.raises(CaptureError, match="a NumPy array"):
        Step(function, build=interpret, strict=True)(torch.ones(3))
    assert torch.equal(WEIGHT, before)
