"""Suite ``alternatives`` tells what its programs have tried, and nothing else."""

import torch

from benchmarks import alternatives
from benchmarks.decode import ONE_TOKEN
from benchmarks.measuring.suite import Settings

SETTINGS = Settings(torch.device("cpu"), rounds=2, tiny=True)


@torch.no_grad()
def test_everything_is_tried_though_suites_try_nothing_while_they_time(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_TUNE", "first")  # as suites do
    tried = alternatives.try_all(ONE_TOKEN, SETTINGS)
    assert {each.alternative for each in tried} == {"few-rows"}
