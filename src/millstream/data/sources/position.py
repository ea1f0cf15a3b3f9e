"""The position of a feed in its source: what a state has of it, and what the next pass begins with.

The state of the source itself is that of a batch which nobody has seen yet, so the state after each pull travels with
the batch. A source without a state is asked again and what had been delivered is dropped; for that the generators from
which its sampler drew are put back to where they were. A DataLoader draws a seed when it starts workers, and none in
the passes after that with ``persistent_workers``: a resumed pass draws one where the first did.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from millstream.data.sources.generators import is_snapshot
from millstream.errors import ArgumentError

VERSION = 1


@dataclass(slots=True)
class BatchInfo:
    """Facts that travel with a batch.

    Attributes:
        position: How many batches the source has given in this pass, this one included.
        source: The source's own state, if it has one.
        num_valid: Rows of the batch that are data, not padding; ``None`` if nobody asked.
    """

    position: int
    source: Any = None
    num_valid: int | None = None


class Position:
    """The position of the batch delivered last.

    Attributes:
        info: What travelled with that batch.
        rows: Rows of a full batch, once known.
        rowed: Of each of its leaves, whether it had so many: of a shorter batch these are the ones that are shorter.
        draws: Where the generators stood from which the present pass's sampler drew, if it did.
        drawn: Where these stood after that, as a digest.
        kept_workers: Whether the present pass began with worker processes of one before, and drew no seed for them.
        size: Batches of the present pass, and rows of each, where the source tells.
    """

    def __init__(self) -> None:
        self.info = self._initial = BatchInfo(0)
        self.rows: int | None = None
        self.rowed: tuple[bool, ...] | None = None
        self.draws: dict[str, Any] | None = None
        self.drawn: str | None = None
        self.kept_workers = False
        self.size: tuple[int | None, int | None] = (None, None)
        self._loaded: BatchInfo | None = None  # as long as it is the info, nothing was delivered since a state came

    @property
    def position(self) -> int:
        """Batches of the source up to the delivered one."""
        return self.info.position

    @property
    def num_valid(self) -> int | None:
        """Rows of the delivered batch that are data; ``None`` if not known."""
        return self.info.num_valid

    def finish(self, loader: Any) -> None:
        """The pass is over: the next one begins at the beginning."""
        self._forget_draws()
        self._go_to(0, take_state(loader) if is_stateful(loader) else None)

    def _forget_draws(self) -> None:
        self.draws, self.drawn, self.kept_workers = None, None, False

    def _go_to(self, position: int, source: Any) -> None:
        self.info = BatchInfo(position, source, self.num_valid)

    def begin(self) -> tuple[int, Any, dict[str, Any] | None]:
        """Begin a pass, resuming if a state was loaded and no batch has been delivered since.

        Returns:
            How many batches are to be skipped, the source's state, and where generators stood; if they are known.
        """
        is_loaded = self.info is self._loaded
        if not is_loaded and self.position:  # the last pass was left
            self._go_to(0, None)
            self._initial = self.info
        if not self.position:
            self.rows = self.rowed = None  # batches may be of another size than those of the last pass
        if not is_loaded:
            self._forget_draws()
        # A copy: the source may continue with the object.
        source = copy.deepcopy(self.info.source) if is_loaded else None
        return self.position, source, self.draws if is_loaded else None

    def begin_at(self, state: Any) -> None:
        """Before the first batch, the source's state is this."""
        if self.info is self._initial:
            self._go_to(0, state)

    def forget_loaded(self) -> None:
        """What this pass skips is gone, and no other can skip it again."""
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data, as far as the source's is."""
        state = {"version": VERSION, "position": self.position, "source": self.info.source, "rows": self.rows}
        if self.rowed is not None:
            state["rowed"] = list(self.rowed)
        if self.draws is not None and self.position:
            state["generators"], state["drawn"] = self.draws, self.drawn
        if self.kept_workers and self.position:
            state["kept_workers"] = True
        if self.position and self.size != (None, None):
            state["size"] = list(self.size)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin after the batch that was delivered when ``state`` was taken.

        If that pass ends before it has delivered one, by an interrupt or an error, so does the one after it.

        Raises:
            ArgumentError: This is no state of a feed.
        """
        _check(state)
        self._go_to(state["position"], state["source"])
        self.rows = state["rows"]
        self.rowed = tuple(state["rowed"]) if "rowed" in state else None
        self.draws, self.drawn = state.get("generators"), state.get("drawn")
        self.kept_workers = state.get("kept_workers", False)
        batches, rows = state.get("size", (None, None))
        self.size = (batches, rows)
        self._loaded = self.info


def _check(state: Any) -> None:
    if (
        not isinstance(state, dict)
        or state.get("version") != VERSION
        or "source" not in state
        or not _is_count(state.get("position"))
        or not ("rows" in state and (state["rows"] is None or _is_count(state["rows"])))
        or not isinstance(state.get("rowed", []), list)
        or not is_snapshot(state.get("generators"))
        or not isinstance(state.get("drawn", ""), str | None)
        or not isinstance(state.get("kept_workers", False), bool)
        or not _is_size(state.get("size", [None, None]))
    ):
        raise ArgumentError(f"This is not the state of a feed (version {VERSION}): {state!r:.200}")


def _is_size(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(each is None or _is_count(each) for each in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def take_state(stateful: Any) -> Any:
    """The state of a source as it is now, whatever becomes of the source."""
    return copy.deepcopy(stateful.state_dict())


def is_stateful(source: Any) -> bool:
    """Return whether it has the protocol of torchdata's ``StatefulDataLoader``."""
    if (wrapped := getattr(source, "base_dataloader", None)) is not None and not is_stateful(wrapped):
        return False  # accelerate's loaders have both methods also where the loader that they wrap has none
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
