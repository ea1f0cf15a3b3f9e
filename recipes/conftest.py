"""What the recipes share: a torchvision that imports beside a CPU PyTorch, and fallbacks as errors."""

import importlib.util
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

import millstream as ms

# timm needs torchvision, whose usual wheels are for CUDA. Beside a CPU PyTorch their operators do not load, and
# torchvision cannot be imported; what the recipes use of timm calls none of them.
if importlib.util.find_spec("torchvision") and torch.version.cuda is None:
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def _strict_about_fallbacks():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", ms.FallbackWarning)
        yield
