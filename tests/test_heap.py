"""Objects by type: all that there are, and none is kept."""

import gc
import sys
import threading
import weakref

import pytest

from millstream.heap import frames_of_threads, instances, objects_of_types


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


def test_no_collection_begins_while_frames_of_threads_are_looked_at():
    """Python 3.11 might have one where a frame becomes an object, and the frame's thread go on meanwhile."""
    begun, before = [], gc.get_threshold()

    def note(phase, _):
        begun.append(phase)

    gc.callbacks.append(note)
    try:
        with frames_of_threads() as frames:
            begun.clear()
            made = [[] for _ in range(2 * before[0])]
            num_begun = len(begun)
        again = [[] for _ in range(2 * before[0])]
    finally:
        gc.callbacks.remove(note)
    assert threading.get_ident() in frames
    assert len(made) == len(again)
    assert not num_begun or sys.version_info >= (3, 12)
    assert len(begun) > num_begun, "it goes on afterwards"
    assert gc.get_threshold() == before
