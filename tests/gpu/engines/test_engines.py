"""On a GPU: the numbers of eager, the graph engine exactly as the serial one, memory, and what failures leave."""

import copy

import pytest
import torch
import torch.nn.functional as F

import millstream as ms
from millstream.api import executables
from tests import networks
from tests.engines.test_step import OPTIMIZERS, TOLERANCE, assert_trained_alike, train
from tests.gpu.engines.test_tuning import run_script

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


def engines_of(compiled):
    return [(executable.name, executable.is_captured) for executable in executables(compiled)]


@pytest.mark.parametrize("kind", networks.ALL)
def test_inference(kind):
    model = kind().cuda().eval()
    graph = ms.compile(model, strict=True)
    with torch.no_grad():
        for _ in range(4):
            x, _ = networks.example(kind, "cuda")
            networks.assert_close(graph(x), model(x), 1e-4)
        assert engines_of(graph) == [("graph", True)]
        torch._dynamo.reset()
        serial = ms.compile(model, strict=True, engine="serial")
        assert torch.equal(serial(x), graph(x))
        first = graph(x)
        assert all(torch.equal(graph(x), first) for _ in range(50))


@pytest.mark.parametrize("kind", [networks.Mlp, networks.ResNet])
def test_batches_without_rows(kind):
    model = kind().cuda()
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, strict=True)
    for rows in (0, 0, 0, 3, 0):
        x, _ = networks.example(kind, "cuda")
        result, wanted = compiled(x[:rows]), twin(x[:rows])
        assert result.shape == wanted.shape
        result.sum().backward()
        wanted.sum().backward()
    networks.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], TOLERANCE)
    relu = ms.compile(torch.nn.ReLU(), strict=True)
    assert relu(torch.empty(0, 5, device="cuda")).shape == (0, 5)


@pytest.mark.parametrize("kind", [networks.Mlp, networks.ResNet, networks.Transformer])
def test_forward_and_backward(kind):
    model = kind().cuda()
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, twin)]
    for _ in range(6):
        x, y = networks.example(kind, "cuda")
        for network, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    assert engines_of(compiled) == [("graph", True), ("graph", True)]
    networks.assert_close(list(model.state_dict().values()), list(twin.state_dict().values()), TOLERANCE)


def test_outstanding_forwards_are_not_overwritten():
    model = networks.ResNet().cuda()
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, strict=True)
    for _ in range(3):
        batches = [networks.example(networks.ResNet, "cuda") for _ in range(3)]
        for network in (compiled, twin):
            network.zero_grad()
            losses = [F.cross_entropy(network(x), y) for x, y in batches]
            with torch.no_grad():
                network(batches[0][0])
            for i in (2, 0, 1):
                losses[i].backward()
            del losses
        networks.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], TOLERANCE)


@pytest.mark.parametrize("kind", networks.ALL)
def test_networks_train_as_in_eager(kind):
    captured, sides, losses = train(kind, OPTIMIZERS["momentum"], 20, "cuda")
    assert_trained_alike(sides, losses)
    assert engines_of(captured) == [("graph", True)]
    assert not captured.fallbacks


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_as_in_eager(name):
    captured, sides, losses = train(networks.Mlp, OPTIMIZERS[name], 20, "cuda")
    assert_trained_alike(sides, losses)
    assert engines_of(captured) == [("graph", True)]


@pytest.mark.parametrize("kind", [networks.ResNet, networks.Lstm])
def test_engines_agree_exactly_and_runs_repeat(kind):
    states = []
    for engine in ("serial", "graph", "graph"):
        torch.manual_seed(7)
        torch._dynamo.reset()
        _, ((model, optimizer, _), _), losses = train(kind, OPTIMIZERS["adam"], 6, "cuda", engine)
        states.append((list(model.state_dict().values()), networks.optimizer_state(optimizer), losses[0]))
    for a, b, c in zip(*(torch.utils._pytree.tree_leaves(state) for state in states), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)


def test_dropout_follows_the_seed_and_differs_from_step_to_step():
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Dropout(0.5)).cuda()

    @ms.step(strict=True)
    def step(x):
        return model(x)

    x = torch.randn(8, 16, device="cuda")
    step(x), step(x), step(x)
    torch.manual_seed(3)
    first, second = step(x), step(x)
    torch.manual_seed(3)
    assert torch.equal(step(x), first)
    assert not torch.equal(first, second)


def test_the_graph_takes_no_memory_beyond_its_plan():
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(12)]).cuda()
    compiled = ms.compile(model, copy_outputs=False)
    x = torch.randn(4096, 1024, device="cuda")
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(x)
        (executable,) = executables(compiled)
        slots = x.numel() * 4
        library_workspaces = 64 << 20
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= executable.peak_bytes + slots + library_workspaces
        assert executable.peak_bytes <= 3 * x.numel() * 4  # twelve layers, of which two live at a time


@pytest.mark.parametrize("streams", [1, 4])
def test_workspaces_that_pytorch_drops_are_not_anyone_elses(streams):
    towers = [torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(5))).cuda() for _ in range(streams)]

    def model(x):
        return sum(tower(x) for tower in towers)

    x = torch.randn(16, 32, device="cuda")
    with torch.no_grad():
        expected = model(x)
        compiled = ms.compile(model, strict=True, streams=streams, memory=100.0, copy_outputs=False)
        for _ in range(2):
            for _ in range(3):
                compiled(x)
            for executable in executables(compiled):  # the next call captures again, where workspaces are known already
                executable.release()
        compiled(x)
        torch._C._cuda_clearCublasWorkspaces()  # as PyTorch does before and after capturing graphs of its own
        torch.cuda.empty_cache()
        others = [torch.zeros(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
        for _ in range(5):
            networks.assert_close(compiled(x), expected, 1e-4)
        assert not any(other.any() for other in others)


def test_replaced_and_moved_parameters_are_seen():
    model = networks.Mlp().cuda().eval()
    compiled = ms.compile(model)
    x, _ = networks.example(networks.Mlp, "cuda")
    with torch.no_grad():
        for _ in range(6):
            compiled(x)
            model.load_state_dict(networks.Mlp().cuda().state_dict(), assign=True)
            networks.assert_close(compiled(x), model(x), 1e-4)


def test_results_are_the_callers_own():
    model = networks.Mlp().cuda().eval()
    compiled = ms.compile(model)
    x, _ = networks.example(networks.Mlp, "cuda")
    with torch.no_grad():
        compiled(x), compiled(x)
        first = compiled(x)
        kept = first.clone()
        compiled(x + 1)
        assert torch.equal(first, kept)


@torch.library.custom_op("millstream_tests::peek", mutates_args=())
def peek(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@peek.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_cannot_be_captured_runs_serially_with_a_warning():
    def function(x):
        return peek(torch.relu(x)) + torch.rand_like(x) * 0

    compiled = ms.compile(function)
    x = torch.randn(100, device="cuda")
    with pytest.warns(ms.FallbackWarning, match="refused to capture"):
        for _ in range(3):
            networks.assert_close(compiled(x), function(x), 1e-4)
    torch.randn(3, device="cuda")  # the generator works on
    assert engines_of(compiled) == [("graph", False)]
    assert "refused to capture" in str(ms.explain(compiled))


def test_within_a_capture_of_the_callers():
    model = networks.ResNet().cuda().eval()
    compiled = ms.compile(model, strict=True)
    with torch.no_grad():
        x, _ = networks.example(networks.ResNet, "cuda")
        for _ in range(3):
            compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            networks.assert_close(result, model(x), 1e-4)
            networks.assert_close(compiled(x), model(x), 1e-4)
    assert engines_of(compiled) == [("graph", True)]


def test_autocast_and_gradient_scaling():
    model = networks.ResNet().cuda()
    twin = copy.deepcopy(model)
    sides = []
    for network in (model, twin):
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)

        def step(x, y, network=network, optimizer=optimizer, scaler=scaler):
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(network(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        sides.append(step)
    captured = ms.step(sides[0], strict=True)
    for _ in range(8):
        x, y = networks.example(networks.ResNet, "cuda")
        networks.assert_close(captured(x, y), sides[1](x, y).detach(), 2e-2)
    networks.assert_close(list(model.parameters()), list(twin.parameters()), 2e-2)


def test_the_device_and_the_generator_are_left_alone_by_a_failure():
    model = networks.Mlp().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if [False, True][loss.item() > 100]:
            optimizer.step()
        return loss

    x, y = networks.example(networks.Mlp, "cuda")
    captured = ms.step(step, strict=True)
    captured(x, y)  # eager: the first call of an optimizer is
    before = copy.deepcopy([*model.state_dict().values(), *(p.grad for p in model.parameters())])
    state = torch.cuda.get_rng_state()
    with pytest.raises(ms.CaptureError, match="item"):
        captured(x, y)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    networks.assert_close([*model.state_dict().values(), *(p.grad for p in model.parameters())], before, 0)


def test_torchvision_and_timm_unchanged():
    torchvision, timm = pytest.importorskip("torchvision"), pytest.importorskip("timm")
    for model in (torchvision.models.mobilenet_v3_small(weights=None), timm.create_model("resnet18")):
        model = model.cuda().eval()
        compiled = ms.compile(model, strict=True)
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(2, 3, 64, 64, device="cuda")
                networks.assert_close(compiled(x), model(x), 1e-3)
        torch._dynamo.reset()


FILLS_A_CACHE = """
import torch
from torch import nn
import millstream as ms

class Cached(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(length, 64, 64))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.cache.index_copy_(0, self.position.view(1), (self.left(x) + self.right(x)).unsqueeze(0))
        self.position.add_(1)
        return self.cache.sum(0)

for streams in (1, 4):
    model = Cached(4).cuda().eval()
    compiled, x = ms.compile(model, streams=streams), torch.randn(64, 64, device="cuda")
    with torch.no_grad():
        results = [compiled(x).clone() for _ in range(4)]
        model.cache.zero_(), model.position.zero_()
        for result in results:
            torch.testing.assert_close(result, model(x))

def fill(x, cache, position):  # which are copied into slots
    cache.index_copy_(0, position.view(1), (x.sin() + x.cos()).unsqueeze(0))
    position.add_(1)
    return cache.sum(0)

for streams in (1, 4):
    compiled = ms.compile(fill, streams=streams)
    caches = [torch.zeros(4, 64, 64, device="cuda") for _ in range(2)]
    positions = [torch.zeros((), dtype=torch.long, device="cuda") for _ in range(2)]
    for _ in range(4):
        x = torch.randn(64, 64, device="cuda")
        results = [run(x, *state) for run, *state in zip((compiled, fill), caches, positions)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*positions)
    torch.cuda.synchronize()
print("as eager")
"""


def test_what_is_measured_and_tried_does_not_count_past_the_end_of_a_cache(tmp_path):
    """In a process of its own, for an index out of range ends all work on the GPU."""
    assert run_script(FILLS_A_CACHE, tmp_path / "inductor", tmp_path / "millstream") == "as eager"
