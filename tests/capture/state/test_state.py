"""Lifting: tensor objects become fake and real again, whatever happens."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from millstream._torch.autograd.hooks import has_tensor_hooks
from millstream._torch.tensors import FakeTensorMode, storage_id
from millstream.capture.state import lift as lifting
from millstream.capture.state.discover import discover
from millstream.capture.state.lift import find_host_scalars, lift
from millstream.capture.trace.patches.optimizers import CountsOnDevice
from millstream.capture.trace.twins import Twins


def test_tensors_have_fake_twins_and_stay_as_they_are():
    base = torch.zeros(4)
    left, right, weight = base[:2], base[2:], nn.Parameter(torch.ones(2))
    weight.mark, weight.grad, mode = "mine", torch.ones(2), FakeTensorMode()
    grad = weight.grad
    twins = Twins([left, right, weight, grad], mode, {})
    with contextlib.suppress(ZeroDivisionError), twins.active(), mode:
        first, second, fake, _ = twins.fakes
        assert storage_id(first) == storage_id(second)
        assert isinstance(fake, nn.Parameter)
        assert fake.mark == "mine"
        assert twins.given(([weight, 1],), {"grad": grad}) == (([fake, 1],), {"grad": fake.grad})
        assert twins.reals_in([fake]) == [weight]
        fake.sum().backward()
        weight.mark = weight.other = 2
        raise ZeroDivisionError
    assert vars(weight) == {"mark": "mine"}
    assert weight.grad is grad
    assert grad.tolist() == [1, 1]


def test_every_tensor_once_with_all_its_places():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    opt = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=(0.9, 0.99))
    model["head"](model["embed"](torch.tensor([1]))).sum().backward()
    opt.step()
    state = lift(discover([("step", lambda: (model, opt))]))
    assert [entry.name for entry in state] == [
        "model.embed.weight",
        "opt.step[model.embed.weight]",
        "opt.exp_avg[model.embed.weight]",
        "opt.exp_avg_sq[model.embed.weight]",
        "opt.lr[0]",
    ]
    assert len(state[0].locations) == 2


def test_single_numbers_on_the_host_are_mirrored_on_the_device(monkeypatch):
    scale, table = torch.tensor(2.0), torch.ones(3)
    weight = nn.Parameter(torch.ones(2, device="meta"))
    state = lift(discover([("step", lambda: (weight, scale, table))]))
    names = [entry.name for entry in state]
    monkeypatch.setattr(lifting, "device_of", lambda tensors: next(each.device for each in tensors if each.is_meta))
    assert find_host_scalars(state) == {names.index("scale"): torch.device("meta")}
    monkeypatch.undo()
    mode = FakeTensorMode()
    assert Twins([scale], mode, {0: torch.device("meta")}).fakes[0].device.type == "meta"
    assert find_host_scalars([entry for entry in state if entry.tensor is not weight]) == {}


def test_counts_go_to_the_device_and_back():
    weight = nn.Parameter(torch.ones(2, device="meta"))
    opt = torch.optim.Adam([weight])
    weight.grad = torch.ones(2, device="meta")
    count = torch.tensor(3.0)
    opt.state[weight] = {"step": count, "exp_avg": torch.zeros(2, device="meta")}
    counts = CountsOnDevice()
    counts.move(opt)
    assert opt.state[weight]["step"].device.type == "meta"
    counts.undo()
    assert opt.state[weight]["step"] is count
    counts.move(opt)
    counts.settle()
    opt.state[weight]["step"] = torch.tensor(4.0)  # a device whose values can be read
    assert opt.state_dict()["state"][0]["step"].item() == 4.0
    assert set(opt.state_dict()["state"][0]) == {"step", "exp_avg"}
    assert opt.state[weight]["step"].item() == 4.0


def test_hooks_are_seen():
    weight = nn.Parameter(torch.ones(2))
    assert not has_tensor_hooks(weight)
    handle = weight.register_hook(lambda grad: grad)
    assert has_tensor_hooks(weight)
    handle.remove()
    assert not has_tensor_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert has_tensor_hooks(weight)
