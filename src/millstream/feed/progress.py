"""How far the consumer has got, so that a run can go on exactly there.

A feed pulls ahead, so the state of the source itself is that of a batch which nobody has seen yet. Therefore the state
after each pull travels with the batch, and becomes the feed's when the batch is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millstream.errors import ArgumentError

VERSION = 1


@dataclass(slots=True)
class Note:
    """What travels with a batch.

    Attributes:
        position: How many batches the source has given in this pass, this one included.
        source: The source's own state, if it has one.
        num_valid: Rows of the batch that are data, not padding; ``None`` if nobody asked.
    """

    position: int
    source: Any
    num_valid: int | None


class Progress:
    """The position of the delivered batch.

    Attributes:
        rows: Rows of a full batch, once known.
        num_valid: Rows of the delivered batch that are data; ``None`` if not known.
    """

    def __init__(self) -> None:
        self._position = 0
        self._source: Any = None
        self.rows: int | None = None
        self.num_valid: int | None = None
        self._to_resume = False

    def deliver(self, note: Note) -> None:
        """A batch was handed out."""
        self._position, self._source, self.num_valid = note.position, note.source, note.num_valid

    def finish(self, loader: Any) -> None:
        """The pass is over: the next one begins at the beginning."""
        self._position, self._source = 0, loader.state_dict() if is_stateful(loader) else None

    def begin(self, loader: Any) -> tuple[Iterator[Any], int, Any]:
        """Make the iterator of a pass, resuming if a state was loaded.

        Returns:
            The iterator, how many batches are to be skipped, and what has the source's state, if anything does.
        """
        resume, self._to_resume = self._to_resume, False
        if not resume:
            self._position, self._source = 0, None
        stateful = loader if is_stateful(loader) else None
        if stateful is not None and self._source is not None:
            stateful.load_state_dict(self._source)
            return iter(loader), 0, stateful
        iterator = iter(loader)
        if stateful is None and iterator is not loader and is_stateful(iterator):
            stateful = iterator
            if self._source is not None:
                iterator.load_state_dict(self._source)
                return iterator, 0, stateful
        return iterator, self._position, stateful

    @property
    def position(self) -> int:
        """Batches of the source up to the delivered one."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data, as far as the source's is."""
        return {"version": VERSION, "position": self._position, "source": self._source, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin behind the batch that was delivered when ``state`` was taken."""
        if not isinstance(state, dict) or state.get("version") != VERSION:
            raise ArgumentError(f"This is not the state of a feed (version {VERSION}): {state!r:.200}")
        self._position, self._source, self.rows = state["position"], state["source"], state["rows"]
        self._to_resume = True


def is_stateful(source: Any) -> bool:
    """Whether it has the protocol of torchdata's ``StatefulDataLoader``."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
