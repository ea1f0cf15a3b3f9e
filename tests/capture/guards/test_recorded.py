"""What no search by names finds is a condition of the graph all the same, as it was recorded when it was read."""

from __future__ import annotations

import collections
import enum
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from millstream.capture import Step
from millstream.capture.record.interpreter.instructions import why_not
from tests.capture.worlds import interpret

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be recorded")
MANY = 20_000


class Lazy:
    def __init__(self, value):
        self.inner = {"v": value}

    def __getattr__(self, name):
        return self.inner[name]


def shape_by_a_computed_name():
    lazy, other, key = Lazy(torch.ones(2, 2)), SimpleNamespace(v=1.5), "".join(["v"])
    return lambda x: x * lazy.v.shape[0] * getattr(other, key), lambda: lazy.inner.update(v=torch.ones(3, 2))


def item_of_a_long_list():
    items = [1.5] * MANY
    return lambda x: x * items[15_000], lambda: items.__setitem__(15_000, 2.5)


def item_of_a_long_dict():
    items = dict.fromkeys(range(MANY), 1.5)
    return lambda x: x * items[15_000], lambda: items.update({15_000: 2.5})


def first_of_a_dict():
    items = {"a": 1.5, "b": 2.5}
    return lambda x: x * next(iter(items.values())), lambda: items.update(a=items.pop("a"))


def first_of_a_list():
    items = [1.5, 2.5]
    return lambda x: x * next(iter(items)), items.reverse


def number_deep_in_lists():
    items = [[[[[1.5]]]]]
    return lambda x: x * torch.tensor(items).sum(), lambda: items[0][0][0][0].__setitem__(0, 2.5)


def text_of_lists():
    items = [[[[[1.5]]]]]
    return lambda x: x * float(str(items).strip("[]")), lambda: items[0][0][0][0].__setitem__(0, 2.5)


def attribute_of_a_threads_own():
    local = threading.local()
    local.v = 1.5
    return lambda x: x * local.v, lambda: setattr(local, "v", 2.5)


def attribute_given_to_a_parameter():
    layer = nn.Linear(2, 2)
    return (
        lambda x: x * (3 if hasattr(layer.weight, "factor") else 1),
        lambda: setattr(layer.weight, "factor", 1),
    )


def attribute_in_the_place_of_a_slot():
    class Slots:
        __slots__ = ("v",)

    slots = Slots()
    slots.v = 1.5
    return lambda x: x * slots.v, lambda: setattr(Slots, "v", 2.5)


def field_of_a_named_tuple():
    kind = collections.namedtuple("kind", "a b")
    pair = kind(1.5, 2)
    return lambda x: x * pair.a, lambda: setattr(kind, "a", 2.5)


def value_of_a_member():
    class Kind(enum.Enum):
        A = 1

    return lambda x: x * Kind.A.value, lambda: setattr(Kind.A, "_value_", 3)


def method_of_a_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return lambda x: x * len(list(model.children())), lambda: setattr(model, "children", lambda: [1, 2, 3])


def filters_of_warnings():  # which pytest puts back
    return lambda x: x * len(warnings.filters), lambda: warnings.filters.append(warnings.filters[-1])


class Number:
    """An object that PyTorch's C++ asks for an index."""

    v = 1

    def __index__(self):
        return self.v


class Numbers:
    """The same, for its items."""

    v = 1

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return range(self.v, self.v + 2)[index]


def index_that_an_object_gives():
    asked, rows = Number(), torch.tensor([[0.0], [1.0], [2.0]])
    return lambda x: x * rows[asked], lambda: setattr(asked, "v", 2)


def slice_to_what_an_object_gives():
    asked, rows = Number(), torch.tensor([[5.0], [1.0], [2.0]])
    return lambda x: x * rows[: asked : Number()].sum(), lambda: setattr(asked, "v", 2)


def items_that_an_object_gives():
    asked = Numbers()
    return lambda x: x * torch.tensor(asked).sum(), lambda: setattr(asked, "v", 2)


# What PyTorch calls in the midst of an operator.


def within(call):
    """A kind: what a function reads that ``call`` gives to PyTorch."""

    def make():
        holder = SimpleNamespace(v=1.5)
        return lambda x: call(x, lambda y: y * holder.v), lambda: setattr(holder, "v", 2.5)

    make.__name__ = call.__name__
    return make


@within
def branch(x, function):
    return torch.cond(x.sum() > 0, function, torch.neg, (x,))


@within
def turn_of_a_scan(x, function):
    return scan(lambda total, y: (function(total) + y, y.clone()), x[0], x)[0]


@within
def what_autograd_saves(x, function):
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(function, lambda kept: kept):
        y = x * x
    return torch.autograd.grad(y.sum(), x)[0]


@within
def score_of_attention(x, function):
    heads = torch.linspace(0, 1, 32).view(1, 1, 2, 16) * x.sum()
    return flex_attention(heads, heads.sin(), heads.cos(), score_mod=lambda score, *_: function(score))


@within
def operator_in_a_mode(x, function):
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return function(result) if func is torch.ops.aten.sin.default else result

    with Other():
        return x.sin()


KINDS = [
    index_that_an_object_gives,
    slice_to_what_an_object_gives,
    items_that_an_object_gives,
    branch,
    turn_of_a_scan,
    what_autograd_saves,
    score_of_attention,
    operator_in_a_mode,
    shape_by_a_computed_name,
    first_of_a_dict,
    first_of_a_list,
    number_deep_in_lists,
    text_of_lists,
    attribute_of_a_threads_own,
    item_of_a_long_list,
    item_of_a_long_dict,
    attribute_given_to_a_parameter,
    attribute_in_the_place_of_a_slot,
    field_of_a_named_tuple,
    value_of_a_member,
    method_of_a_module,
    filters_of_warnings,
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_was_read_is_noticed_when_it_changes(make):
    function, change = make()
    step, x = Step(function, build=interpret, strict=True), torch.ones(2)
    for _ in range(3):
        assert torch.equal(step(x), function(x))
    assert len(step.graphs) == 1
    before = function(x)
    change()
    for _ in range(2):
        assert torch.equal(step(x), function(x))
    assert not torch.equal(function(x), before)
    assert len(step.graphs) == 2


def test_a_reason_says_what_changed_as_the_user_writes_it():
    items = {"rates": [0.5] * MANY}
    step = Step(lambda x: x * items["rates"][15_000], build=interpret, strict=True)
    step(torch.ones(2))
    items["rates"][15_000] = 1.0
    broken = step.graphs[0].guards.broken()
    assert broken is not None
    assert "items['rates'][15000]" in broken.reason
