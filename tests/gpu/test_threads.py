"""Another thread allocates, computes and calls compiled models throughout a capture, and notices nothing."""

import threading

import pytest
import torch
from torch import nn

import millstream as ms

pytestmark = pytest.mark.gpu


def make_step(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))).cuda()
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
