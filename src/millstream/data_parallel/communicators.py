"""Choose the communicator of a process group's collectives: its own, or one of ours of the same processes.

One of ours is used by nothing else, and may be told to take few thread blocks, which leaves more of a GPU to what is
computed meanwhile.

**Contract**
- Eager collectives of a group, those between segments included, are all on its present communicator; a graph stays on
  that of its capture.
- Communicators are opened, changed and closed in all processes at once, by what they have agreed on.
- They end before the group does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from millstream._torch.distributed.group_copies import new_communicator
from millstream._torch.distributed.shutdown import destroy, end_with
from millstream.errors import ArgumentError

AUTO, GROUP, OWN = "auto", "group", "own"
"""Of ``MILLSTREAM_COMMUNICATOR``, where it is no number of thread blocks: what is quickest; that of the group; one of
ours as NCCL makes it."""


def communicator_wanted() -> str:
    """Return which one is to be used, by ``MILLSTREAM_COMMUNICATOR``: ``AUTO``, ``GROUP``, ``OWN`` or a number from 1.

    Raises:
        ArgumentError: It says nothing of the kind.
    """
    wanted = os.environ.get("MILLSTREAM_COMMUNICATOR") or AUTO
    if wanted not in (AUTO, GROUP, OWN) and not (wanted.isascii() and wanted.isdecimal() and int(wanted) > 0):
        raise ArgumentError(
            f"MILLSTREAM_COMMUNICATOR={wanted!r} is none of {AUTO!r}, {GROUP!r}, {OWN!r}, and no number of thread "
            "blocks; give one of them."
        )
    return wanted


@dataclass(frozen=True, eq=False)
class Communicator:
    """One of ours.

    Attributes:
        group: Through which PyTorch uses it.
        max_ctas: At most so many thread blocks a collective; ``None``: as many as NCCL chooses.
    """

    group: Any
    max_ctas: int | None

    def __str__(self) -> str:
        return "a communicator of its own" + ("" if self.max_ctas is None else f" of at most {self.max_ctas} CTAs")


class Communicators:
    """The communicators of one process group.

    Attributes:
        current: On which collectives are issued now; ``None`` for the group's own.
    """

    def __init__(self) -> None:
        self.current: Communicator | None = None
        self._open: dict[int | None, Communicator] = {}

    def open(self, group: Any, device: torch.device, max_ctas: int | None) -> Communicator:
        """One of at most so many thread blocks; the same for the same number.

        Raises:
            RuntimeError: It cannot be made.
        """
        if max_ctas not in self._open:
            self._open[max_ctas] = Communicator(new_communicator(group, device, max_ctas), max_ctas)
            end_with(group, self._open[max_ctas].group)
        return self._open[max_ctas]

    def is_open(self, max_ctas: int | None) -> bool:
        """Return whether there is that one already."""
        return max_ctas in self._open

    def close(self, group: Any, max_ctas: int | None) -> None:
        """Give back the memory of one that no graph uses, if it is open."""
        communicator = self._open.pop(max_ctas, None)
        if communicator is not None:
            destroy(group, communicator.group)

    @contextlib.contextmanager
    def on(self, communicator: Communicator | None) -> Iterator[None]:
        """Within the context collectives are issued, or captured, on that one."""
        before, self.current = self.current, communicator
        try:
            yield
        finally:
            self.current = before


_known: WeakKeyDictionary[Any, Communicators] = WeakKeyDictionary()


def communicators_of(group: Any) -> Communicators:
    """The communicators of a process group, or of all processes if ``None``."""
    group = group or dist.group.WORLD
    return Communicators() if group is None else _known.setdefault(group, Communicators())
