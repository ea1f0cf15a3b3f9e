"""Copies within a graph: led elsewhere for each call, and done in no launch that they were not led for."""

import ctypes
import types

import pytest
import torch

from millstream.device.cuda_graphs import memcpy_nodes
from millstream.engine.cuda import graph_io
from millstream.engine.cuda.graph_io import make_graph_io
from tests.engines.host_driver import GRAPH, OTHER_FORMS, launch

GRAPH_LIKE = types.SimpleNamespace(raw_cuda_graph_exec=lambda: GRAPH)


def settled(slots, results, examples=None):
    way = make_graph_io(slots, examples if examples is not None else [torch.empty_like(slot) for slot in slots])
    way.lead_in()
    assert way.lead_out(results)
    way.settle(GRAPH_LIKE)
    return way


def pair():
    return [torch.zeros(3, 4), torch.zeros(2, 5, dtype=torch.int64).t()]


def sources_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator), torch.randint(99, (2, 5), generator=generator).t()]


def test_each_launch_copies_from_and_to_where_it_was_led(host_driver):
    slots, result = pair(), torch.zeros(())
    way = settled(slots, [result])
    kept = []
    for seed in range(5):
        sources, target = sources_of(seed), torch.full((), -1.0)
        assert way.open(sources, [target])
        launch(host_driver.nodes[:2])
        assert all(map(torch.equal, slots, sources))
        result.fill_(seed)
        launch(host_driver.nodes[2:])
        kept.append((sources, target))
    assert [target.item() for _, target in kept] == [0, 1, 2, 3, 4]


def test_what_has_not_moved_is_not_told_again(host_driver):
    way = settled(pair(), [torch.zeros(())])
    sources, target = sources_of(0), torch.zeros(())
    assert way.open(sources, [target])
    assert host_driver.num_set == 3
    assert way.open(sources, [target])
    assert host_driver.num_set == 3
    assert way.open(sources, [torch.zeros(())])
    assert host_driver.num_set == 4


def test_closed_gates_copy_nothing_until_they_are_opened_again(host_driver):
    slots = pair()
    way = settled(slots, [])
    assert not any(node.happens for node in host_driver.nodes)
    sources = sources_of(0)
    assert way.open(sources, [])
    way.close()
    launch(host_driver.nodes)
    assert not any(map(torch.any, slots))
    assert way.open(sources, [])
    launch(host_driver.nodes)
    assert all(map(torch.equal, slots, sources))


@pytest.mark.parametrize("source", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_no_gate_opens_for_a_tensor_of_another_form(host_driver, source, monkeypatch):
    get_device = torch.Tensor.get_device
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1 if self.is_meta else get_device(self))
    way = settled([torch.zeros(3, 4)], [])
    assert not way.open([source], [])
    assert not any(node.happens for node in host_driver.nodes)
    assert way.open([torch.ones(3, 4)], [])  # others are as welcome as before


@pytest.mark.usefixtures("host_driver")
def test_looks_that_do_not_matter_are_overlooked():
    way = settled([torch.zeros(3)], [], examples=[torch.ones(3)])
    assert way.open([torch.ones(3, requires_grad=True)], [])
    with torch.inference_mode():
        assert way.open([torch.ones(3)], [])
    twice = torch.ones(3)
    way = settled([torch.zeros(3), torch.zeros(3)], [])
    assert way.open([twice, twice], [])


@pytest.mark.usefixtures("host_driver")
def test_examples_of_another_form_are_none():
    way = settled([torch.zeros(3)], [], examples=[torch.ones(3, dtype=torch.float64)])
    assert way.open([torch.ones(3)], [])


@pytest.mark.parametrize("refused", ["set", "enable"])
def test_where_the_driver_refuses_all_gates_are_closed_for_good(host_driver, refused):
    way = settled([torch.zeros(3)], [torch.zeros(2)])
    allowed = 1

    def refuse(name):
        nonlocal allowed
        allowed -= name == refused
        return name == refused and allowed == -1

    host_driver.refuses = Refusing(refuse)
    assert not way.open([torch.ones(3)], [torch.ones(2)])  # at its second node
    assert not any(node.happens for node in host_driver.nodes)
    assert way.is_shut
    num_set = host_driver.num_set
    assert not way.open([torch.ones(3)], [torch.ones(2)])
    assert host_driver.num_set == num_set


class Refusing:
    """Names of functions that refuse, as a function says."""

    def __init__(self, refuses):
        self.refuses = refuses

    def __contains__(self, name):
        return self.refuses(name)


def test_gates_that_cannot_be_closed_are_an_error_and_no_wrong_copy(host_driver):
    slots = [torch.zeros(3), torch.zeros(2)]
    way = settled(slots, [])
    sources = [torch.ones(3), torch.ones(2)]
    assert way.open(sources, [])
    asked = []
    host_driver.refuses = Refusing(lambda name: name == "enable" and (asked.append(name) or len(asked) == 2))
    with pytest.raises(RuntimeError, match="switch a copy off"):
        way.close()  # the first is, the second is not
    host_driver.refuses = set()
    assert way.open(sources, [])
    launch(host_driver.nodes)
    assert all(map(torch.equal, slots, sources))


@pytest.mark.parametrize("refused", ["capture", "tell_node", "get"])
def test_a_capture_that_is_refused_is_an_error(host_driver, refused):
    way = make_graph_io([torch.zeros(3)], [torch.zeros(3)])
    host_driver.refuses = {refused}
    with pytest.raises(RuntimeError, match="refused to capture a copy"):
        way.lead_in()
    assert make_graph_io([torch.zeros(3)], [torch.zeros(3)]) is None  # not tried again


def test_without_a_context_there_are_no_gates(host_driver):
    way = make_graph_io([torch.zeros(3)], [torch.zeros(3)])
    way.lead_in()
    host_driver.refuses = {"tell_context"}
    with pytest.raises(RuntimeError, match="refused to tell of a context"):
        way.settle(GRAPH_LIKE)


@pytest.mark.parametrize(
    ("slots", "results"),
    [
        ([torch.zeros(graph_io.MOST_BYTES // 4 + 1)], []),
        ([torch.zeros(3)], [torch.zeros(graph_io.MOST_BYTES // 4)]),
        ([torch.zeros(4, 4)[:, ::2]], []),
        ([torch.zeros(3)], [torch.zeros(4, 4)[:, ::2]]),
    ],
    ids=["large inputs", "large results", "inputs with gaps", "results with gaps"],
)
def test_what_is_large_or_no_stretch_is_copied_around_the_graph(host_driver, slots, results):
    way = make_graph_io(slots, slots)
    if way is not None:
        way.lead_in()
        assert not way.lead_out(results)
        way.settle(GRAPH_LIKE)
    assert not any(node.happens for node in host_driver.nodes)


def test_without_the_driver_there_is_no_graph_io(monkeypatch):
    monkeypatch.setattr(graph_io, "memcpy_library", lambda: None)
    assert make_graph_io([torch.zeros(3)], [torch.zeros(3)]) is None


def test_a_driver_that_lacks_a_function_is_none(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert memcpy_nodes.memcpy_library.__wrapped__() is None


def test_a_copy_is_laid_out_as_in_cuda_h():
    assert ctypes.sizeof(memcpy_nodes.GraphCopy) == 200
    copy = memcpy_nodes.GraphCopy
    assert (copy.start.offset, copy.end.offset, copy.width.offset) == (0, 88, 176)
    assert memcpy_nodes._End.device.offset == 48
