"""What every test shares: no GPU, no GPU test; the same random numbers in every run; one hypothesis profile."""

import gc
import logging
import os
import random
import sys
import threading
from pathlib import Path

# Before torch is imported: tiny kernels on two threads wait for each other, and for minutes where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each process would build for each vector instruction set of the machine, to see whether that can be.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# What a test changes in the compiler must be seen: nothing is found that another test has lowered.
os.environ.setdefault("MILLSTREAM_WARM_START", "0")
os.environ.setdefault("MILLSTREAM_TRACES", "0")  # also where a test has programs kept

import numpy as np
import pytest
import torch
from hypothesis import settings

from millstream._torch.modes import switches
from millstream.signals import MARKED
from tests.clocks import HANG_S
from tests.linker import use_quick_linker

use_quick_linker()

# pytest listens to loggers that do not propagate: PyTorch would write down each graph for it, in half of Dynamo's time.
logging.root.manager.loggerDict.pop("torch.__trace", None)
# Dynamo empties the processor's caches to time the guards of each graph, for a log: 30 ms each.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# A seed for devices that there are not is kept for later with the text of its whole stack, a millisecond each.
for _of_device in (torch.cuda.random, torch.xpu.random, torch.mtia):
    if not torch.accelerator.is_available():
        _of_device._lazy_call = lambda *_, **__: None

# Two shared cores: time says nothing about a property.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


class FailuresAtOnce:
    """Tells each failure when it is there: a run that is cut off would tell none."""

    def __init__(self, config):
        self._config = config

    def pytest_runtest_logreport(self, report):
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:  # the processes of xdist have none
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid} ({report.when}):\n{report.longreprtext[-3000:]}")


def pytest_configure(config):
    if os.environ.get("CI"):
        config.pluginmanager.register(FailuresAtOnce(config))


SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """No test leaves handlers of signals that wait for code which is over."""
    left, MARKED.levels[:] = [*MARKED.levels], []
    if left or MARKED.handlers:
        MARKED.forget()
        pytest.fail(f"{item.nodeid} leaves marked code: {left}")


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Compiled code goes after each file, and what stays is hidden: looking through it all would take a second."""
    hook = sys.excepthook
    yield
    sys.excepthook = hook  # each process group that was made has put its own around that
    torch._dynamo.reset()
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread.name == "millstream-feed"]
    for thread in left:  # its feed may have gone just now
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in left), "a feed outlives the file that made it"
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_switch_is_left():
    """PyTorch's global switches are after each test as before: the next one depends on them."""
    before, kept = switches.present(), switches.remember()
    yield
    left = {switch.name: switch.read() for switch in switches.present().changed_since(before)}
    switches.put_back(kept)
    assert not left
    assert switches.present() is before


@pytest.fixture(autouse=True)
def _seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def programs_of_this_run(tmp_path_factory):
    """A folder that the workers of one run share."""
    folder = Path(tmp_path_factory.getbasetemp())
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def lowered_once(programs_of_this_run):
    """For tests about running programs, not about lowering them: a graph that was lowered before in this run is found.

    They come back from disk, as in a user's second process. Compiled code of the library stays where it is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_WARM_START", "1")
        patch.setattr("millstream.lower.kept.program_files.cache_folder", lambda: programs_of_this_run)
        yield
