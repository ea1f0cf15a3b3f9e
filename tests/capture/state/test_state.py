"""Lifting: tensor objects become fake and real again, whatever happens."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from millstream._torch.hooks import has_tensor_hooks
from millstream._torch.tensors import FakeTensor, FakeTensorMode, storage_id
from millstream.capture.state import lift as lifting
from millstream.capture.state.discover import discover
from millstream.capture.state.lift import become_fake, find_host_scalars, lift
from millstream.capture.trace.patches.optimizers import CountsOnDevice


def test_tensors_become_fake_in_every_place_and_real_again():
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    model.weight.mark = "mine"
    weight, grad = model.weight, model.weight.grad
    values, addresses = [weight.detach().clone(), grad.clone()], [weight.data_ptr(), grad.data_ptr()]
    momentum = opt.state[weight]["momentum_buffer"]
    held = [weight, (weight, momentum)]
    mode = FakeTensorMode()
    with contextlib.suppress(ZeroDivisionError), become_fake([weight, momentum, grad], mode, {}), mode:
        assert isinstance(held[1][0], FakeTensor)
        assert isinstance(held[0], nn.Parameter)
        assert weight.mark == "mine"
        assert weight.grad is grad
        assert opt.state[weight]["momentum_buffer"] is momentum
        weight.sum().backward()
        assert weight.grad is grad
        weight.grad = None
        raise ZeroDivisionError
    assert type(weight) is nn.Parameter
    assert type(grad) is torch.Tensor
    assert weight.grad is grad
    assert vars(weight) == {"mark": "mine"}
    assert [weight.data_ptr(), grad.data_ptr()] == addresses
    assert torch.equal(weight, values[0])
    assert torch.equal(grad, values[1])
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(grad, values[1] + 1)


def test_a_tensor_that_cannot_be_exchanged_leaves_all_real():
    first, second = torch.ones(2), torch.ones(2)
    mode = FakeTensorMode()
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        torch.ones(2, 2) @ weight  # autocast keeps a weak reference to the weight
        fake = become_fake([first, weight, second], mode, {})
        with pytest.raises(RuntimeError, match="weakrefs"):
            fake.__enter__()
    assert type(first) is type(second) is torch.Tensor
    assert type(weight) is nn.Parameter
    assert first.tolist() == [1, 1]


def test_views_of_one_memory_stay_views_of_one_memory():
    base = torch.zeros(4)
    left, right = base[:2], base[2:]
    mode = FakeTensorMode()
    with become_fake([left, right], mode, {}):
        assert storage_id(left) == storage_id(right)
    assert storage_id(left) == storage_id(right) == storage_id(base)


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
    with become_fake([scale], mode, {0: torch.device("meta")}):
        assert scale.device.type == "meta"
    assert scale.item() == 2.0
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
