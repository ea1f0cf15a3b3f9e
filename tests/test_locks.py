"""Locks that a thread lets others have for a while are held again afterwards, whatever comes."""

import threading
from contextlib import suppress

import pytest

from millstream.locks import releasable, released
from tests.interrupts import interrupt_everywhere


def test_ctrl_c_at_any_moment_leaves_locks_as_they_were():
    outer, inner = threading.RLock(), threading.RLock()

    def call():
        with outer, releasable(outer), inner, releasable(inner), released():
            assert is_free(outer)
            assert is_free(inner)

    def is_free(lock):
        answers = []

        def ask():
            if lock.acquire(blocking=False):
                lock.release()
                answers.append(True)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers == [True]

    def run(interrupter):
        with suppress(KeyboardInterrupt):
            interrupter.run(call)
        assert is_free(outer)
        assert is_free(inner)
        call()  # nothing is left of the one that was interrupted

    places = interrupt_everywhere(run, "/locks.py")
    assert {"releasable.__enter__", "released"} <= {*places}


def test_locks_are_held_again_after_an_error():
    lock = threading.RLock()

    def fail():
        with released():
            assert not lock._is_owned()
            raise ValueError("inside")

    with lock, releasable(lock):
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert lock._is_owned()
    assert not lock._is_owned()
