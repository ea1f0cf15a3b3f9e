"""Taking values apart and putting them together again."""

from __future__ import annotations

import collections
import dataclasses
import enum

import pytest
import torch
from torch import nn

from millstream.capture.state.signature import spec_of
from millstream.tree.flatten import tree_flatten
from millstream.tree.spec import Leaf, Reference, tree_unflatten, walk, walk_arguments

Pair = collections.namedtuple("Pair", "left right")


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: int = 0
    built: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.built += 1


@dataclasses.dataclass
class Output(collections.OrderedDict):
    loss: torch.Tensor | None = None

    def __post_init__(self):
        self["loss"] = self.loss


T = torch.ones(2)
OBJECT = object()
VALUES = [
    T,
    None,
    (T, [T, 1], {"a": T, 2: "b"}),
    Pair(T, None),
    Point(T, 3),
    Output(T),
    collections.OrderedDict(a=T),
    collections.defaultdict(list, a=T),
    (Color.RED, torch.float32, torch.device("cpu"), 1.5, True, "x", b"y"),
    [OBJECT],
    (),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_round_trip(value):
    structure, leaves = tree_flatten(value)
    again = tree_unflatten(structure, leaves)
    assert type(again) is type(value)
    same, other = tree_flatten(again)
    assert same == structure
    assert [id(leaf) for leaf in other] == [id(leaf) for leaf in leaves]
    hash(structure)
    assert len({part for _, part in walk(structure, "v") if isinstance(part, Leaf)}) == len(leaves)


def test_a_tensor_that_occurs_twice_is_one_leaf():
    structure, leaves = tree_flatten([T, {"a": T.clone(), "b": T}])
    assert len(leaves) == 2
    first, other = tree_unflatten(structure, [1, 2])
    assert (first, other) == (1, {"a": 2, "b": 1})
    assert structure != tree_flatten([T, {"a": T, "b": T.clone()}])[0]


def test_a_defaultdict_makes_what_it_made():
    structure, leaves = tree_flatten(collections.defaultdict(list, a=T))
    assert tree_unflatten(structure, leaves)["b"] == []


def test_structures_differ_by_type_value_and_identity():
    def structure(value):
        return tree_flatten(value)[0]

    assert structure(T) == Leaf(0)
    assert structure(1) != structure(1.0) != structure(True)
    assert structure((T,)) != structure([T])
    assert structure({"a": T}) != structure({"b": T})
    assert structure({"a": 1, "b": 2}) != structure({"b": 2, "a": 1})
    assert structure({1: 0}) != structure({True: 0}) != structure({1.0: 0})
    assert structure({(1, "a"): 0, "b": 0, None: 0}) != structure({(True, "a"): 0, "b": 0, None: 0})
    assert [*tree_unflatten(*tree_flatten({"b": T, 2: T, (1, 0.5): T, "a": T}))] == ["b", 2, (1, 0.5), "a"]
    assert structure(object()) != structure(object())
    assert structure(OBJECT) == structure(OBJECT)


def test_parameters_are_references():
    weight = nn.Parameter(T.clone())
    structure, leaves = tree_flatten([weight, T])
    assert leaves == [T]
    assert [part.target for _, part in walk(structure, "v") if isinstance(part, Reference)] == [weight]


def test_dataclass_is_not_built_again():
    point = Point(T)
    structure, leaves = tree_flatten(point)
    assert tree_unflatten(structure, leaves).built == 1


def test_names():
    structure, _ = tree_flatten(((T, {"a": [T, Pair(T, 1)]}), {"p": Point(T, 3)}))
    names = [name for name, part in walk_arguments(structure, ["x"])]
    assert names == ["x", "args[1]['a'][0]", "args[1]['a'][1].left", "args[1]['a'][1].right", "p.x", "p.y", "p.built"]


def test_metas_tell_what_a_graph_depends_on():
    x = torch.ones(2, 3)
    others = [x.double(), x.t(), x[:1], x.clone().requires_grad_(), x.clone().requires_grad_() * 1, x.to_sparse()]
    assert spec_of(x) == spec_of(torch.zeros(2, 3))
    assert len({spec_of(x), *map(spec_of, others)}) == 7
