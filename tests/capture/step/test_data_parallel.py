"""Models that PyTorch trains on several processes: steps leave them to Python, compiled models keep their reducer."""

import functools

import pytest
import torch

from millstream.capture import Step
from millstream.errors import FallbackWarning
from tests.capture.worlds import interpret
from tests.processes import output_of

WORLD = """
import gc, os, sys, warnings
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import millstream as ms

def join(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    return DistributedDataParallel(net)
"""


def test_parameters_of_a_wrapper_are_left_to_python_where_the_step_goes_around_it(tmp_path):
    """Also where the collector looks at nothing any more; through the wrapper they are captured."""
    said = output_of(
        WORLD
        + f"""
join(0, 1, {str(tmp_path / "store")!r})
hidden = make()
net, weight = hidden.module, hidden.module[0].weight
optimizer = torch.optim.SGD(net.parameters(), 0.1)

@ms.step
def around(x):
    loss = net(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss

@ms.step
def through(x):
    loss = hidden(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss

@ms.step
def by_one_parameter(x):
    loss = (x @ weight.T).sum(); loss.backward(); return loss

@ms.step
def frozen(x):
    loss = net(x).sum(); loss.backward(); return loss

other = nn.Linear(4, 2)

@ms.step
def unrelated(x):
    loss = other(x).sum(); loss.backward(); return loss

for step in (around, through, by_one_parameter, frozen, unrelated):
    if step is frozen:
        gc.freeze()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(torch.ones(3, 4))
    print(step.__name__, bool(step.graphs), sum("belongs to DistributedDataParallel" in str(w.message) for w in caught))
"""
    )
    assert said.splitlines() == [
        "around False 1",
        "through True 0",
        "by_one_parameter False 1",
        "frozen False 1",
        "unrelated True 0",
    ]


def test_a_wrapper_made_after_the_capture_is_noticed(tmp_path):
    """By the next call; steps on other parameters keep their graphs, and nothing watches once no step is left."""
    said = output_of(
        WORLD
        + f"""
join(0, 1, {str(tmp_path / "store")!r})
from torch.nn.modules import module as nn_module

def make_step(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    @ms.step
    def step(x):
        loss = net(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss
    return step

nets = [nn.Linear(4, 2), nn.Linear(4, 2)]
steps = [make_step(net) for net in nets]
for step in steps:
    for _ in range(3):
        step(torch.ones(3, 4))
    print(len(step.graphs), step.graphs[0].num_runs)
wrapper = DistributedDataParallel(nets[0])
for step in steps:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(torch.ones(3, 4))
    runs = [graph.num_runs for graph in step.graphs]
    print(runs, sum("belongs to DistributedDataParallel" in str(w.message) for w in caught))
print(len(nn_module._global_module_registration_hooks))
del step, steps
gc.collect()
nn.Sequential(nn.Linear(1, 1))
print(len(nn_module._global_module_registration_hooks))
"""
    )
    assert said.splitlines() == ["1 2", "1 2", "[2] 1", "[5] 0", "1", "0"]


def test_a_compiled_wrapper_trains_as_in_eager(tmp_path):
    """Averaged gradients, ``no_sync``, broadcast buffers; compiled around the wrapper and within it."""
    script = tmp_path / "train.py"
    script.write_text(
        WORLD
        + """
def train(form, rank):
    ddp = make()
    if form == "inside":
        ddp = DistributedDataParallel(ms.compile(ddp.module))
    model = ms.compile(ddp) if form == "around" else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    def backward(): model(torch.randn(6, 4, generator=generator)).pow(2).mean().backward()
    for _ in range(4):
        with model.no_sync():
            backward()
        backward()
        optimizer.step(); optimizer.zero_grad()
    if form == "around":
        assert len(model._millstream.compiler.graphs) == 1 and not model._millstream.compiler.fallbacks
        assert type(ddp) is DistributedDataParallel and type(ddp.module) is nn.Sequential
    return [*ddp.parameters(), *ddp.buffers()]

def main(rank, store):
    join(rank, 2, store)
    expected = train("eager", rank)
    for form in ("around", "inside"):
        for ours, theirs in zip(train(form, rank), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    if rank == 0: print("same")
    dist.barrier(); dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
"""
    )
    said = output_of(
        f"import runpy, sys; sys.argv = [{str(script)!r}, {str(tmp_path / 'store')!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    assert said.strip() == "same"


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_on_the_accumulation_of_gradients_are_refused(kind):
    """As Horovod and apex register them: autograd's node holds them, not the parameter."""
    model = torch.nn.Linear(4, 2)
    ran = []
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    handle = getattr(node, kind)(lambda *_: ran.append(1))

    def step(x):
        model(x).sum().backward()

    captured = Step(step, build=interpret)
    call = functools.partial(captured, torch.ones(3, 4))
    with pytest.warns(FallbackWarning, match="hook on its gradient"):
        call()
    call()
    assert len(ran) == 2
    handle.remove()
    again = Step(step, build=interpret)
    for _ in range(3):
        again(torch.ones(3, 4))
    assert len(again.graphs) == 1
