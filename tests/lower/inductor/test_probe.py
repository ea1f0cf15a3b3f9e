"""The question to the C++ compiler that is asked early."""

import threading

import pytest
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

from millstream.lower.inductor import probe
from tests.clocks import HANG_S


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch):
    """Waits until Inductor was asked, and says in which threads."""
    threads = []
    once = threading.Event()

    def answer():
        threads.append(threading.current_thread())
        once.set()
        raise OSError("no compiler")  # code that needs the answer gets the error

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", answer)
    probe._ask_once.cache_clear()
    yield lambda: (once.wait(HANG_S), threads)[1]
    probe._ask_once.cache_clear()


def test_it_is_asked_once_in_another_thread(asked):
    for _ in range(2):
        probe.ask_early([torch.zeros(2), 3.0])
    (thread,) = asked()
    assert thread is not threading.current_thread()
    thread.join(HANG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "inputs", [[], [3.0], [torch.zeros(2, device="meta")], [torch.zeros(2), torch.zeros(2, device="meta")]]
)
def test_it_is_not_asked_for_another_device(asked, monkeypatch, inputs):
    monkeypatch.setattr(threading, "Thread", None)  # to make one would raise
    probe.ask_early(inputs)


def test_workers_start_early_for_a_gpu_alone(monkeypatch):
    started = []
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: started.append(True))
    probe.ask_early([torch.zeros(2, device="meta")])
    assert not started
    probe.ask_early([Elsewhere(), 3.0])
    assert started == [True]


def test_who_cannot_start_workers_is_not_told(monkeypatch):
    def refuse():
        raise OSError("no more processes")

    monkeypatch.setattr(AsyncCompile, "wakeup", refuse)
    probe.ask_early([Elsewhere()])
