"""Kernels of our own are compiled beside Inductor."""

import contextlib
import threading
from concurrent.futures import Executor, wait
from typing import Any, NamedTuple

import pytest
import torch

from millstream.kernels import launches, registry
from millstream.kernels.launches import TritonLaunch, compiling, pointers
from tests.kernels.stand_ins import graph_of, pretended_gpu  # noqa: F401


class Mode(NamedTuple):
    """In place of Triton's: what is compiled within goes to a pool."""

    pool: Executor
    ignore_errors: bool

    def __enter__(self):
        active.append(self)
        return self

    def __exit__(self, *_):
        wait(begun)
        active.clear()


active: list[Mode] = []
begun: list[Any] = []


class Kernel:
    """In place of one of Triton's."""

    def __init__(self, problem=None):
        self.compiled, self.problem = [], problem

    def warmup(self, *arguments, grid, **constants):
        assert active[0].ignore_errors
        if self.problem is not None:
            raise self.problem
        begun.append(active[0].pool.submit(self._compile, (arguments, grid, constants)))

    def _compile(self, what):
        self.compiled.append((threading.current_thread(), what))


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    begun.clear()
    monkeypatch.setattr(launches, "_asynchronous_mode", lambda: Mode)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def launch(kernel, number=3, dtype=torch.half, many=1, **constants):
    tensor = torch.empty(number, dtype=dtype)
    return TritonLaunch(kernel, (number, 1, 1), (pointers([tensor] * many), number, 0.5), {"TILE": 16, **constants})


def test_each_variant_is_compiled_once_and_elsewhere():
    kernel = Kernel()
    launches = [launch(kernel), launch(kernel, 4), launch(kernel, dtype=torch.bfloat16), launch(kernel, TILE=32)]
    launches += [launch(kernel, many=3), launch(kernel, many=4)]
    with compiling(launches):
        pass
    found = sorted(
        str(([tensor.dtype for tensor in tensors], [tensor.data_ptr() for tensor in tensors], numbers, grid, constants))
        for _, ((tensors, *numbers), grid, constants) in kernel.compiled
    )
    wanted = [([torch.bfloat16], 3, 16), ([torch.half], 4, 16), ([torch.half], 3, 32), ([torch.half] * 4, 3, 16)]
    assert found == sorted(
        str((dtypes, [0] * len(dtypes), [n, 0.5], (n, 1, 1), {"TILE": tile})) for dtypes, n, tile in wanted
    )
    assert threading.main_thread() not in [thread for thread, _ in kernel.compiled]


def test_numbers_in_tuples_make_no_variant():
    kernel, tensors = Kernel(), pointers([torch.empty(3)])
    launches = [TritonLaunch(kernel, (1, 1, 1), (tensors, numbers), {}) for numbers in ((5, 7), (9, 5), (5, 7, 9, 9))]
    with compiling(launches):
        pass
    assert sorted(len(numbers) for _, ((_, numbers), _, _) in kernel.compiled) == [2, 4]


def test_it_is_done_behind_the_body_and_its_threads_are_gone():
    kernel, before = Kernel(), threading.active_count()
    with pytest.raises(KeyError), compiling([launch(kernel)]):
        raise KeyError
    assert len(kernel.compiled) == 1
    assert threading.active_count() == before


def test_a_kernel_that_cannot_be_compiled_hinders_no_other():
    kernel = Kernel()
    with compiling([launch(Kernel(RuntimeError("no"))), launch(kernel)]):
        pass
    assert len(kernel.compiled) == 1


def test_without_triton_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(launches, "_asynchronous_mode", lambda: None)
    with compiling(pytest.fail("asked") for _ in range(1)):
        pass


def test_a_launch_of_a_fake_tensor_is_that_of_the_real_one(pretended_gpu):  # noqa: F811
    pytest.importorskip("triton")
    graph = graph_of(groups=32, window=(5, 5)), graph_of(outputs=64), graph_of(outputs=7)
    depthwise, conv2d, none = (list(registry.find_launches(each)) for each in graph)
    assert [each.constants["WINDOWS"] for each in depthwise] == [((5, 5),)]
    assert [each.constants["IS_POINTWISE"] for each in conv2d] == [False]
    assert not none
