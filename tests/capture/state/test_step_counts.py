"""Optimizers that count their steps in Python: one graph serves on, and the count goes on with it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from millstream.capture import Step
from tests.capture.worlds import batches, check, interpret, mlp

WAYS = ("state", "group", "attribute")


class Counting(torch.optim.Optimizer):
    """Adam with biases corrected by numbers of Python's, as optimizers outside of PyTorch are written."""

    def __init__(self, params, lr=0.05, way="state", late=10**6):
        self.way, self.late, self.count = way, late, 0
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.count += self.way == "attribute"
        for group in self.param_groups:
            group["count"] += self.way == "group"
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, self.state[parameter])

    def update(self, group, parameter, state):
        if not state:
            state |= {"count": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
        state["count"] += self.way == "state"
        number = {"state": state["count"], "group": group["count"], "attribute": self.count}[self.way]
        first, second = group["betas"]
        state["mean"].mul_(first).add_(parameter.grad, alpha=1 - first)
        state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        root = (state["square"].sqrt() / math.sqrt(1 - second**number)).add_(1e-8)
        size = group["lr"] / (1 - first**number)
        if number > self.late:
            size = size / 2
        parameter.addcdiv_(state["mean"], root, value=-size)


def world(make=Counting, **options):
    return mlp(lambda parameters, _: make(parameters, **options))


@pytest.mark.parametrize("way", WAYS)
def test_one_graph_serves_while_it_counts(way):
    made = []

    def make():
        made.append(world(way=way))
        return made[-1]

    step = check(make, batches(9, 6, 4), rtol=1e-4, atol=1e-6)
    assert step.graphs[0].num_runs == 8
    ours, theirs = (each.optimizers[0].count for each in made)
    assert ours == theirs
    assert type(ours) is int


@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_the_count_changes_with_it(way):
    step = check(lambda: world(way=way, late=4), batches(9, 6, 4), rtol=1e-4, atol=1e-6, graphs=2)
    assert [graph.num_runs for graph in step.graphs] == [3, 5]


@pytest.mark.parametrize("way", WAYS)
def test_a_count_that_the_user_changes_counts(way):
    def jump(world, number):
        (opt,) = world.optimizers
        if number == 5 and way == "attribute":
            opt.count += 40
        for holder in (opt.param_groups if way == "group" else opt.state.values()) if number == 5 else ():
            holder["count"] += 40 * (way != "attribute")

    check(lambda: world(way=way), batches(8, 6, 4), between=jump, rtol=1e-4, atol=1e-6)


def test_a_loaded_state_goes_on_where_it_was():
    saved = {}

    def load(world, number):
        (opt,) = world.optimizers
        if number == 3:
            saved[id(world)] = copy.deepcopy(opt.state_dict())
        if number == 6:
            opt.load_state_dict(saved[id(world)])

    check(lambda: world(way="state"), batches(9, 6, 4), between=load, rtol=1e-4, atol=1e-6, graphs=None)


def test_parameters_that_came_later_have_counts_of_their_own():
    def thaw(world, number):
        world.modules[0][0].requires_grad_(number > 3)

    check(lambda: world(way="state"), batches(9, 6, 4), between=thaw, rtol=1e-4, atol=1e-6, graphs=None)


class Decaying(torch.optim.Optimizer):
    """Lowers its own rate, and keeps a weight of what it has seen."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "weight": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["weight"] = group["weight"] + group["lr"] ** 2
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * (group["lr"] ** 2 / group["weight"]))
            group["lr"] *= 0.9


def test_rates_that_the_step_itself_changes():
    check(lambda: world(Decaying), batches(7, 6, 4), rtol=1e-5, atol=1e-6)


class Asking(torch.optim.Optimizer):
    """Does something else by its count."""

    def __init__(self, params, factor):
        self.factor, self.count = factor, 0
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * (self.param_groups[0]["lr"] * self.factor(self.count)))


@pytest.mark.parametrize(
    ("factor", "graphs"),
    [
        (lambda count: 0.5 if count % 3 == 0 else 1, 2),
        (lambda count: 1 / max(2, min(count, 4)), 2),  # and none for the second call, which would serve once
        (lambda count: 1 / count if isinstance(count, int) else 7, 1),
        (lambda count: 1 / sum([count] * 3), 1),
    ],
)
def test_what_else_depends_on_the_count(factor, graphs):
    check(lambda: world(Asking, factor=factor), batches(9, 6, 4), graphs=graphs)


def test_a_graph_that_would_never_serve_again_is_not_built():
    made, theirs = (world(Asking, factor=lambda count: 1 / len(range(count))) for _ in range(2))
    built = []

    def build(*arguments):
        built.append(arguments)
        return interpret(*arguments)

    theirs.modules[0].load_state_dict(made.modules[0].state_dict())
    step = Step(made.step, build=build)
    with pytest.warns(UserWarning, match="depends on the very value of Asking's count"):
        for batch in batches(8, 6, 4):
            assert torch.equal(step(*batch), theirs.step(*batch))
    assert not built
    assert made.optimizers[0].count == 8


class Remembering(torch.optim.SGD):
    def step(self, closure=None):
        self.last = "stepped" + getattr(self, "last", "")
        return super().step()


def test_other_attributes_that_an_optimizer_changes_are_refused():
    made = world(lambda params: Remembering(params, lr=0.1))
    step = Step(made.step, build=interpret)
    with pytest.warns(UserWarning, match="puts ever other values into Python objects"):
        for batch in batches(12, 6, 4):
            step(*batch)
    assert made.optimizers[0].last == "stepped" * 12


def test_one_that_fails_behind_its_counting_has_counted_what_eager_counts():
    made, theirs = world(way="group"), world(way="group")
    step = Step(made.step, build=interpret, strict=True)
    for batch in batches(3, 6, 4):
        step(*batch)
        theirs.step(*batch)
    with pytest.raises(IndexError):
        step(torch.zeros(6, 4), torch.full((6,), 7))
    assert made.optimizers[0].param_groups[0]["count"] == theirs.optimizers[0].param_groups[0]["count"]
