"""On a GPU each alternative computes the same, and whichever is kept is captured as any program is."""

import pytest
import torch
from torch import nn

import millstream as ms
from millstream._torch.workarounds import without
from millstream.engine import improving
from millstream.lower.alternatives.table import ALTERNATIVES
from millstream.schedule import improve

pytestmark = pytest.mark.gpu


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 256) for _ in range(3))
        self.out = nn.Linear(256, 256)

    def forward(self, x):
        return x + self.out(nn.functional.gelu(self.q(x) * self.k(x)) + self.v(x))


@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize("name", [each.name for each in ALTERNATIVES])
def test_each_computes_the_same_and_is_captured(name, rows, monkeypatch):
    monkeypatch.setattr(improve, "is_faster", lambda pairs: len(pairs) > 1)  # by a pretended clock it always wins
    monkeypatch.setattr(improving, "PAIRS", 3)
    torch.manual_seed(0)
    model = Heads().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(rows, 256, device="cuda")

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters())]

    with without(each.name for each in ALTERNATIVES if each.name != name):
        run = ms.step(step, strict=True, tune="now")
        results = [run(x) for _ in range(9)]
    (program,) = ms.explain(run).programs
    for each in program.alternatives:
        assert each.outcome == improve.KEPT, each
    assert all(map(torch.equal, results[-1], results[-2]))  # the same bits from run to run
    exact = [value.double() for value in step(x)]
    for own, eager in zip(results[-1], exact, strict=True):
        assert (own.double() - eager).norm() <= 0.02 * eager.norm()


@torch.no_grad()
def test_inference_goes_on_as_the_fastest():
    torch.manual_seed(0)
    model = nn.Sequential(*(Heads() for _ in range(3))).cuda().bfloat16()
    run = ms.compile(model, strict=True, tune="now")
    for rows in (1, 64):
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        results = [run(x) for _ in range(9)]
        assert (results[-1] - model(x)).float().norm() <= 0.02 * model(x).float().norm()
    assert any(program.alternatives for program in ms.explain(run).programs)
