"""Marked code within marked code: signals wait for the right end of it."""

import signal

import pytest

from millstream.signals import signals_wait, undisturbed


@pytest.fixture(autouse=True)
def _interrupts():
    """As Python has them: a shell starts what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_is_soon_over_ends_before_an_interrupt_of_what_takes_long():
    done = []

    def work(_):
        signal.raise_signal(signal.SIGINT)
        done.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), signals_wait(interrupts_wait=False):
        undisturbed(work, None)
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_all_signals_wait_within_what_has_few_of_them_wait():
    handled = []

    def work(_):
        with signals_wait(interrupts_wait=True):
            signal.raise_signal(signal.SIGUSR1)
        return [*handled]

    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        assert undisturbed(work, None) == []
        assert handled == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)
