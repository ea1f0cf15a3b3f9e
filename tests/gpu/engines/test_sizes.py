"""On a GPU: sizes that change are compiled once; results are those of eager at each, new or replayed."""

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import millstream as ms
from millstream.capture.step.step import Step
from millstream.engine import BySize, by_size
from tests import networks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _counted():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ms.FallbackWarning)
        yield


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))


def images():
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


CASES = {
    "rows": (mlp, [(rows, 64) for rows in (8, 5, 13, 32, 5, 100, 7)]),
    "images": (images, [(rows, 3, size, size) for size in (32, 48, 40) for rows in (4, 2, 7)]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_eager_at_every_size(case, dtype):
    torch.manual_seed(0)
    make, shapes = CASES[case]
    model = make().cuda().to(dtype).eval()
    compiled = ms.compile(model)
    with torch.no_grad():
        for _ in range(3):  # new, planned, replayed
            for shape in shapes:
                x = torch.randn(shape, device="cuda", dtype=dtype)
                networks.assert_close(compiled(x), model(x), 1e-3 if dtype is torch.float32 else 2e-2)
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_eager_at_every_size(case):
    torch.manual_seed(0)
    make, shapes = CASES[case]
    model = make().cuda()
    compiled = ms.compile(model)
    for _ in range(2):
        for shape in shapes:
            x = torch.randn(shape, device="cuda")
            ours, theirs = (
                torch.autograd.grad(call(x).square().mean(), list(model.parameters())) for call in (compiled, model)
            )
            networks.assert_close(ours, theirs, 1e-3)


def text(optimizer, vocabulary=50):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(vocabulary, 64), encoder, nn.Linear(64, vocabulary)).cuda()
    opt = optimizer(model.parameters())

    def step(tokens):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return model, step


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, 1e-2), torch.optim.Adam], ids=["sgd", "adam"])
def test_step_trains_at_every_length_by_three_graphs(optimizer):
    (theirs, eager), (ours, function) = text(optimizer), text(optimizer)
    step = ms.step(function, strict=True)
    for number in range(3):  # new, planned, replayed
        for length in (32, 32, 7, 100, 19, 1, 64, 7, 100):
            torch.manual_seed(number)
            tokens = torch.randint(50, (4, length), device="cuda")
            networks.assert_close(step(tokens), eager(tokens).detach(), 1e-3)
    networks.assert_close([*ours.parameters()], [*theirs.parameters()], 1e-2)
    assert len(step.graphs) <= 3


@pytest.mark.parametrize("engine", ["streams", "graph"])
def test_step_gives_the_bits_of_the_serial_engine_at_every_length(engine):
    sgd = functools.partial(torch.optim.SGD, lr=1e-2)
    (first, one), (second, other) = text(sgd, 400), text(sgd, 400)
    serial = ms.step(one, engine="serial", dynamic=True, strict=True)
    step = ms.step(other, engine=engine, dynamic=True, strict=True)
    for _ in range(3):
        for length in (32, 7, 100):
            tokens = torch.randperm(400, device="cuda")[: 4 * length].view(4, length)  # one twice: sums in any order
            assert torch.equal(step(tokens), serial(tokens))
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def sizes_of(compiled):
    """What runs the one symbolic program of a compiled model or step."""
    graphs = compiled.graphs if isinstance(compiled, Step) else compiled._millstream.compiler.graphs
    made = [one for graph in graphs for one in getattr(graph, "executable", graph).executables]
    return next(one for one in made if isinstance(one, BySize))


def wide():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))


def test_a_size_that_comes_again_is_captured_at_once():
    model = wide().cuda().eval()
    compiled = ms.compile(model, dynamic=True, strict=True)
    with torch.no_grad():
        for rows in (64, 64, 64, 64, 48, 48, 32, 32):
            x = torch.randn(rows, 256, device="cuda")
            networks.assert_close(compiled(x), model(x), 1e-3)
    engines = [*sizes_of(compiled)]
    assert [engine.name for engine in engines] == ["graph"] * 3
    assert all(engine.is_captured for engine in engines)


@pytest.mark.parametrize("rising", [False, True])
def test_a_hundred_sizes_take_the_memory_of_the_largest(rising):
    model = wide().cuda().eval()
    compiled = ms.compile(model, dynamic=True, strict=True, streams=1)  # or what is quicker decides what it takes
    numbers = sorted(range(1024, 5124, 41), reverse=not rising)
    assert len(numbers) == 100

    def held(rows):
        for _ in range(3):
            x = torch.randn(rows, 256, device="cuda")
            networks.assert_close(compiled(x), model(x), 1e-3)
        del x
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    with torch.no_grad():
        for _ in range(2):
            held(max(numbers))
        before = torch.cuda.memory_reserved() - sizes_of(compiled).arena.num_bytes
        alone = held(max(numbers)) - before
        sizes_of(compiled).release()
        for rows in numbers:
            last = held(rows)
    assert last - before <= 1.1 * alone + (4 << 20)  # and twice what the allocator takes at least
    assert len([*sizes_of(compiled)]) <= by_size.MOST_SIZES


def test_passes_of_two_sizes_in_any_order():
    model = mlp().cuda()
    compiled = ms.compile(model, dynamic=True, strict=True)
    inputs = {rows: torch.randn(rows, 64, device="cuda") for rows in (9, 40)}

    def gradients(call, order):
        found = {rows: call(x).square().mean() for rows, x in inputs.items()}
        return [torch.autograd.grad(found[rows], list(model.parameters())) for rows in order]

    for turn in range(6):  # new, planned, captured, replayed
        order = (9, 40) if turn % 2 else (40, 9)
        for ours, theirs in zip(gradients(compiled, order), gradients(model, order), strict=True):
            networks.assert_close(ours, theirs, 1e-3)


def test_two_threads_with_two_sizes():
    model = wide().cuda().eval()
    compiled = ms.compile(model, dynamic=True, strict=True)
    inputs = {rows: torch.randn(rows, 256, device="cuda") for rows in (96, 32)}
    with torch.no_grad():
        expected = {rows: model(x) for rows, x in inputs.items()}
        compiled(inputs[96])
    torch.cuda.synchronize()

    def work(rows):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                networks.assert_close(compiled(inputs[rows]), expected[rows], 1e-3)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, rows) for rows in inputs]:
            done.result()
