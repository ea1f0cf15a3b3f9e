"""The names by which our own kernels are known on a device."""

import re
from pathlib import Path

import millstream
from millstream.program import OWN_KERNELS, is_generated

LAUNCHED = re.compile(r"from millstream\.kernels\.\w+\.\w+_kernel import (\w+)")


def test_each_kernel_that_is_launched_is_known():
    """Triton, whose functions tell their names, is there where there is a GPU."""
    files = (Path(millstream.__file__).parent / "kernels").rglob("*.py")
    hosts = [file.read_text() for file in files if not file.stem.endswith("_kernel")]
    assert {name for text in hosts for name in LAUNCHED.findall(text)} == OWN_KERNELS


def test_generated_kernels_are_told_from_those_of_libraries():
    assert is_generated("triton_poi_fused_add_3")
    assert not is_generated("_ZN2at6native29vectorized_elementwise_kernelILi4E")
    assert not is_generated("sm90_xmma_wgrad_indexed_implicit_gemm_bf16bf16_bf16f32_f32")
