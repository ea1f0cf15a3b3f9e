"""Suite ``control``: its stand-ins compute, and take more than one way."""

import pytest
import torch

from benchmarks.cases.learners import Learning
from benchmarks.control import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stand_ins_compute(case):
    problem = case.make(torch.device("cpu"), tiny=True)
    batches = getattr(problem, "batches", None) or [problem.first, problem.second]
    if isinstance(problem, Learning):
        step = problem.make_step(problem.model, problem.make_optimizer(problem.model))
        first, second = (step(*batch) for batch in batches[:2])
    else:
        first, second = (problem.model(batch[0]) for batch in batches[:2])
    assert first.isfinite().all()
    assert not torch.equal(first, second)
