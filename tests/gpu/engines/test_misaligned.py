"""On a GPU, inputs at addresses that kernels were not compiled for: the numbers of eager, whichever engine runs."""

import copy

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.api import executables
from tests import networks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    torch._dynamo.reset()
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))


def assert_close(ours, theirs):
    networks.assert_close(ours, theirs, 1e-4)


class Net(nn.Module):
    """Kernels that load several elements at once, and one that writes a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 4)
        self.scale = nn.Parameter(torch.ones(256))
        self.register_buffer("mean", torch.zeros(256))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.second(torch.tanh(self.first(x.sin() + self.mean)) * self.scale)


def shifted(tensor, by=1):
    """The same values, ``by`` elements after an aligned address."""
    memory = tensor.new_empty(tensor.numel() + by)
    result = memory[by:].view(tensor.shape).copy_(tensor)
    assert result.data_ptr() % 16
    return result


def shift_state(model):
    """Put parameters and buffers at odd addresses, behind the back of what was compiled for them."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = shifted(tensor.data)


def batches(times=6):
    """Batches with labels: the first two as PyTorch's allocator gives them, then at every odd address."""
    for turn in range(times):
        x, y = torch.randn(64, 256, device="cuda"), torch.randint(0, 4, (64,), device="cuda")
        yield x, shifted(x, 1 + turn % 3) if turn > 1 else x, y


def assert_captured(compiled, engine, count):
    """Everything was compiled once, and ran on the engine asked for."""
    found = [(each.name, each.is_captured) for each in executables(compiled)]
    assert found == [(engine, engine == "graph")] * count


@pytest.mark.parametrize("engine", ["serial", "streams", "graph"])
def test_inference(engine):
    model = Net().cuda().eval()
    compiled = ms.compile(model, engine=engine, strict=True, streams=4)
    with torch.no_grad():
        for x, given, _ in batches():
            assert_close(compiled(given), model(x))
        shift_state(model)
        for x, given, _ in batches():
            assert_close(compiled(given), model(x))
    assert_captured(compiled, engine, 1)


@pytest.mark.parametrize("engine", ["serial", "streams", "graph"])
def test_an_input_is_written_where_the_caller_has_it(engine):
    def work(x, state):
        state.mul_(0.5).add_(x)
        return torch.tanh(state * x)

    compiled = ms.compile(work, engine=engine, strict=True)
    with torch.no_grad():
        for x, given, _ in batches():
            memory = torch.full((64 * 256 + 2,), 7.0, device="cuda")
            odd, theirs = memory[1:-1].view(64, 256).fill_(1.0), torch.ones(64, 256, device="cuda")
            ours = odd if given is not x else theirs.clone()
            assert_close(compiled(given, ours), work(x, theirs))
            assert_close(ours, theirs)
            assert memory[[0, -1]].tolist() == [7.0, 7.0]
    assert_captured(compiled, engine, 1)


@pytest.mark.parametrize("engine", ["serial", "graph"])
def test_forward_and_backward(engine):
    """Also a gradient from outside at an odd address, and forward passes that wait for their backward passes."""
    model = Net().cuda()
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, engine=engine, strict=True)
    for turn, (x, given, _) in enumerate(batches(8)):
        if turn == 5:
            shift_state(model)
        gradient = torch.randn(64, 4, device="cuda")
        for network, batch, place in ((compiled, given, shifted), (twin, x, lambda tensor: tensor)):
            network.zero_grad()
            outputs = [network(batch) for _ in range(1 + turn % 2)]
            for output in outputs:
                output.backward(place(gradient))
            del outputs, output
        assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        assert_close(model.mean, twin.mean)
    assert_captured(compiled, engine, 2)


@pytest.mark.parametrize("odd_state", [False, True])
@pytest.mark.parametrize("engine", ["serial", "streams", "graph"])
def test_training_step(engine, odd_state):
    """With parameters at odd addresses from the start, kernels are compiled for these, and nothing is copied."""
    model = Net().cuda()
    if odd_state:
        shift_state(model)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(network.parameters(), 0.05, momentum=0.9) for network in (model, twin)]

    step = ms.step(lambda x, y: networks.train_once(model, optimizers[0], x, y), engine=engine, strict=True)
    for x, given, y in batches():
        assert_close(step(given, y), networks.train_once(twin, optimizers[1], x, y))
    assert_close(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert_captured(step, engine, 1)
    program = executables(step)[0].lowered.program
    aligned = [name in program.aligned for name in program.inputs]
    assert aligned[-2:] == [True, True]  # the batch, whose first came aligned, and its labels
    assert all(aligned) != odd_state


def test_frozen_parameters():
    model = Net().cuda().eval()
    shift_state(model)
    compiled = ms.compile(model, freeze=True, strict=True)
    with torch.no_grad():
        for x, given, _ in batches(4):
            assert_close(compiled(given), model(x))
    constants = executables(compiled)[0].lowered.program.constants.values()
    assert constants
    assert all(constant.data_ptr() % 16 == 0 for constant in constants)
