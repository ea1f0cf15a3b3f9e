"""Handlers of signals that come while a model is compiled."""

import copy
import ctypes
import signal

import pytest
import torch
from torch import nn

import millstream as ms
from tests import networks

_raise = getattr(ctypes.CDLL(None), "raise")
_to_come = []  # by moments while something is compiled: the signal that comes then, if one does
_passed = []


def _pass():
    _passed.append(None)
    if _to_come and (number := _to_come.pop(0)):
        _raise(number)


@torch.library.custom_op("millstream_test::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("millstream_test::triple_backward", mutates_args=())
def triple_backward(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 3


@triple.register_fake  # which is asked by Dynamo, by AOT autograd and by Inductor, that of the backward pass as well
@triple_backward.register_fake
def _(x):
    _pass()
    return torch.empty_like(x)


triple.register_autograd(lambda context, gradient: triple_backward(gradient))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return triple(self.norm(x)).square()


class TooSoonError(Exception):
    pass


def fail(number, frame):
    raise TooSoonError


def train(model):
    model.norm.zero_grad()
    model(torch.arange(12.0).reshape(3, 4) % 5).square().sum().backward()


@pytest.fixture(scope="module")
def num_moments():
    torch._dynamo.reset()
    train(ms.compile(Model()))
    return len(_passed)


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [(signal.SIGALRM, fail, TooSoonError), (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt)],
)
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_what_a_handler_raises_while_a_model_is_compiled_comes_from_the_call(
    number, handler, error, stage, num_moments
):
    torch._dynamo.reset()
    eager = Model()
    model = ms.compile(copy.deepcopy(eager), strict=True)
    before = signal.signal(number, handler)
    try:
        _to_come[:] = [0] * (num_moments - 1 if stage == "backward" else num_moments // 3) + [number]
        with pytest.raises(error):
            train(model)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert not _to_come
    if stage == "backward":  # the forward pass is over
        eager(torch.arange(12.0).reshape(3, 4) % 5)
    networks.assert_close(list(model.norm.state_dict().values()), list(eager.norm.state_dict().values()))
    for each in (model, eager):
        train(each)
    networks.assert_close(model.norm.weight.grad, eager.norm.weight.grad)
    networks.assert_close(list(model.norm.state_dict().values()), list(eager.norm.state_dict().values()))
