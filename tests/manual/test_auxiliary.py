"""``ms.manual.aux_streams`` within operators."""

import pytest
import torch

import millstream as ms
from millstream.device.pools import stream_pool
from millstream.errors import ArgumentError
from tests.device.virtual_device import make_virtual_context
from tests.manual.virtual_torch import VirtualTorch


@pytest.fixture(params=["eager", "lazy", "random"])
def machine(request):
    context, device = make_virtual_context(request.param, seed=1)
    with VirtualTorch(device) as virtual, torch.no_grad():
        yield context, device, virtual


def both(context, a):
    """A function with a second thing beside the first."""
    with ms.manual.aux_streams(2, context) as (main, aux):
        one = main.mul(a, 2.0)
        with aux:
            other = torch.mul(a, 3.0)
        third = aux(torch.mul, a, 4.0)
    return one + other + third


def test_aux_stream_is_forked_and_joined(machine):
    context, device, virtual = machine
    total = 0
    for value in range(10):
        total = total + both(context, virtual.tensor([float(value)]))
    assert virtual.read(total).item() == 9 * 45
    assert context.current_stream() is device.default
    assert context.streams.num_lent == 0
    assert len(device.streams) == 2


def test_within_a_scope_it_belongs_to_the_scope(machine):
    context, _, virtual = machine
    a = virtual.tensor([1.0])
    with ms.streams(3, context) as s:
        made = s[1].add(a, 1.0)
        with s[2]:
            result = both(context, made)
        final = s[1].add(result, 1.0)
    assert virtual.read(final).item() == 19


def test_exception_joins(machine):
    context, device, virtual = machine
    a = virtual.tensor([1.0])

    def fail():
        with ms.manual.aux_streams(2, context) as (_, aux):
            aux(a.add_, 5.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert context.current_stream() is device.default
    assert virtual.read(a + 0).item() == 6


@pytest.mark.parametrize("workspace", [None, 1 << 20])
def test_no_memory_for_a_workspace_means_one_stream(machine, workspace):
    context, device, virtual = machine
    a = virtual.tensor([1.0])
    result = virtual.tensor([0.0])
    device.free_bytes = 16
    with ms.manual.aux_streams(2, context, workspace=workspace) as (main, aux):
        assert main is aux
        aux(result.add_, a)
    assert virtual.read(result).item() == 1
    assert context.streams.num_lent == 0


def test_no_streams_left_means_one_stream(machine, monkeypatch):
    context, _, _ = machine
    monkeypatch.setattr(stream_pool, "MAX_LENT_STREAMS", 0)
    with ms.manual.aux_streams(2, context) as (main, aux):
        assert main is aux


@pytest.mark.parametrize("arguments", [{"num_streams": 1}, {"device": "cpu"}])
def test_one_stream_runs_everything_in_place(arguments):
    with ms.manual.aux_streams(**arguments) as streams, streams[-1]:
        assert torch.equal(streams[-1].mul(torch.ones(2), 2.0), torch.full((2,), 2.0))


def test_engine_serial_means_one_stream(machine, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_ENGINE", "serial")
    with ms.manual.aux_streams(2, machine[0]) as (main, aux):
        assert main is aux


def test_compiled_functions_run_it_as_one_stream():
    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        with ms.manual.aux_streams(2) as (main, aux):
            one = main.mul(x, 2.0)
            with aux:
                other = x * 3.0
        return one + other

    assert function(torch.ones(1)).item() == 5


@pytest.mark.parametrize(
    "arguments", [{"num_streams": 0}, {"num_streams": 99}, {"num_streams": "2"}, {"workspace": -1}]
)
def test_bad_arguments(arguments):
    with pytest.raises(ArgumentError):
        ms.manual.aux_streams(**arguments)
