"""Caches of the user's hold tensors with values, whoever filled them, and keep what they held."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
import torch
from torch import nn

from millstream.capture import Step
from millstream.errors import CaptureError, FallbackWarning
from tests.capture.worlds import assert_same, interpret


def cached_function():
    @functools.lru_cache
    def positions(count):
        return torch.arange(float(count))

    return lambda x: x + positions(len(x)), positions


def cached_method():
    class Positions(nn.Module):
        @functools.cache  # noqa: B019
        def positions(self, count):
            return torch.arange(float(count))

        def forward(self, x):
            return x + self.positions(len(x))

    module = Positions()
    return lambda x: module(x), module.positions


def cached_method_of_class():
    class Positions:
        @classmethod
        @functools.cache
        def positions(cls, count):
            return torch.arange(float(count))

    return lambda x: x + Positions.positions(len(x)), Positions.positions


def table_of_class():
    class Positions:
        tables: ClassVar[dict[int, torch.Tensor]] = {}

        @classmethod
        def positions(cls, count):
            if count not in cls.tables:
                cls.tables[count] = torch.arange(float(count))
            return cls.tables[count]

    return lambda x: x + Positions.positions(len(x)), Positions.positions


@pytest.mark.parametrize("make", [cached_function, cached_method, cached_method_of_class, table_of_class])
def test_no_tensor_without_values_stays(make):
    step, positions = make()
    captured = Step(step, build=interpret, strict=True)
    known = positions(7)
    for count in (3, 3, 3, 4, 4, 3, 4):
        x = torch.ones(count)
        assert_same(captured(x), x + torch.arange(float(count)))
        assert positions(count).tolist() == list(range(count))
    assert positions(7) is known
    assert {graph.signature["x"] for graph in captured.graphs} == {"float32[3]", "float32[4]"}
    assert captured.graphs[-1].num_runs > 1


def test_a_cache_too_small_ends_in_eager_mode():
    @functools.lru_cache(maxsize=1)
    def ones(count):
        return torch.ones(count)

    captured = Step(lambda x: x + ones(2)[:1] + ones(3)[:1], build=interpret)
    with pytest.warns(UserWarning, match="creates new state .ones's cache. again and again"):
        for _ in range(5):
            assert captured(torch.zeros(1)).tolist() == [2]
    assert captured.fallbacks


def test_a_cache_that_eager_calls_do_not_ask_is_named_with_its_line():
    @functools.lru_cache
    def names(count):
        return ["rows"] * count

    def step(x):
        if x.sum() > 0:
            return x + len(names(3))
        return x * 2

    captured = Step(step, build=interpret)
    with pytest.warns(FallbackWarning, match="names's cache") as told:
        for _ in range(5):
            assert_same(captured(torch.zeros(1)), torch.zeros(1))
    assert len(told) == 1
    assert f"test_caches.py:{step.__code__.co_firstlineno + 2}" in str(told[0].message)
    followed = Step(lambda x: x + len(names.__wrapped__(3)) if x.sum() > 0 else x * 2, build=interpret, strict=True)
    assert_same([followed(torch.zeros(1)) for _ in range(3)], [torch.zeros(1)] * 3)
    assert followed.graphs


@pytest.mark.parametrize("maxsize", [None, 1, 0])
def test_calls_without_the_cache_serve_numbers_that_change_and_those_with_it_are_named(maxsize):
    @functools.lru_cache(maxsize=maxsize)
    def scale(number):
        return torch.full((1,), 0.5) / (1 + number)

    without = Step(lambda x, number: x * scale.__wrapped__(number), build=interpret, strict=True)
    for number in range(4):
        assert_same(without(torch.ones(1), number), torch.full((1,), 0.5) / (1 + number))
    assert len(without.graphs) <= 2
    assert scale.cache_info().misses == 0

    def step(x, number):
        first = x * scale.__wrapped__(number)
        return first * scale(number)

    with_it = Step(step, build=interpret, strict=True)
    with_it(torch.ones(1), 0)
    with pytest.raises(CaptureError, match="scale, which has a cache") as caught:
        with_it(torch.ones(1), 1)
    assert caught.value.where == f"{__file__}:{step.__code__.co_firstlineno + 2}"
