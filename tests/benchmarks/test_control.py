"""Suite ``control``: its stand-ins compute, and take more than one way."""

import pytest
import torch

from benchmarks.control import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stand_ins_compute(case):
    problem = case.make(torch.device("cpu"), tiny=True)
    batches = getattr(problem, "batches", None) or [problem.first, problem.second]
    first, second = (problem.model(batch[0]) for batch in batches[:2])
    assert first.isfinite().all()
    assert not torch.equal(first, second)
