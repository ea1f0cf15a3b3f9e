"""What Python reads of an argument besides its shape and dtype: another one is noticed, or the read is refused."""

import pytest
import torch
from torch import nn

from millstream.capture import Step
from millstream.errors import CaptureError
from tests.capture.worlds import interpret

BASE = torch.arange(8.0)


def tagged(value):
    x = torch.ones(2)
    x.tag = value
    return x


def graded(has_gradient):
    x = torch.ones(2, requires_grad=True)
    if has_gradient:
        x.grad = torch.ones(2)
    return x


NOTICED = {
    "offset": (lambda x: x * (1 + x.storage_offset()), [BASE[:2], BASE[:2], BASE[2:4], BASE[4:6]]),
    "attribute": (lambda x: x * x.tag, [tagged(1.0), tagged(1.0), tagged(2.0)]),
    "attribute that appears": (lambda x: x * (1 + hasattr(x, "tag")), [torch.ones(2), torch.ones(2), tagged(1)]),
    "contiguous": (lambda x: x * (2 if x.is_contiguous() else 3), [torch.ones(2, 2), torch.ones(2, 2).t()[:1]]),
    "class": (lambda x: x * (1 + isinstance(x, nn.Parameter)), [torch.ones(2), nn.Parameter(torch.ones(2))]),
    "requires_grad": (lambda x: x.detach() * (1 + x.requires_grad), [torch.ones(2), graded(False)]),
}  # fmt: skip


@pytest.mark.parametrize("read", NOTICED)
def test_another_one_is_noticed(read):
    function, arguments = NOTICED[read]
    step = Step(function, build=interpret, strict=True)
    for argument in arguments:
        assert torch.equal(step(argument), function(argument).detach())


REFUSED = {
    "_base": (lambda x: x * (2 if x._base is None else 3), torch.ones(2)),
    "_version": (lambda x: x * x._version, torch.ones(2)),
    "untyped_storage": (lambda x: x * x.untyped_storage().nbytes(), torch.ones(2)),
    "the gradient of one of its arguments": (lambda x: x.detach() * (x.grad is None), graded(True)),
}


@pytest.mark.parametrize("read", REFUSED)
def test_it_is_refused(read):
    function, argument = REFUSED[read]
    with pytest.raises(CaptureError, match=f"The step reads .*{read}"):
        Step(function, build=interpret, strict=True)(argument)
