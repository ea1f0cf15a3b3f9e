"""Operators that are not PyTorch's own: captured, or named with the reason."""

import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.compile_fx  # as builds do: what a trace imports is taken back as if the step had done it
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import millstream as ms
from millstream.capture import Step
from millstream.errors import CaptureError
from tests.capture.worlds import World, check, interpret


@torch.library.custom_op("millstream_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


scaled.register_fake(lambda x, factor: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("millstream_tests::doubled_in_place", mutates_args=("x",))
def doubled_in_place(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("millstream_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def in_place(x):
    doubled_in_place(x)
    return x


def attended(x):
    queries = x.detach().reshape(1, 1, 6, 4)
    return flex_attention(queries, queries, queries, score_mod=lambda score, b, h, i, j: score + (i - j))


@pytest.mark.parametrize(
    "function",
    [lambda x: scaled(x, 3.0), lambda x: in_place(x * 1), Sine.apply],
    ids=["custom", "in place", "autograd"],
)
def test_custom_operators_are_captured(function):
    def make():
        model = nn.Linear(4, 4)
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = model(x).square().mean() + function(model(x).detach()).mean() + Sine.apply(model(x)).mean()
            loss = loss + scaled(model(x), 0.5).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, [model], [opt])

    check(make, [(torch.randn(6, 4),) for _ in range(4)])


@pytest.mark.parametrize("has_group", [False, True])
def test_flex_attention_is_captured(has_group, monkeypatch):
    """It is compiled on its own; Dynamo forgets what it knows of PyTorch's functions where a process group is made."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    x = torch.randn(6, 4)
    captured = Step(attended, build=interpret, strict=True)
    for _ in range(2):
        torch.testing.assert_close(captured(x), attended(x))


TANH = torch.fx.symbolic_trace(nn.Tanh())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_fake, "no fake impl registered"),
        (lambda x: torch.ops.higher_order.run_const_graph(TANH, (x,)), "higher-order operator run_const_graph"),
    ],
    ids=["without fake", "higher order"],
)
def test_others_are_named_with_the_line(function, reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        Step(lambda x: function(x), build=interpret, strict=True)(torch.ones(3))
    assert caught.value.where.startswith(__file__)


@pytest.mark.parametrize("probability", [0.0, 1])
def test_a_branch_on_a_random_number_that_always_goes_one_way_is_captured(probability):
    def make():
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            for layer in model:
                if torch.rand([]) >= probability or (layer is model[0] and not torch.rand(()) < 0):
                    x = torch.tanh(layer(x))
            loss = x.square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, [model], [opt])

    check(make, [(torch.randn(6, 4),) for _ in range(4)])


def test_a_branch_on_a_random_number_is_refused_where_it_may_go_either_way():
    for limit in (0.5, -0.0, 1e-30):
        with pytest.raises(CaptureError, match="branches on a tensor's value"):
            Step(lambda x, at=limit: x * 2 if torch.rand(()) > at else x, build=interpret, strict=True)(torch.ones(3))


def scale_by_root(x: torch.Tensor, count: int):
    if x.size(0) > 2:
        return x * torch.sqrt(torch.tensor(count, dtype=torch.float))
    return x


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_a_function_of_torch_jit_is_captured_as_the_python_it_was_made_from():
    scripted = torch.jit.script(scale_by_root)

    def make():
        model = nn.Linear(4, 4)
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = scripted(model(x), 3).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        return World(step, [model], [opt])

    check(make, [(torch.randn(6, 4),) for _ in range(4)])


@pytest.mark.filterwarnings("ignore")  # as with users, whose warnings are no errors
def test_a_triton_kernel_is_named_as_such():
    """Its launcher asks for addresses; a stand-in for it does so as well, where there is no Triton."""
    launcher = {"__name__": "triton.runtime.jit"}
    place = Path(torch.__file__).parents[1] / "triton" / "runtime" / "jit.py"
    exec(compile("def launch(x): return x.data_ptr()", place, "exec"), launcher)

    def step(x):
        y = x * 2
        launcher["launch"](y)
        return y

    with pytest.raises(CaptureError, match="launches a Triton kernel") as caught:
        Step(step, build=interpret, strict=True)(torch.ones(3))
    assert caught.value.where.startswith(__file__)
    assert "custom_op" in caught.value.remedy


SCALE = 2.0


@torch.library.triton_op("millstream_tests::expanded", mutates_args=())
def expanded(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def test_what_is_expanded_later_is_noticed_also_by_another_step(monkeypatch, tmp_path):
    """Also by one that would find the program on disk."""
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MILLSTREAM_WARM_START", "1")
    step, other = (ms.step(lambda x: expanded(x) + 1, strict=True) for _ in range(2))
    x = torch.ones(2)
    for scale in (2.0, 3.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert step(x).tolist() == [scale + 1] * 2
    assert len(step.graphs) == 3
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    assert other(x).tolist() == [8.0] * 2
