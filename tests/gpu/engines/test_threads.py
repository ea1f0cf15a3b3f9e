"""Another thread allocates, draws, computes and calls compiled models throughout a capture, and notices nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms

pytestmark = pytest.mark.gpu


def make_step(seed, *layers):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)), *layers).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    @ms.step(strict=True)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_allocation_and_compiled_models_in_another_thread_go_on():
    served = torch.compile(nn.Linear(64, 64).cuda(), backend="eager")
    x = torch.randn(8, 64, device="cuda")
    expected = served(x).detach().clone()
    torch.cuda.synchronize()
    alone = [loss.item() for step in [make_step(0)] for loss in [step(x) for _ in range(6)]]
    errors, calls, stop = [], [], threading.Event()

    sizes = torch.Generator()  # the process's own is what the step's parameters are drawn from

    def serve():
        while not stop.is_set():
            try:
                size = torch.randint(1, 4_000_000, (), generator=sizes).item()
                scratch = torch.empty(size, device="cuda").fill_(1)
                torch.testing.assert_close(served(x) + scratch[0] - 1, expected)
                calls.append(1)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        step = make_step(0)
        together = [step(x).item() for _ in range(6)]
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
    assert calls
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("layers", [[], [nn.Dropout(0.5)]])
def test_another_thread_draws_throughout_a_capture(layers):
    x, errors, calls, stop = torch.randn(8, 64, device="cuda"), [], [], threading.Event()

    def draw():
        while not stop.is_set():
            try:
                F.dropout(x, 0.5)
                calls.append(1)
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        step = make_step(0, *layers)
        losses = [step(x).item() for _ in range(4)]
    finally:
        stop.set()
        thread.join()
    assert not errors, errors[0]
    assert calls
    assert len(step.graphs) == 1
    assert len(set(losses)) == 4


def test_captured_dropout_goes_on_from_the_seed_as_it_is_set():
    step, x = make_step(0, nn.Dropout(0.5)), torch.ones(8, 64, device="cuda")
    dropout = ms.compile(nn.Dropout(0.5).train())
    for _ in range(3):
        step(x)
        dropout(x)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append([dropout(x).clone(), F.dropout(x), dropout(x).clone()])
    assert all(torch.equal(first, second) for first, second in zip(*drawn, strict=True))
    assert not torch.equal(drawn[0][0], drawn[0][2])


def test_models_of_two_threads_take_turns_in_the_memory_that_graphs_share():
    def serve(rows):
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).cuda().eval()
        compiled, x = ms.compile(model, strict=True), torch.randn(rows, 256, device="cuda")
        torch.cuda.synchronize()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            expected = model(x)
            return max((compiled(x) - expected).abs().max().item() for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert max(pool.map(serve, (96, 32))) < 1e-3
