"""On a GPU: kernels that start early compute what they do one after another."""

import pytest
import torch

import millstream as ms
from millstream.api import executables
from millstream.lower.dependent_launch import VARIABLE
from tests import networks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the device launches no kernel early")
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("setting", ["1", "2"])
@pytest.mark.parametrize("kind", [networks.ResNet, networks.Transformer])
def test_early_kernels_change_no_result(kind, setting, streams, monkeypatch):
    monkeypatch.setenv(VARIABLE, setting)
    model = kind().cuda().eval()
    graph = ms.compile(model, strict=True, streams=streams)
    x, _ = networks.example(kind, "cuda")
    with torch.no_grad():
        for _ in range(3):
            networks.assert_close(graph(x), model(x), 1e-4)
        first = graph(x)
        assert all(torch.equal(graph(x), first) for _ in range(100))
    program = executables(graph)[0].lowered.program
    tuners = [call.target.__self__ for call in program.calls if hasattr(call.target, "__self__")]
    tuners = [tuner for tuner in tuners if hasattr(tuner, "triton_meta")]
    assert tuners
    for tuner in tuners:
        assert tuner.triton_meta["launch_pdl"] == ("gdc_wait()" in tuner.fn.src)
    assert any(tuner.triton_meta["launch_pdl"] for tuner in tuners)
