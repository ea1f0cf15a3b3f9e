"""Sees that replays with collectives in them come to an end, since a process that waits in one cannot be reached.

When another process ends or stands still in the midst of a step, the device of this one waits for it for ever, and
PyTorch's own watchdog knows nothing of what is in a graph. So a thread looks: each call leaves an event after its
replay, and once one has not come for the group's timeout, or another process has ended meanwhile, the thread says who
is to blame and ends this process. Nothing else would: the host may be waiting for the device.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from millstream.data_parallel.agreement import Agreement
from millstream.data_parallel.board import Board
from millstream.device import DeviceContext

LOOK_S = 0.5
"""So often the thread looks."""

GRACE_S = 3.0
"""So long a step may go on after another process has ended: it may have ended because all is done."""


class Watchdog:
    """Watches the replays of this process.

    Args:
        board: Of the processes.
        give_up: Called with what happened, in the thread; not expected to return.
    """

    def __init__(self, board: Board, give_up: Callable[[str], None]) -> None:
        self._board, self._give_up = board, give_up
        self._latest: tuple[int, Any, DeviceContext] | None = None  # number of the replay, event after it, its place
        self._count = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, place: DeviceContext) -> None:
        """A replay has been launched on the current stream."""
        self._count += 1
        self._board.note(self._count)
        with self._lock:
            event = place.events.acquire() if self._latest is None else self._latest[1]
            event.record(place.current_stream())
            self._latest = self._count, event, place
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="millstream watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                latest, self._latest = self._latest, None  # its event is ours now, the next call takes another one
            if latest is None:
                continue
            number, event, place = latest
            self._await(number, event, place)
            if not place.closed:
                place.events.release(event)

    def _await(self, number: int, event: Any, place: DeviceContext) -> None:
        start, ended_at = time.monotonic(), 0.0
        while not _is_over(event, place):
            now = time.monotonic()
            ended = self._board.ended()
            ended_at = ended_at or (now if ended else 0.0)
            if (ended and now - ended_at > GRACE_S) or now - start > self._board.timeout_s:
                self._give_up(self.describe(number, ended, now - start))
                return
            time.sleep(LOOK_S)

    def describe(self, number: int, ended: list[int], waited_s: float) -> str:
        """Return what happened, for people.

        Args:
            number: Of the replay that has not ended, from 1.
            ended: Ranks of processes that have ended.
            waited_s: How long it was waited for.
        """
        board, counts = self._board, self._board.counts()
        behind = [rank for rank, count in enumerate(counts) if count < number]
        if ended:
            who = f"{', '.join(map(board.name, ended))} has ended"
        elif behind:
            who = f"{', '.join(map(board.name, behind))} did not launch it: {counts} were launched, by rank"
        else:
            who = f"all have launched it ({counts}, by rank), so that a device stands still"
        return (
            f"Rank {board.rank}: replay {number} of a step with collectives is not over after {waited_s:.0f} s; {who}. "
            "What was trained is lost: go on from a checkpoint."
        )


def _is_over(event: Any, place: DeviceContext) -> bool:
    if place.closed:
        return True
    if not place.capture_lock.acquire(blocking=False):
        return False  # another thread captures: to ask for an event would end that
    try:
        with place.driver.spare_captures():
            return bool(event.query())
    except (RuntimeError, torch.AcceleratorError):  # the device has failed, which the next call of anyone's tells
        return True
    finally:
        place.capture_lock.release()


def end_process(what: str) -> None:
    """Say what happened and end the process at once, whatever its other threads wait for."""
    sys.stderr.write(f"millstream: {what}\n")
    sys.stderr.flush()
    os._exit(1)


_watchdogs: WeakKeyDictionary[Agreement, Watchdog] = WeakKeyDictionary()


def watchdog_of(agreement: Agreement) -> Watchdog:
    """The watchdog of a group's replays."""
    if agreement not in _watchdogs:
        _watchdogs[agreement] = Watchdog(agreement.board, end_process)
    return _watchdogs[agreement]
