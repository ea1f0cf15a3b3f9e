"""Calls have room for their frames, however deep the stack is."""

from __future__ import annotations

import resource

import pytest

from millstream.room import with_room


def leaf(number):
    return number + 1


leaf.__code__ = leaf.__code__.replace(co_stacksize=200)  # its frame ends in another piece at some depth


def deepest():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(2000):
        leaf(number)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth, function):
    return function() if depth == 0 else at_depth(depth - 1, function)


def test_no_depth_has_python_map_memory_in_each_call():
    mapped = [at_depth(depth, lambda: with_room(deepest)) for depth in range(1, 200)]
    assert max(mapped) < 1000  # without room it is 2,000 at some


def test_results_and_errors_are_the_functions():
    assert with_room(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        with_room(divmod, 7, 0)
