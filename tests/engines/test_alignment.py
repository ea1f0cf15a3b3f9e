"""Inputs that do not lie as kernels were compiled for: which are watched, and that kernels never see them.

Only a GPU's kernels care. Here those of a CPU are taken for such, and asked where their arguments lie.
"""

from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import GPU_ALIGN_BYTES
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import millstream as ms
from millstream._torch.tensors import ALIGNMENT_BYTES, copy_elements, realign
from millstream.api import executables
from millstream.cost import Costs, KernelCost
from millstream.device import context
from millstream.engine import plan_source
from millstream.engine.plan_source import compile_plan
from millstream.lower import lower_graph as lowering
from millstream.schedule import plan_graph
from tests import networks


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.fixture
def copied(monkeypatch):
    """Take kernels of the CPU for such as need alignment; list the shapes of the inputs that are copied for it."""
    shapes = []

    def note(tensor):
        shapes.append(tuple(tensor.shape))
        return realign(tensor)

    def assumed(inputs):
        tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        return frozenset(i for i, value in tensors.items() if value.storage_offset() * value.itemsize % 16 == 0)

    monkeypatch.setattr(plan_source, "realign", note)
    monkeypatch.setattr(lowering, "aligned_inputs", assumed)
    return shapes


def shifted(tensor, by=1):
    """The same values, ``by`` elements after an aligned address."""
    memory = tensor.new_empty(tensor.numel() + by)
    return memory[by:].view(tensor.shape).copy_(tensor)


def test_inputs_are_taken_to_be_aligned_where_the_examples_on_a_gpu_are():
    assert ALIGNMENT_BYTES == GPU_ALIGN_BYTES
    mode, floats = FakeTensorMode(), torch.empty(64, device="meta")
    halves = floats.half()
    on_gpu = [floats, floats[1:], floats[4:], halves[4:], halves[8:]]
    inputs = [3, torch.empty(64), *(FakeTensor(mode, meta, torch.device("cuda", 0)) for meta in on_gpu)]
    assert lowering.aligned_inputs(inputs) == {2, 4, 6}


def test_a_cpu_watches_nothing():
    compiled = ms.compile(lambda x: (x * 2).relu(), engine="serial", strict=True)
    x = torch.randn(64)
    assert torch.equal(compiled(shifted(x)), compiled(x))
    engine = executables(compiled)[0]
    assert not engine.lowered.program.aligned
    assert "data_ptr" not in engine._run.source


def test_a_copy_keeps_strides_and_bytes_in_between():
    table = torch.arange(24.0).view(6, 4)
    column, repeated = table[:, 1], torch.arange(9.0)[1:].expand(3, 8)
    for tensor in (column, repeated, torch.empty(5, 0)):
        copy = realign(tensor)
        assert copy.data_ptr() % ALIGNMENT_BYTES == 0
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
    before = table.clone()
    copy_elements(column, torch.zeros(24).view(6, 4)[:, 0])
    assert not column.any()
    assert torch.equal(table[:, [0, 2, 3]], before[:, [0, 2, 3]])


@pytest.mark.parametrize("num_streams", [1, 4])
def test_kernels_find_their_inputs_aligned(copied, num_streams):
    """Also on several streams, which begin after the copies and have ended before what was written is copied back."""

    def work(x, state):
        state.mul_(0.5).add_(x.sum(0))
        return torch.stack([torch.mm(x, x.t()) * state.sum(), torch.mm(x.cos(), x.t())])

    compiled = ms.compile(work, engine="serial", strict=True)
    x, state = torch.randn(16, 16), torch.randn(16)
    compiled(x, state)
    lowered = executables(compiled)[0].lowered
    program = lowered.program
    assert len(program.aligned) == 2
    addresses = []

    def watch(call):
        target = call.target

        def run(*args, **kwargs):
            addresses.extend(v.data_ptr() for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
            return target(*args, **kwargs)

        return replace(call, target=run)

    program = replace(program, calls=tuple(map(watch, program.calls)))
    costs = Costs(tuple(KernelCost(1000) for _ in program.graph.kernels), wait_ns=100)
    plan = plan_graph(program.graph, costs, num_streams, "list")
    assert (plan.num_streams > 1) == (num_streams > 1)
    run = compile_plan(program, plan, context=context("cpu"))
    for place in (lambda tensor: tensor, shifted):
        ours, theirs = place(state.clone()), state.clone()
        given = {tuple(x.shape): place(x), tuple(state.shape): ours}
        result = run([given[shape] for shape in order_of(program, x, state)])[0]
        networks.assert_close(result, work(x, theirs))
        networks.assert_close(ours, theirs)
        assert addresses
        assert all(address % ALIGNMENT_BYTES == 0 for address in addresses)
        assert sorted(copied) == ([] if place is not shifted else [(16,), (16, 16)])
    for lender, event in run.events:
        lender.events.release(event)


def order_of(program, *tensors):
    """Shapes of a program's inputs in its order, told by their sizes in bytes."""
    shapes = {tensor.numel() * tensor.element_size(): tuple(tensor.shape) for tensor in tensors}
    return [shapes[program.graph.buffer_of[name].num_bytes] for name in program.inputs]


def test_training_with_batches_parameters_and_gradients_anywhere(copied):
    ours, theirs = networks.ResNet(), networks.ResNet()
    theirs.load_state_dict(ours.state_dict())
    compiled = ms.compile(ours, engine="serial", strict=True)
    for round_ in range(3):
        x, _ = networks.example(networks.ResNet)
        gradient = torch.randn(len(x), 4)
        if round_ == 2:
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.data = shifted(parameter.data)
        place = shifted if round_ else lambda tensor: tensor
        for network in (compiled, theirs):
            network.zero_grad()
            output = network(place(x) if network is compiled else x)
            output.backward(place(gradient) if network is compiled else gradient)
        assert bool(copied) == bool(round_)
        networks.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
        networks.assert_close(list(ours.buffers()), list(theirs.buffers()))
    assert len(executables(compiled)) == 2  # the forward and the backward pass, compiled once


def test_what_was_compiled_where_it_lies_is_not_copied(copied):
    """A parameter at an odd offset is no reason for copies; a batch that moves to one is."""
    model = networks.Mlp()
    twin = networks.Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = shifted(parameter.data)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin)]

    step = ms.step(lambda x, y: networks.train_once(model, optimizers[0], x, y), engine="serial", strict=True)
    x, y = networks.example(networks.Mlp)
    for batch in (x, x, shifted(x)):
        assert not copied
        networks.assert_close(step(batch, y), networks.train_once(twin, optimizers[1], x, y))
    assert copied == [tuple(x.shape)]
    networks.assert_close(list(model.parameters()), list(twin.parameters()))
