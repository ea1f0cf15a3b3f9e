"""What of a feed lasts from pass to pass."""

from __future__ import annotations

import threading

from millstream.data.passes.run import FeedRun
from millstream.data.passes.worker import Worker
from millstream.data.transfer.transfer import Transfer


class PassHandle:
    """One iterator's right to a run; a later one takes it away."""

    def __init__(self) -> None:
        self.is_over = False
        self.why = ""  # if somebody else has ended it

    def end(self, why: str) -> None:
        """Nothing more is handed out through this."""
        if not self.is_over:
            self.is_over, self.why = True, why


class FeedEngine:
    """The parts of a feed that last from pass to pass: its thread, its way to the device, and the present run.

    It refers to neither the feed nor to iterators, so that they can die.
    """

    def __init__(self) -> None:
        self.run: FeedRun | None = None
        self.handle: PassHandle | None = None
        self.transfer: Transfer | None = None
        self._worker: Worker | None = None
        self._lock = threading.RLock()

    @property
    def is_usable(self) -> bool:
        """Whether the transfer is there and open."""
        return self.transfer is not None and self.transfer.is_usable

    def find_worker(self) -> Worker:
        """The feed's thread; another one in a forked child."""
        if self._worker is None or not self._worker.is_usable():
            self._worker = Worker()
        return self._worker

    def leave(self, why: str, *, forever: bool = False) -> None:
        """End the present pass, but not what continues in the next one, unless ``forever``."""
        if self.handle is not None:
            self.handle.end(why)
        if self.run is not None:
            self.run.leave(forever=forever)

    def close(self, why: str = "its device context was closed") -> None:
        """End everything. Any thread; also in a finalizer. Once is enough."""
        self.leave(why, forever=True)
        run, worker = self.run, self._worker
        with self._lock:
            transfer, self.transfer = self.transfer, None
        if transfer is not None and transfer.is_usable:
            if run is not None and not run.is_over and worker is not None:
                worker.submit(transfer.close)  # when its thread has left the source
            else:
                transfer.close()
        if worker is not None:
            worker.end(waits=run is None or run.is_over)
        # Not before: an interrupt may have come, and somebody closes once more.
        self.run = None if self.run is run else self.run
        self._worker = None if self._worker is worker else self._worker
