"""Results have the strides that they would have if nothing were done to convolutions."""

import pytest
import torch
from torch import nn

from millstream.kernels.channels_last import KEEP, keep_strides
from tests.kernels.stand_ins import own_kernels, pretended_gpu
from tests.kernels.test_channels import DOUBLE, Net, changed, close
from tests.networks import lowered

__all__ = ["own_kernels", "pretended_gpu"]


def conv(inputs, outputs, window=3):
    return nn.Conv2d(inputs, outputs, window, padding=window // 2)


NETWORKS = {
    "bare": (lambda x, a: a(x), [conv(16, 24)]),
    "with what follows": (lambda x, a, b: torch.relu(b(torch.relu(a(x)))), [conv(16, 18), conv(18, 18)]),
    "a sum": (lambda x, a, b: torch.relu(a(x) + b(x)), [conv(16, 18), conv(16, 18)]),
    "several": (lambda x, a, b: (a(x), torch.relu(b(a(x))).flatten(2)), [conv(16, 12), conv(12, 24)]),
    "one read again": (lambda x, a, b: (y := torch.relu(a(x)), b(y)), [conv(16, 20), conv(20, 16)]),
    "side by side": (lambda x, a, b: torch.cat([torch.relu(a(x)), b(x)], 1), [conv(16, 16), conv(16, 24)]),
    "of what comes from outside": (lambda x, a: (x[:, :, 1:], a(x).mean((2, 3))), [conv(16, 40)]),
}


def leaves(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize(
    ("layout", "image_layout"),
    [
        (torch.contiguous_format, torch.contiguous_format),
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
    ],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_strides_are_those_of_eager(own_kernels, name, layout, image_layout):
    torch.manual_seed(0)
    function, convolutions = NETWORKS[name]
    model = Net(lambda *arguments: leaves(function(*arguments)), *convolutions).to(DOUBLE).to(memory_format=layout)
    x = torch.randn(2, 16, 8, 6, dtype=DOUBLE).contiguous(memory_format=image_layout)
    torch._dynamo.reset()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):  # without oneDNN Inductor does as for a GPU
        (*_, got), expected = lowered(model, x), model(x)
    for mine, wanted in zip(got, expected, strict=True):
        close(mine, wanted)
        assert mine.stride() == wanted.stride()
    assert own_kernels, "something was done to convolutions"


def test_only_what_comes_behind_convolutions_is_kept():
    model = Net(lambda x, a: (x + 1, a(x), a(x)[:, :2], a(x).mean((1, 2, 3))), conv(16, 8)).to(DOUBLE)
    gm = changed(model, torch.randn(2, 16, 8, 6, dtype=DOUBLE), keep_strides)
    results = next(iter(reversed(gm.graph.nodes))).all_input_nodes
    assert [node.target is KEEP for node in results] == [False, True, False, False]
