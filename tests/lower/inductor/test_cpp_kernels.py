"""C++ kernels that share files: each does what its source says, and is compiled once."""

from __future__ import annotations

import ctypes

import pytest
import torch

from millstream.lower.inductor.cpp_kernels import BATCH, CppKernels
from millstream.lower.inductor.generated_kernels import NativeKernel


def definition(body, arguments):
    types = [argument.rsplit(" ", 1)[0] for argument in arguments]
    head = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C"  void  kernel'
    return f"async_compile.cpp_pybinding({types!r}, r'''\n{head}({', '.join(arguments)})\n{{{body}}}\n''')\n"


def test_kernels_of_several_files_and_kinds_of_arguments():
    kernels = CppKernels()
    names = [f"cpp_{number}" for number in range(BATCH + 2)]
    for number, name in enumerate(names):
        body = f"for (int64_t i = 0; i < n; i++) out[i] = in[i] * f + {number};"
        kernels.add(name, definition(body, ["const float* in", "float* out", "const int64_t n", "double f"]))
    built = kernels.collect()
    assert list(built) == names
    x = torch.randn(5)
    for number, kernel in enumerate(built.values()):
        y = torch.zeros(5)
        assert kernel(x, y, 4, 0.5) is None
        torch.testing.assert_close(y[:4], x[:4] * 0.5 + number)
        assert y[4] == 0


def test_the_function_behind_a_kernel_takes_an_array():
    kernels = CppKernels()
    texts = {
        f"cpp_{value}": definition(f"out[0] = n + {value};", ["float* out", "const int64_t n"]) for value in (3, 4)
    }
    for name, text in texts.items():
        kernels.add(name, text)
    out = torch.zeros(1)
    for value, (name, kernel) in zip((3, 4), kernels.collect().items(), strict=True):
        entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(NativeKernel(name, kernel, texts[name]).entry)
        entry((ctypes.c_int64 * 2)(out.data_ptr(), 10))
        assert out.item() == 10 + value
    assert NativeKernel(name, kernel, "inductor_cpu_integer_div_error").entry is None


def test_whole_numbers_keep_all_their_digits():
    kernels = CppKernels()
    kernels.add("cpp", definition("out[0] = n;", ["int64_t* out", "int64_t n"]))
    out = torch.zeros(1, dtype=torch.int64)
    for n in (2**62 + 1, -1, 0):
        kernels.collect()["cpp"](out, n)
        assert out.item() == n


def test_the_same_source_is_compiled_once():
    first, second = CppKernels(), CppKernels()
    text = definition("out[0] = 42;", ["float* out"])
    first.add("a", text)
    first.add("b", text)
    built = first.collect()
    second.add("c", text)
    assert built["a"] is built["b"] is second.collect()["c"]


def test_wrong_arguments_raise():
    kernels = CppKernels()
    kernels.add("cpp", definition("out[0] = n;", ["float* out", "int64_t n"]))
    kernel = kernels.collect()["cpp"]
    with pytest.raises(TypeError, match="expected 2 arguments"):
        kernel(torch.zeros(1))
    with pytest.raises(TypeError):
        kernel(torch.zeros(1), "1")


def test_sources_with_functions_of_their_own_are_left_to_inductor():
    kernels = CppKernels()
    helper = "static int twice(int x) { return 2 * x; }"
    kernel = 'extern "C" void kernel(float* out) { out[0] = twice(1); }'
    kernels.add("cpp", f"async_compile.cpp_pybinding(['float*'], r'''{helper}\n{kernel}''')")
    assert kernels.collect() == {}


def test_a_source_that_does_not_compile_leaves_all_to_inductor():
    kernels = CppKernels()
    kernels.add("good", definition("out[0] = 7;", ["float* out"]))
    kernels.add("bad", definition("out[0] = nonsense;", ["float* out"]))
    assert kernels.collect() == {}
