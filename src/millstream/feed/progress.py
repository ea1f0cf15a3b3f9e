"""How far the consumer has got, so that a run can go on exactly there.

A feed pulls ahead, so the state of the source itself is that of a batch which nobody has seen yet. Therefore the state
after each pull travels with the batch, and becomes the feed's when the batch is handed out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
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
        note: What travelled with that batch. Who hands one out sets it, and does no more: a call would be a moment for
            an interrupt, behind which the batch is nobody's.
        rows: Rows of a full batch, once known.
        rowed: Of each of its leaves, whether it had so many: of a shorter batch these are the ones that are shorter.
    """

    def __init__(self) -> None:
        self.note = self._initial = Note(0, None, None)
        self.rows: int | None = None
        self.rowed: tuple[bool, ...] | None = None
        self._loaded: Note | None = None  # as long as it is the note, a state was loaded and no batch delivered since

    def finish(self, loader: Any) -> None:
        """The pass is over: the next one begins at the beginning."""
        self._go_to(0, take_state(loader) if is_stateful(loader) else None)

    def _go_to(self, position: int, source: Any) -> None:
        self.note = Note(position, source, self.num_valid)

    def begin(self, loader: Any) -> tuple[Iterator[Any], int, Any]:
        """Make the iterator of a pass, resuming if a state was loaded and no batch has been delivered since.

        Returns:
            The iterator, how many batches are to be skipped, and what has the source's state, if anything does.
        """
        is_loaded, is_first = self.note is self._loaded, self.note is self._initial
        if not is_loaded and self.position:  # the last pass was left
            self._go_to(0, None)
            is_first = True
        if not self.position:
            self.rows = self.rowed = None  # batches may be of another size than those of the last pass
        source = copy.deepcopy(self.note.source) if is_loaded else None  # a copy: the source may go on with the object
        stateful = loader if is_stateful(loader) else None
        if stateful is not None and source is not None:
            stateful.load_state_dict(source)
            return iter(loader), 0, stateful
        iterator = iter(loader)
        if stateful is None and iterator is not loader and is_stateful(iterator):
            stateful = iterator
            if source is not None:
                iterator.load_state_dict(source)
                return iterator, 0, stateful
        if stateful is not None and is_first:
            with suppress(Exception):  # where it has none yet, one is taken with the first batch
                self._go_to(0, take_state(stateful))
        if iterator is loader:
            self._loaded = None  # what this pass skips is gone, and no other can skip it again
        return iterator, self.position, stateful

    @property
    def position(self) -> int:
        """Batches of the source up to the delivered one."""
        return self.note.position

    @property
    def num_valid(self) -> int | None:
        """Rows of the delivered batch that are data; ``None`` if not known."""
        return self.note.num_valid

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data, as far as the source's is."""
        return {"version": VERSION, "position": self.position, "source": self.note.source, "rows": self.rows} | (
            {} if self.rowed is None else {"rowed": list(self.rowed)}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin behind the batch that was delivered when ``state``, which is one, was taken.

        If that pass ends before it has delivered one, by an interrupt or an error, so does the one behind it.
        """
        self._go_to(state["position"], state["source"])
        self.rows = state["rows"]
        self.rowed = tuple(state["rowed"]) if "rowed" in state else None
        self._loaded = self.note


def check_state(state: Any) -> None:
    """Refuse what is not the state of a feed.

    Raises:
        ArgumentError: It is something else.
    """
    if (
        not isinstance(state, dict)
        or state.get("version") != VERSION
        or "source" not in state
        or not _is_count(state.get("position"))
        or not ("rows" in state and (state["rows"] is None or _is_count(state["rows"])))
        or not isinstance(state.get("rowed", []), list)
    ):
        raise ArgumentError(f"This is not the state of a feed (version {VERSION}): {state!r:.200}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def take_state(stateful: Any) -> Any:
    """The state of a source as it is now, whatever becomes of the source."""
    return copy.deepcopy(stateful.state_dict())


def is_stateful(source: Any) -> bool:
    """Whether it has the protocol of torchdata's ``StatefulDataLoader``."""
    if (wrapped := getattr(source, "base_dataloader", None)) is not None and not is_stateful(wrapped):
        return False  # accelerate's loaders have both methods also where the loader that they wrap has none
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
