"""Attributes beside the items of containers, and of dataclasses: of arguments they count, of results they are kept."""

import collections
import dataclasses
import operator
from typing import Any, NamedTuple

import torch

from millstream.capture import Step
from millstream.tree.containers import attributes_beside
from tests.capture.worlds import interpret


class List(list):
    scale = 1.0


class Slots(list):
    __slots__ = ("scale",)


class Tuple(tuple):
    pass


class Named(NamedTuple("_Named", [("x", torch.Tensor)])):
    pass


class Default(collections.defaultdict):
    pass


class Count(collections.Counter):
    pass


class Refusing(dict):
    """Nothing of it is to be run: neither to make another one nor to fill it."""

    def __init__(self, **items):
        for key, item in items.items():
            dict.__setitem__(self, key, item)
        _put(self, made=True)

    def __setitem__(self, key, value):
        raise TypeError(key)

    def __setattr__(self, name, value):
        raise TypeError(name)


class ItsOwn(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    scale = 1.0  # no field
    late: Any = dataclasses.field(init=False)  # which nobody sets


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """As transformers have it: items are attributes, and some attributes no items."""

    x: torch.Tensor | None = None
    other: torch.Tensor | None = None

    def __post_init__(self):
        self["x"] = self.x


def _put(container, **attributes):
    vars(container).update(attributes)
    return container


def _slots(x, scale):
    made = Slots([x])
    made.scale = scale
    return made


def _cleared(x):
    made = ItsOwn(x=x)
    made.__dict__ = {"scale": 2.0}
    return made


FIRST, X = operator.itemgetter(0), operator.itemgetter("x")
FORMS = {
    "list": (lambda x, scale: _put(List([x]), scale=scale), FIRST),
    "slots": (_slots, FIRST),
    "tuple": (lambda x, scale: _put(Tuple([x]), scale=scale), FIRST),
    "named tuple": (lambda x, scale: _put(Named(x), scale=scale), operator.attrgetter("x")),
    "ordered dict": (lambda x, scale: _put(collections.OrderedDict(x=x), scale=scale), X),
    "default dict": (lambda x, scale: _put(Default(list, x=x), scale=scale), X),
    "counter": (lambda x, scale: _put(Count(x=x), scale=scale), X),
    "refusing dict": (lambda x, scale: _put(Refusing(x=x), scale=scale), X),
    "dict of attributes": (lambda x, scale: ItsOwn(x=x, scale=scale), operator.attrgetter("x")),
    "dataclass": (lambda x, scale: _put(Data(x), scale=scale), operator.attrgetter("x")),
    "frozen dataclass": (Frozen, operator.attrgetter("x")),
    "dict and dataclass": (lambda x, scale: _put(Output(x), scale=scale), X),
    "within a dict": (lambda x, scale: {"in": _put(List([x]), scale=scale)}, lambda batch: batch["in"][0]),
}
"""How it is made of a tensor and another value, and where the tensor is; the other value is its ``scale``."""


def scale_of(batch):
    return (batch["in"] if type(batch) is dict else batch).scale


def test_a_changed_attribute_of_an_argument_is_noticed():
    def plain(batches):
        return [FORMS[form][1](batch) * scale_of(batch) for form, batch in batches.items()]

    step = Step(plain, build=interpret, strict=True)

    def check(x, scales):
        ours, theirs = (
            run({form: make(x, scales[form]) for form, (make, _) in FORMS.items()}) for run in (step, plain)
        )
        assert all(map(torch.equal, ours, theirs)), [*FORMS]

    scales = dict.fromkeys(FORMS, 1.0)
    for number, form in enumerate([None, None, *FORMS]):
        check(torch.full((2,), float(number)), {**scales, form: 2.0})
    assert len(step.graphs) == step.max_graphs
    check(torch.ones(2), dict.fromkeys(FORMS, 3.0))
    count = step.graphs[-1].num_runs
    check(torch.ones(2), dict.fromkeys(FORMS, 4.0))  # numbers that change have one graph
    assert step.graphs[-1].num_runs == count + 1


def test_attributes_of_arguments_are_told_apart_as_their_items_are():
    def plain(batch):
        scale = batch.scale
        if isinstance(scale, torch.Tensor):
            return batch[0] * scale
        return batch[0] * (2 if scale == "twice" else 3 if scale is None else scale)

    step, num_graphs = Step(plain, build=interpret, strict=True), []
    for number, scale in enumerate([1.0, 1.0, 2.0, 3.0, "twice", 1, None, True, torch.ones(2), torch.zeros(2), 4.0]):
        x = torch.full((2,), float(number))
        batch = _put(List([x]), scale=scale)
        assert torch.equal(step(batch), plain(batch)), scale
        num_graphs.append(len(step.graphs))
    assert num_graphs == [1, 1, 2, 2, 3, 4, 5, 6, 7, 7, 7]  # numbers and tensors that change have one


def test_a_changed_attribute_of_the_class_of_an_argument_is_noticed(monkeypatch):
    def plain(listed, data):
        return listed[0] * listed.scale + data.x * data.scale

    step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
    for scales in [(1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (1.0, 1.0)]:
        for kind, scale in zip((List, Data), scales, strict=True):
            monkeypatch.setattr(kind, "scale", scale)
        assert torch.equal(step(List([x]), Data(x)), plain(List([x]), Data(x))), scales


def test_an_attribute_of_an_argument_that_appears_or_goes_is_noticed():
    def plain(batch):
        return batch[0] * (2 if hasattr(batch, "flag") else 1)

    step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
    for batch in [List([x]), _put(List([x]), flag=1), List([x]), _put(List([x]), flag=1)]:
        assert torch.equal(step(batch), plain(batch))
    assert len(step.graphs) == 2


def test_attributes_of_a_result_are_kept():
    lasting = object()

    def plain(x):
        doubled = x * 2
        parts = [doubled, x.sum(), x, len(x), f"{x.sum():.2f}", x.mean().item(), lasting, {"y": [x + 1]}]
        return {form: [make(doubled, part) for part in parts] for form, (make, _) in FORMS.items()}

    step = Step(plain, build=interpret, strict=True)
    for number in range(3):
        x = torch.full((2,), float(number))
        ours, theirs = step(x), plain(x)
        for form, (_, get) in FORMS.items():
            for one, other in zip(ours[form], theirs[form], strict=True):
                _assert_alike(one, other)
            first, _, given, *_, kept, _ = ours[form]
            assert scale_of(first) is get(first) is get(kept)
            assert scale_of(given) is x
            assert scale_of(kept) is lasting
    assert len(step.graphs) == 1


def test_a_result_whose_attributes_are_not_its_items_any_more():
    def plain(x):
        return _cleared(x * 2)

    step = Step(plain, build=interpret, strict=True)
    for _ in range(2):
        _assert_alike(step(torch.ones(2)), plain(torch.ones(2)))


def _assert_alike(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        return
    if isinstance(one, dict):
        assert [*one] == [*other]
    assert getattr(one, "default_factory", None) == getattr(other, "default_factory", None)
    if isinstance(one, list | tuple | dict):
        parts = (one.values(), other.values()) if isinstance(one, dict) else (one, other)
        for mine, theirs in zip(*parts, strict=True):
            _assert_alike(mine, theirs)
    elif not dataclasses.is_dataclass(one):
        assert one == other
        return
    held, expected = attributes_beside(one), attributes_beside(other)
    assert (held is None) == (expected is None)
    assert [*(held or ())] == [*(expected or ())]
    for name in held or ():
        _assert_alike(held[name], expected[name])


LASTING = {"key": 1.0}
HELD = [{"key": 1.0}, {"key": 1.0}]


@dataclasses.dataclass
class Item:
    x: torch.Tensor


def test_a_container_that_is_passed_twice_is_one():
    makes = (lambda: [1.0], lambda: {"key": torch.ones(2)}, lambda: Item(torch.ones(2)), lambda: List([torch.ones(2)]))

    def plain(x, ones, others):
        return [x * (2 if one is other else 3) for one, other in zip(ones, others, strict=True)]

    step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
    ones, others = ([make() for make in makes] for _ in range(2))
    for those in [others, ones, others, [*ones[:2], *others[2:]], [*others[:2], *ones[2:]], ones]:
        for ours, theirs in zip(step(x, ones, those), plain(x, ones, those), strict=True):
            assert torch.equal(ours, theirs)
    assert len(step.graphs) == 4


def test_a_container_that_the_step_reaches_and_is_passed_too_is_one():
    def plain(x, one):
        return x * (2 if one is LASTING else 4 if any(one is each for each in HELD) else 3)

    for calls in [(LASTING, {"key": 1.0}, LASTING), ({"key": 1.0}, HELD[1], {"key": 1.0}, LASTING, HELD[0])]:
        step, x = Step(plain, build=interpret, strict=True), torch.ones(2)
        for given in calls:
            assert torch.equal(step(x, given), plain(x, given))
        assert len(step.graphs) <= len({*map(id, calls)})


def test_a_container_that_stands_twice_in_a_result_is_one():
    def plain(x):
        made, item = [x * 2], Item(x * 3)
        return {"first": made, "again": (made, item), "item": item, "other": [x * 2]}

    step = Step(plain, build=interpret, strict=True)
    for _ in range(2):
        result = step(torch.ones(2))
        assert result["first"] is result["again"][0]
        assert result["item"] is result["again"][1]
        assert result["first"] is not result["other"]
