"""The user's own mistakes are raised as in eager mode; what Dynamo cannot trace at all runs as it is."""

import logging
import traceback
import warnings

import pytest
import torch
from torch import nn

import millstream as ms
from tests import networks

TARGETS, INDEX = torch.tensor([0, 9]), torch.tensor([0, 5])
MISTAKES = {
    "shapes": (lambda x: x @ x, torch.ones(3, 4)),
    "a number as index": (lambda x: x[5] + 1, torch.ones(3)),
    "a list as index": (lambda x: x[[0, 5]] + 1, torch.ones(3)),
    "a tensor as index": (lambda x: x[INDEX] + 1, torch.ones(3)),
    "negative": (lambda x: x[INDEX - 9] + 1, torch.ones(3)),
    "embedding": (lambda x: nn.functional.embedding(INDEX, x) + 1, torch.ones(3, 2)),
    "many embeddings": (lambda x: nn.functional.embedding(INDEX.repeat(40), x) + 1, torch.ones(3, 64)),
    "index_select": (lambda x: x.index_select(0, INDEX) + 1, torch.ones(3)),
    "class": (lambda x: nn.functional.cross_entropy(x, TARGETS), torch.ones(2, 4)),
    "an item of a list": (lambda x: list(x.shape)[3] + x, torch.ones(3)),
    "a key": (lambda x: {"a": x + 1}["b"], torch.ones(3)),
    "a name": (lambda x: x.no_such_method(), torch.ones(3)),
    "raised": (lambda x: {}[None] if x.shape[0] == 3 else x, torch.ones(3)),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_raised_as_in_eager_mode(mistake, engine, caplog):
    function, x = MISTAKES[mistake]
    compiled = ms.compile(function, engine=engine)
    with caplog.at_level(logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.FallbackWarning)
        for _ in range(2):
            with pytest.raises(Exception) as expected:  # noqa: PT011  whatever it is
                function(x)
            with pytest.raises(expected.type) as found:
                compiled(x)
            assert "user code" not in str(found.value)
    assert not caplog.records


def test_an_index_out_of_range_names_the_line():
    def pick(x, index):
        return torch.tanh(x[index])

    compiled, x = ms.compile(pick, engine="serial", strict=True), torch.randn(3)
    torch.testing.assert_close(compiled(x, INDEX.clamp(max=2)), pick(x, INDEX.clamp(max=2)))
    with pytest.raises(IndexError, match="a dimension has 3 elements") as error:
        compiled(x, INDEX)
    line = pick.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} in pick" in "".join(traceback.format_exception(error.value))
    torch.testing.assert_close(compiled(x, INDEX.clamp(max=2)), pick(x, INDEX.clamp(max=2)))


def test_an_index_out_of_range_in_a_step_is_an_index_error():
    model, index = nn.Embedding(4, 2), torch.tensor([0, 3])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @ms.step(strict=True, engine="serial")
    def step(index):
        loss = model(index).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(index) for _ in range(3)]
    with pytest.raises(IndexError, match="index out of range in self"):
        step(index + 1)
    assert step(index) < losses[-1]


class Scripted(nn.Module):
    """What ``torch.jit`` makes, beside what it does not."""

    def __init__(self, part):
        super().__init__()
        self.part, self.last = part, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.part(x))


def linear():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


JIT = {
    "script": lambda: torch.jit.script(linear()),
    "trace": lambda: torch.jit.trace(linear(), torch.ones(2, 4)),
    "script as a part": lambda: Scripted(torch.jit.script(linear())),
    "trace as a part": lambda: Scripted(torch.jit.trace(linear(), torch.ones(2, 4))),
    "function": lambda: torch.jit.script(scripted),
}


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize("kind", JIT)
def test_what_torch_jit_made_runs_as_it_is(kind):
    made, x = JIT[kind](), torch.randn(2, 4)
    compiled = ms.compile(made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), made(x))
    assert len([each for each in caught if "made from" in str(each.message)]) == 1
    with pytest.raises(ms.CaptureError, match=r"torch\.jit"):
        ms.compile(made, strict=True)(x)


@pytest.mark.parametrize("kind", ["script", "trace", "script as a part"])
def test_a_step_names_what_torch_jit_made(kind):
    model, x = JIT[kind](), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        return networks.train_once(model, optimizer, x, torch.zeros(2, dtype=torch.int64))

    captured = ms.step(step)
    with pytest.warns(ms.FallbackWarning, match=r"torch\.jit.*made from"):
        losses = [captured(x) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_what_only_dynamo_fails_on_runs_as_python():
    @torch.library.custom_op("millstream_tests::only_real", mutates_args=())
    def only_real(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @only_real.register_fake
    def _(x):
        raise RuntimeError("not on fake tensors")

    def function(x):
        return only_real(x) + 1

    compiled, x = ms.compile(function), torch.ones(3)
    with pytest.warns(ms.FallbackWarning, match=r"plain Python.*Dynamo cannot trace it") as caught:
        for _ in range(2):
            assert torch.equal(compiled(x), x * 3)
    assert len(caught) == 1
    with pytest.raises(ms.CaptureError, match="Dynamo cannot trace"):
        ms.compile(function, strict=True)(x)


def test_a_mistake_after_a_part_has_run_does_not_run_it_twice():
    seen = []

    def function(x):
        seen.append(1)
        x = x.sin()
        torch._dynamo.graph_break()
        return x @ x

    with pytest.raises(RuntimeError):
        ms.compile(function)(torch.ones(3, 4))
    assert seen == [1]
