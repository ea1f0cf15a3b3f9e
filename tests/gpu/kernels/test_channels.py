"""Convolutions of odd widths on the device itself."""

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import executables
from tests import networks

pytestmark = pytest.mark.gpu


class OddWidths(nn.Module):
    """Two branches of 18 and 36 channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 18, 3, padding=1)
        self.high = nn.Sequential(nn.Conv2d(18, 18, 3, padding=1), nn.ReLU(), nn.Conv2d(18, 18, 3, padding=1))
        self.down, self.low = nn.Conv2d(18, 36, 3, stride=2, padding=1), nn.Conv2d(36, 36, 3, padding=1)
        self.up = nn.Conv2d(36, 18, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        low = torch.relu(self.low(torch.relu(self.down(x))))
        return torch.relu(x + self.high(x) + nn.functional.interpolate(self.up(low), scale_factor=2)), low


@pytest.mark.parametrize("streams", [1, 3, "auto"])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_odd_widths_are_enlarged_and_the_numbers_stay(dtype, streams):
    torch.manual_seed(0)
    model = OddWidths().cuda().eval()
    x = torch.randn(2, 3, 32, 32, device="cuda")
    exact = model.double()(x.double())
    model, x = model.to(dtype), x.to(dtype)
    compiled = ms.compile(model, streams=streams, strict=True)
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x)
    (executable,) = executables(compiled)
    program = executable.lowered.program
    widths = [program.layouts[name].size[1] for name in program.layouts if len(program.layouts[name].size) == 4]
    assert 24 in widths
    assert 40 in widths
    for mine, wanted in zip(got, exact, strict=True):
        assert mine.shape == wanted.shape
        networks.assert_close(mine, wanted.to(dtype), 8 * torch.finfo(dtype).eps)
        assert mine.stride() == model(x)[0 if mine.shape[1] == 18 else 1].stride()
