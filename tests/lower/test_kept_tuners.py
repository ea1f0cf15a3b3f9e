"""Triton kernels on disk: found by their source, loaded without compiling, and left alone where anything is amiss."""

import threading
from types import SimpleNamespace

import pytest
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.runtime.runtime_utils import triton_cache_dir, triton_hash_to_path_key
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, StaticTritonCompileResult

from millstream.lower.kept.tuners import encode_tuners, offer_tuners

SOURCE = "the source of a kernel"
DEFINITION = f"async_compile.triton('add', '''{SOURCE}''', device_str='cuda')"


def describe(function):
    return f"add{function.version}"


def make_tuner(launcher, **attributes):
    """What Inductor has after it has compiled a kernel, loaded it, and found a way to launch it."""
    kernel = SimpleNamespace(hash="0f", name="add", cubin_path=None)
    result = StaticTritonCompileResult.__new__(StaticTritonCompileResult)
    vars(result).update(kernel=kernel, config="one", compile_meta={"device": 0}, inductor_meta={})
    own = {"fn": describe, "__globals__": {"open": open}, "used_global_vals": {}, "repr": describe, "version": 3}
    tuner = CachingAutotuner.__new__(CachingAutotuner)
    vars(tuner).update(
        fn=SimpleNamespace(_hash_lock=threading.RLock(), **own),
        compile_results=[result],
        launchers=[launcher],
        lock=threading.Lock(),
        benchmark_failure_reasons={},
        inductor_meta={},
        _reload_kernel=launcher,
        **attributes,
    )
    return tuner


@pytest.fixture
def machine_code(tmp_path, monkeypatch):
    """The file in Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompiledTritonKernels, "_cache", {})
    folder = tmp_path.joinpath(triton_cache_dir(0), triton_hash_to_path_key("0f"))
    folder.mkdir(parents=True)
    file = folder / "add.cubin"
    file.write_bytes(b"machine code")
    return file


def test_kernel_is_found_by_its_source_without_compiling(machine_code):
    tuner = make_tuner(lambda: None, benchmark_all_configs=lambda: None)
    before = {**vars(tuner)}, {**vars(tuner.fn)}
    kept = encode_tuners([(tuner, DEFINITION), (None, "a C++ kernel")])
    assert ({**vars(tuner)}, {**vars(tuner.fn)}) == before
    offer_tuners(kept)
    found = CompiledTritonKernels.get(SOURCE).static_autotuner
    assert found.compile_results[0].kernel.cubin_path == str(machine_code)
    assert found.fn.repr(found.fn) == "add3"
    assert found.launchers == []
    assert "benchmark_all_configs" not in vars(found)
    assert CompiledTritonKernels.get(SOURCE + " ") is None


@pytest.mark.parametrize("fault", ["machine code is gone", "spoiled", "another version"])
def test_kernel_is_compiled_where_it_cannot_be_loaded(machine_code, fault):
    kept = encode_tuners([(make_tuner(lambda: None), DEFINITION)])
    if fault == "machine code is gone":
        machine_code.unlink()
    else:
        kept = [(key, "AAAA" if fault == "spoiled" else "gASMBG5vbmWUjARub25llJOULg==") for key, _ in kept]
    offer_tuners(kept)
    assert CompiledTritonKernels.get(SOURCE) is None


def test_kernel_that_triton_launches_itself_is_not_kept(machine_code):
    tuner = make_tuner(lambda: None)
    tuner.compile_results.append("another kind of result")
    assert encode_tuners([(tuner, DEFINITION)]) == []
    assert encode_tuners([(make_tuner(lambda: None, further=open), "multi_kernel(a, b)")]) == []
