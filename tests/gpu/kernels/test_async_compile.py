"""Kernels of our own are compiled beside Inductor, by Triton itself."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu


def test_none_is_compiled_where_it_is_launched(names_on_streams, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from millstream.kernels.conv2d.conv2d_kernel import conv2d
    from millstream.kernels.depthwise.depthwise_kernel import depthwise
    from millstream.kernels.weights.weights_kernel import convert

    if not hasattr(triton, "AsyncCompileMode"):
        pytest.skip("this Triton compiles where it launches")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (conv2d, depthwise, convert):
        kernel.device_caches.clear()
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts))
    names = names_on_streams(
        lambda: nn.Sequential(
            nn.Conv2d(32, 32, 5, padding=2, groups=32, bias=False),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            *(nn.Conv2d(32, width, 3, padding=1) for width in (32, 32, 40)),
        ),
        layout=torch.contiguous_format,
    )
    assert {"convolve_2d", "convolve_depthwise", "convert_weight"} <= {name.split()[0] for name in names}
    assert "2 × convert_weight" in names
    assert {facts["fn"].name.split(".")[-1] for facts in compiled} == {"conv2d", "depthwise", "convert"}
    assert all(facts["is_manual_warmup"] for facts in compiled)
