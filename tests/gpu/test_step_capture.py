"""Whole-step capture on a GPU: what differs from the CPU is where things live."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from tests.capture.worlds import assert_same, plain

pytestmark = pytest.mark.gpu


def make(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    # No bias before the normalisation: its true gradient is zero, so that Adam would step along rounding errors.
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    return model, kind(model.parameters(), lr=1e-2, **options)


def data(count, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 16, generator=generator).to(device), torch.randint(0, 4, (8,), generator=generator).to(device))
        for _ in range(count)
    ]


def compare(ours, theirs, wrap, batches):
    step, eager = wrap(ours), wrap(theirs)
    step = ms.step(step, strict=True)
    for batch in batches:
        # Fused kernels round otherwise than eager's: float32, 10 steps of Adam.
        assert_same(step(*batch), eager(*batch).detach(), rtol=1e-3, atol=1e-4)
    assert_same(dict(ours[0].state_dict()), dict(theirs[0].state_dict()), rtol=1e-3, atol=1e-4)
    return step


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers(kind):
    step = compare(make(kind), make(kind), lambda pair: plain(*pair), data(10))
    assert step.graphs[0].num_runs >= 9


def test_step_counts_live_on_the_device_and_are_saved_as_the_user_knows_them():
    model, opt = make()
    batches = data(6)
    step = ms.step(plain(model, opt), strict=True)
    for batch in batches[:3]:
        step(*batch)
    assert all(entry["step"].is_cuda for entry in opt.state.values())
    saved = copy.deepcopy(opt.state_dict())
    assert all(not entry["step"].is_cuda and entry["step"].item() == 3 for entry in saved["state"].values())
    assert all(entry["exp_avg"].is_cuda for entry in saved["state"].values())
    other, other_opt = make()
    other.load_state_dict(model.state_dict())
    other_opt.load_state_dict(saved)
    again = ms.step(plain(other, other_opt), strict=True)
    for batch in batches[3:]:
        assert_same(again(*batch), step(*batch), rtol=0, atol=0)


def test_a_failed_capture_leaves_step_counts_on_the_host():
    model, opt = make()
    batch = data(1)[0]
    plain(model, opt)(*batch)
    before = [entry["step"] for entry in opt.state.values()]

    def step(x, y):
        loss = plain(model, opt)(x, y)
        return [loss, -loss][loss.item() < 0]

    with pytest.raises(ms.CaptureError):
        ms.step(step, strict=True)(*batch)
    assert all(entry["step"] is count for entry, count in zip(opt.state.values(), before, strict=True))


def test_numbers_constants_and_batches_on_the_host():
    def wrap(pair):
        model, opt = pair
        scale = torch.tensor(1.0)

        def step(x, y):
            x = x.to("cuda", non_blocking=True)
            loss = F.cross_entropy(model(x) * scale, y.cuda(), weight=torch.tensor([1.0, 2.0, 1.0, 1.0], device="cuda"))
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        step.scale = scale
        return step

    ours, theirs = make(), make()
    mine, eager = wrap(ours), wrap(theirs)
    step = ms.step(mine, strict=True)
    for number, batch in enumerate(data(8, "cpu")):
        mine.scale.fill_(1.0 + number / 10)
        eager.scale.fill_(1.0 + number / 10)
        assert_same(step(*batch), eager(*batch).detach(), rtol=1e-3, atol=1e-4)
    assert len(step.graphs) == 1


def test_gradient_scaler_and_half_precision():
    def wrap(pair):
        model, opt = pair
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)

        def step(x, y):
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            return loss, scaler._scale.clone()

        return step

    step, eager = ms.step(wrap(make()), strict=True), wrap(make())
    for batch in data(24):
        (loss, scale), (expected, expected_scale) = step(*batch), eager(*batch)
        assert_same(loss, expected.detach(), rtol=2e-2, atol=2e-2)
        assert scale.item() == expected_scale.item()
    assert step.graphs


def test_dropout_is_reproducible_and_differs_from_step_to_step():
    def run(seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4)).cuda()
        step = ms.step(plain(model, torch.optim.SGD(model.parameters(), lr=0.0)), strict=True)
        torch.manual_seed(seed)
        batch = data(1)[0]
        return [step(*batch).item() for _ in range(6)]

    first = run(1)
    assert run(1) == first
    assert len(set(first)) == 6


def test_large_layer_norms_are_captured():
    """In their backward pass Inductor would reduce rows and columns by one kernel, with lines of Python after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 768), nn.LayerNorm(768), nn.Linear(768, 8)).cuda()
    other, x = copy.deepcopy(model), torch.randn(8192, 768, device="cuda")

    def gradients(net):
        net(x).square().mean().backward()

    ms.step(lambda: gradients(model), strict=True)()
    gradients(other)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-6)
