"""MILLSTREAM_ENGINE=serial: errors name the kernel and the user's line."""

import pytest
import torch

import millstream as ms
from millstream.errors import GraphError


@pytest.fixture
def lying_operator():
    """An operator whose fake implementation promises another shape than the real one gives."""
    with torch.library._scoped_library("millstream_checked", "FRAGMENT") as library:
        library.define("lie(Tensor x, bool fails) -> Tensor")

        def lie(x, fails):
            if fails:
                raise RuntimeError("out of order")
            return x.new_ones(3, 3)

        library.impl("lie", lie, "CPU")
        library.impl("lie", lambda x, fails: torch.empty_like(x), "Meta")
        yield torch.ops.millstream_checked.lie


@pytest.fixture(autouse=True)
def serial(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("MILLSTREAM_ENGINE", "serial")


def compiled(function):
    return ms.compile(function, strict=True)


def test_wrong_shape_is_told_with_kernel_and_line(lying_operator):
    model = compiled(lambda x: lying_operator(x + 1, False) * 2)
    with pytest.raises(GraphError, match=r"millstream_checked.lie.*test_checked.py:\d+.*\[3, 3\].*\[2, 4\]") as caught:
        model(torch.ones(2, 4))
    assert "lie" in caught.value.kernel


def test_errors_of_kernels_keep_their_type_and_name_the_kernel(lying_operator):
    model = compiled(lambda x: lying_operator(x + 1, True) * 2)
    with pytest.raises(RuntimeError, match="out of order") as caught:
        model(torch.ones(2, 4))
    assert any("millstream_checked.lie" in note and "test_checked.py" in note for note in caught.value.__notes__)


def divide(x):
    return torch.log(x.sin() - 2) @ torch.ones(4, 4)


def test_nan_is_told_where_it_is_asked_for(monkeypatch):
    assert torch.isnan(compiled(divide)(torch.ones(2, 4))).all()
    torch._dynamo.reset()
    monkeypatch.setenv("MILLSTREAM_CHECK_NAN", "1")
    with pytest.raises(GraphError, match=r"NaN") as caught:
        compiled(divide)(torch.ones(2, 4))
    assert "test_checked.py" in str(caught.value)


@pytest.mark.parametrize("setting", ["", "0"])
def test_nan_is_nobodys_matter_by_default(setting, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CHECK_NAN", setting)
    masked = torch.full((2, 4), float("-inf"))
    assert torch.equal(compiled(lambda x: x + masked)(torch.ones(2, 4)), masked)


def test_checked_training_step_is_right():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    @ms.step(strict=True)
    def train_step(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [train_step(torch.ones(3, 4)).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
