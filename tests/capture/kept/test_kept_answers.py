"""What ``functools.lru_cache`` has answered is compared between processes, and so is what is found by a class."""

import functools
import re

import pytest
import torch

from millstream.capture import Step
from tests.capture.worlds import assert_same, interpret


def _cached(answer, size=8):
    def make(value):
        @functools.lru_cache(size)
        def ask(*args, **named):
            return answer(value, *args, **named)

        return ask

    return make


class Box:
    def __init__(self, value, *_):
        self.parts = [{"value": value}]


class Alike:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


KEY, ALIKE = Box(1), Alike()


def _methods(value):
    class Methods:
        @functools.lru_cache(8)  # noqa: B019
        def ask(self, number):
            return [value * number]

    return Methods()


ANSWERS = {  # what the step holds, for a number, and how it reads that
    "a number": (_cached(lambda value, *_: value), lambda held, x: x * held("a")),
    "a list": (_cached(lambda value, *_: [value]), lambda held, x: x * held("a")[0]),
    "dicts in a tuple": (_cached(lambda value, *_: ({"a": value},), None), lambda held, x: x * held("a")[0]["a"]),
    "an object": (_cached(Box), lambda held, x: x * held("a", 1).parts[0]["value"]),
    "by name": (_cached(lambda value, _, k: [value + k]), lambda held, x: x * held("a", k=1)[0]),
    "for an object": (_cached(lambda value, *_: [value]), lambda held, x: x * held(KEY)[0]),
    "for itself": (_methods, lambda held, x: x * held.ask(2)[0]),
    "a function": (_cached(lambda value, *_: lambda x: x * value), lambda held, x: held("a")(x)),
    "for the class of a result": (
        lambda value: {"known": {torch.Tensor: value}, "others": {"all": value}},
        lambda held, x: x * held["known"].get(type(x * 1), held["others"]["all"]),
    ),
}
UNKNOWN = {
    "asked by C": (
        _cached(lambda value, *_: [value]),
        lambda held, x: x * next(map(held, "a"))[0],
        "that it does not ask",
    ),
    "how often": (
        _cached(lambda value, *_: value),
        lambda held, x: x * (held("a") + held.cache_info().misses),
        "cache_info",
    ),
    "for what is alike": (_cached(lambda value, *_: value), lambda held, x: x * held(ALIKE), "compare themselves"),
}


def _run(make, read, value):
    held, x = make(value), torch.ones(2)
    step = Step(lambda x: read(held, x).sum(), build=interpret)
    for _ in range(3):
        assert_same(step(x), read(held, x).sum(), name="result")
    return step


@pytest.mark.parametrize("what", ANSWERS)
def test_answers_are_compared(what, taken):
    for value, outcome in ((2.0, []), (2.0, [True]), (3.0, [])):
        taken.clear()
        _run(*ANSWERS[what], value)
        assert taken == outcome


def test_further_answers_do_no_harm_and_missing_ones_do(taken):
    make, read = ANSWERS["a list"]

    def with_others(value):
        held = make(value)
        held("b"), held("c")
        return held

    _run(with_others, read, 2.0)
    _run(make, read, 2.0)
    assert not taken
    _run(with_others, read, 2.0)
    assert taken == [True]


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_cache_whose_answers_nobody_knows_is_not_kept(what, taken, tmp_path):
    make, read, reason = UNKNOWN[what]
    step = _run(make, read, 2.0)
    assert not [*(tmp_path / "traces").iterdir()]
    assert any(re.search(f"not kept on disk: .*{reason}", line) for line in step.history)
