"""What every test shares: no GPU, no GPU test; the same random numbers in every run; one hypothesis profile."""

import gc
import os
import random

# Before torch is imported: tiny kernels on two threads wait for each other, and for minutes where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a test changes in the compiler must be seen: nothing is found that another test has lowered.
os.environ.setdefault("MILLSTREAM_WARM_START", "0")

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("dev", deadline=None)  # two shared cores: time says nothing about a property
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Compiled code goes after each file, and what stays is hidden: looking through it all would take a second."""
    yield
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
