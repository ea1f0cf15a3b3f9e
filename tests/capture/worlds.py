"""Two worlds from one seed: one steps eagerly, the other through ``Step``; after every call they must be the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from millstream.capture import Step


def interpret(gm: torch.fx.GraphModule, inputs: list[Tensor], static: frozenset[int]) -> Callable[[list[Tensor]], Any]:
    """The simplest build: run the graph node by node, with eager's own kernels."""
    return lambda values: list(gm(*values))


def compile_with_inductor(gm: torch.fx.GraphModule, inputs: list[Tensor], static: frozenset[int]) -> Any:
    """AOT functionalization and Inductor, as the real build does."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        compiled = compile_fx(gm, inputs)
    return lambda values: list(compiled(*values))


@dataclasses.dataclass
class World:
    """A step and everything that it may change."""

    step: Callable[..., Any]
    modules: Sequence[nn.Module] = ()
    optimizers: Sequence[Optimizer] = ()
    tensors: Sequence[Tensor] = ()

    def parameters(self) -> list[Tensor]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def state(self) -> dict[str, Any]:
        """Copies of all values."""
        values: dict[str, Any] = {}
        for number, module in enumerate(self.modules):
            values |= {f"{number}.{name}": value.detach().clone() for name, value in module.state_dict().items()}
            values |= {
                f"{number}.{name}.grad": None if value.grad is None else value.grad.clone()
                for name, value in module.named_parameters()
            }
            values |= {f"{number}.{name}.training": part.training for name, part in module.named_modules()}
        for number, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            for index, entry in state["state"].items():
                values |= {f"opt{number}.{index}.{key}": _copy(value) for key, value in entry.items()}
            for index, group in enumerate(state["param_groups"]):
                values |= {f"opt{number}.group{index}.{key}": _copy(value) for key, value in group.items()}
        values |= {f"tensor{number}": tensor.detach().clone() for number, tensor in enumerate(self.tensors)}
        return values


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_same(ours: Any, theirs: Any, *, rtol: float = 1e-5, atol: float = 1e-6, name: str = "result") -> None:
    """Same structure, same values within a tolerance."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), name
        torch.testing.assert_close(
            ours.detach(), theirs.detach(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}"
        )
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), name
        for key in theirs:
            assert_same(ours[key], theirs[key], rtol=rtol, atol=atol, name=f"{name}[{key}]")
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs), name
        assert len(ours) == len(theirs), name
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(left, right, rtol=rtol, atol=atol, name=f"{name}[{index}]")
    elif dataclasses.is_dataclass(theirs):
        assert type(ours) is type(theirs), name
        for field in dataclasses.fields(theirs):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name), rtol=rtol, atol=atol, name=field.name)
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, rel_tol=rtol, abs_tol=atol) or (ours != ours and theirs != theirs), name
    else:
        assert ours == theirs, name


def check(
    make: Callable[[], World],
    batches: Iterable[tuple[Any, ...]],
    *,
    between: Callable[[World, int], None] | None = None,
    build: Any = interpret,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    graphs: int | None = 1,
    ignore: Callable[[str], bool] = lambda name: False,
    max_graphs: int = 8,
) -> Step:
    """Step both worlds over ``batches`` and compare results, state, gradients and modes after every call.

    Args:
        make: Builds a world; called twice, after the same seed.
        batches: Arguments of each call.
        between: Called with each world and the number of the call that follows.
        build: What builds the graphs.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        graphs: How many graphs there must be in the end; ``None`` for any number.
        ignore: Names of values that need not agree, such as a bias before a normalisation, whose true gradient is zero.
        max_graphs: Passed on.
    """
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    theirs = make()
    step = Step(ours.step, build=build, strict=True, max_graphs=max_graphs)
    for number, batch in enumerate(batches):
        for world in (ours, theirs):
            if between is not None:
                between(world, number)
        torch.manual_seed(100 + number)
        our_result = step(*_copied(batch))
        torch.manual_seed(100 + number)
        their_result = theirs.step(*_copied(batch))
        assert_same(our_result, their_result, rtol=rtol, atol=atol, name=f"result {number}")
        our_state = {name: value for name, value in ours.state().items() if not ignore(name)}
        their_state = {name: value for name, value in theirs.state().items() if not ignore(name)}
        assert_same(our_state, their_state, rtol=rtol, atol=atol, name=f"state {number}")
    assert step.graphs, "nothing was captured"
    if graphs is not None:
        assert len(step.graphs) == graphs
    return step


def plain(model, opt, *, leaves_gradients=False):
    """A step of training as most are written."""

    def step(x, y):
        if leaves_gradients:
            opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if not leaves_gradients:
            opt.zero_grad()
        return loss

    return step


def mlp(optimizer, lr=0.05, scheduler=None, *, leaves_gradients=False):
    """A network whose every parameter has a gradient that is not zero."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = optimizer(model.parameters(), lr)
    world = World(plain(model, opt, leaves_gradients=leaves_gradients), [model], [opt])
    world.plan = scheduler(opt) if scheduler else None
    return world


def _copied(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item.clone() if isinstance(item, Tensor) else item for item in batch)


def batches(count: int, *shape: int, classes: int = 3, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random inputs and class labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(*shape, generator=generator), torch.randint(0, classes, shape[:1], generator=generator))
        for _ in range(count)
    ]
