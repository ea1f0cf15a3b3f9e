"""Conditional nodes, with a driver that only notes what it is called with."""

import ctypes

import pytest

from millstream.device.cuda_graphs import conditional_nodes
from millstream.device.cuda_graphs.conditional_nodes import ConditionalNodes

GRAPH, STREAM, BODIES = 66, 77, (88, 99)


class Driver:
    """The functions that are called, by their names in ``cuda.h``.

    Attributes:
        calls: Their names, in order.
        refuses: Names of the functions that do.
        nodes: The kind and number of bodies of each node.
    """

    def __init__(self):
        self.calls, self.refuses, self.nodes = [], set(), []
        self._bodies = (ctypes.c_void_p * 2)(*BODIES)

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name in self.refuses:
                return 801
            if name == "cuStreamGetCaptureInfo_v2":
                arguments[3]._obj.value = GRAPH
            if name == "cuGraphAddNode":
                assert arguments[1].value == GRAPH
                told = arguments[4]._obj.of.conditional
                self.nodes.append((told.kind, told.size))
                told.graphs = self._bodies
            return 0

        return call


@pytest.fixture
def driver():
    return Driver()


def test_nodes_come_after_the_kernel_that_decides(driver):
    nodes = ConditionalNodes(driver, (9, 0))
    driver.calls.clear()
    assert nodes.branch(STREAM, 5) == BODIES
    _, body = nodes.loop(STREAM, 5)
    assert body == BODIES[0]
    assert driver.nodes == [(0, 2), (1, 1)]  # as CU_GRAPH_COND_TYPE_IF and _WHILE of cuda.h are
    each = [name for name in driver.calls if name != "cuStreamGetCaptureInfo_v2"]
    once = ["cuGraphConditionalHandleCreate", "cuLaunchKernel", "cuGraphAddNode", "cuStreamUpdateCaptureDependencies"]
    assert each == once * 2


def test_what_the_driver_refuses_is_named(driver):
    nodes = ConditionalNodes(driver, (12, 0))
    driver.refuses = {"cuGraphAddNode"}
    with pytest.raises(RuntimeError, match="refuses cuGraphAddNode with the status 801"):
        nodes.branch(STREAM, 5)


def test_a_body_that_fails_is_no_longer_captured(driver):
    nodes = ConditionalNodes(driver, (9, 0))
    driver.refuses = {"cuStreamEndCapture"}
    with pytest.raises(ZeroDivisionError), nodes.body(BODIES[0], STREAM):
        1 / 0  # noqa: B018
    assert driver.calls[-1] == "cuStreamEndCapture"
    with pytest.raises(RuntimeError, match="cuStreamEndCapture"), nodes.body(BODIES[0], STREAM):
        pass


def test_the_layout_is_that_of_the_header():
    assert ctypes.sizeof(conditional_nodes._NodeParams) == 256


@pytest.mark.parametrize(("version", "reason"), [(12040, "for CUDA 12.4"), (12080, ""), (13000, "")])
def test_old_drivers_have_none(monkeypatch, version, reason):
    def get_version(pointer):
        pointer._obj.value = version

    library = type("Library", (), {"cuDriverGetVersion": staticmethod(get_version)})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert reason in conditional_nodes.why_not_conditional.__wrapped__()
    assert bool(reason) == bool(conditional_nodes.why_not_conditional.__wrapped__())
