"""The command ``explain``: the graph of a job's training step, in words or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice

import millstream as ms
from millstream.cli.job import Job

STEPS_UNTIL_CAPTURED = 2  # the first step initialises the optimizer, the second is captured


def explain(make_job: Callable[[], Job], *, as_json: bool) -> int:
    """Capture the step of a job, print what it became, and return the exit code."""
    job = make_job()
    step = ms.step(job.step)
    carry = job.carry
    with ms.feed(islice(job.batches(0), STEPS_UNTIL_CAPTURED), job.device) as batches:
        for inputs, targets in batches:
            _, carry = step(inputs, targets, carry)
    explanation = ms.explain(step)
    print(json.dumps(explanation.to_dict(), indent=2) if as_json else explanation)
    return 0
