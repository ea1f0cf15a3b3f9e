import pytest
import torch

import millstream as ms
from tests import networks


@pytest.fixture(autouse=True, scope="session")
def _attention_has_its_order():
    """At its first attention on some GPUs PyTorch puts cuDNN's before the others, for good: that is no test's doing."""
    if torch.cuda.is_available():
        query = torch.zeros(1, 1, 8, 8, dtype=torch.half, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(query, query, query)


@pytest.fixture
def exact(monkeypatch):
    """Numbers that can be compared bit by bit: no TF32, no algorithm of cuDNN's that varies."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def names_on_streams():
    """Runs a model of 32 channels on one stream and several: the right numbers, the same on all; kernels' names."""

    def run(make, layout=torch.channels_last):
        torch.manual_seed(0)
        model = make().cuda().half().eval().to(memory_format=layout)
        x = torch.randn(2, 32, 28, 28, device="cuda", dtype=torch.half).contiguous(memory_format=layout)
        results, names = [], []
        with torch.no_grad():
            for settings in ({"streams": 1}, {"streams": 4}, {"streams": 4, "engine": "streams"}):
                torch._dynamo.reset()
                compiled = ms.compile(model, strict=True, **settings)
                results.append(compiled(x))
                (program,) = ms.explain(compiled).to_dict()["programs"]
                names.append([kernel["name"] for kernel in program["kernels"]])
            networks.assert_close(results[0], model.double()(x.double()).half(), 2e-3)
        assert all(torch.equal(each, results[0]) for each in results)
        assert all(sorted(each) == sorted(names[0]) for each in names)
        return names[0]

    return run
