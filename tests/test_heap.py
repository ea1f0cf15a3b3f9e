"""Objects by type: all that there are, and none is kept."""

import gc
import threading
import weakref

import pytest

from millstream.heap import instances, objects_of_types


class Kind:
    pass


class Derived(Kind):
    pass


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_objects_are_found_and_let_go(without_collector):
    one, other = Kind(), Derived()
    assert objects_of_types([Kind]) == [one]
    assert set(instances([Kind])) == {one, other}
    references = weakref.ref(one), weakref.ref(other)
    del one, other
    assert [reference() for reference in references] == [None, None]


def test_frozen_objects_are_found():
    one = Kind()
    gc.freeze()
    try:
        assert objects_of_types([Kind]) == []
        assert instances([Kind]) == [one]
    finally:
        gc.unfreeze()


def test_tuples_that_other_threads_are_filling_stay_theirs():
    """Python fails to end a tuple that somebody else holds."""
    stop, errors = threading.Event(), []

    def fill():
        while not stop.is_set():
            try:
                tuple(number for number in range(100))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        objects_of_types([Kind])
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
