"""Reports of the checker: which steps conflict over which buffer, and the last things that happened to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """An action of a step on a buffer's memory."""

    READ = "reads"
    WRITE = "writes"
    UPDATE = "reads and writes"
    PART = "writes a part of"
    ALLOCATE = "allocates"
    FREE = "frees"


@dataclass(frozen=True, slots=True)
class Access:
    """A step that touches a buffer.

    Attributes:
        step: Its position in ``plan.steps``.
        stream: Where it is issued.
        action: What it does to the buffer.
        kernel: Id of the kernel; ``None`` for steps that launch none.
        name: Name of the kernel, ``copy``, or empty.
        source: The user's line the kernel comes from, or empty.
    """

    step: int
    stream: int
    action: Action
    kernel: int | None = None
    name: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = f"step {self.step} on stream {self.stream}"
        if self.kernel is None:
            return f"{place}{f': {self.name}' if self.name else ''} {self.action} it"
        source = f" ({self.source})" if self.source else ""
        return f"{place}: kernel {self.kernel} {self.name!r}{source} {self.action} it"


def _tell(head: str, accesses: Iterable[Access], remedy: str, story: tuple[Access, ...]) -> str:
    """Write a report: what is wrong, the steps at odds, the remedy, and the steps that led there."""
    lines = [f"{head}:", *(f"  {access}" for access in accesses), f"To mend it, {remedy}."]
    if story:
        lines += ["The last steps that touched it:", *(f"  {access}" for access in story)]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Race:
    """Two conflicting uses of a buffer that are not ordered as the program orders them.

    Attributes:
        buffer: The memory in question, by its owner's id.
        first: The use that must come first.
        second: The use that must come after it.
        is_reversed: Whether they are ordered the other way round; otherwise nothing orders them.
        story: The last steps that touched the buffer, up to these, in the order of the host.
    """

    buffer: str
    first: Access
    second: Access
    is_reversed: bool
    story: tuple[Access, ...]

    def __str__(self) -> str:
        if self.is_reversed:
            fault, remedy = "these run in the wrong order", "launch them in program order"
        else:
            fault = "nothing orders these"
            remedy = (
                f"record an event on stream {self.first.stream} after the first, and let stream {self.second.stream} "
                "wait for it before the second"
            )
        return _tell(f"race on buffer {self.buffer!r}: {fault}", (self.first, self.second), remedy, self.story)


class LifetimeFault(StrEnum):
    """A fault in a buffer's life."""

    NEVER_ALLOCATED = "is used but never allocated"
    USE_BEFORE_ALLOCATE = "is used without being ordered after its allocation"
    ALLOCATED_TWICE = "is allocated twice"
    USE_AFTER_FREE = "is used after it is freed"
    EARLY_FREE = "is freed on a stream that is not ordered after a use of it"
    FREED_TWICE = "is freed twice"
    FREE_BEFORE_ALLOCATE = "is freed without being allocated before"
    FREED_ELSEWHERE = "is freed on another stream than it was allocated on"
    MISSING_JOIN = "is still in use on another stream at the end of stream 0"


_REMEDY = {
    LifetimeFault.NEVER_ALLOCATED: "allocate it before its first write",
    LifetimeFault.USE_BEFORE_ALLOCATE: "allocate it before its first write, on that stream, and let other streams wait",
    LifetimeFault.ALLOCATED_TWICE: "drop the second allocation",
    LifetimeFault.USE_AFTER_FREE: "free it after its last use",
    LifetimeFault.EARLY_FREE: "let the stream that frees it wait for the use first, or free it later",
    LifetimeFault.FREED_TWICE: "drop the second free",
    LifetimeFault.FREE_BEFORE_ALLOCATE: "free it after its allocation and its last use",
    LifetimeFault.FREED_ELSEWHERE: "free it on the stream that allocated it, whose pool the memory goes back to",
    LifetimeFault.MISSING_JOIN: "record an event after it, and let stream 0 wait for that at the end",
}


@dataclass(frozen=True, slots=True)
class LifetimeError:
    """A use of memory at a time when it does not belong to the buffer.

    Attributes:
        buffer: The memory in question, by its owner's id; ``None`` for a missing join of a kernel that touches nothing.
        fault: What is wrong.
        first: The step at fault, or the earlier one in the order of the host.
        second: The other step, if there is one.
        story: The last steps that touched the buffer, up to these, in the order of the host.
    """

    buffer: str | None
    fault: LifetimeFault
    first: Access
    second: Access | None
    story: tuple[Access, ...]

    def __str__(self) -> str:
        accesses = (self.first,) if self.second is None else (self.first, self.second)
        what = "no memory" if self.buffer is None else f"buffer {self.buffer!r}"
        return _tell(f"{what} {self.fault}", accesses, _REMEDY[self.fault], self.story)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two buffers that share bytes of an arena while both may be in use.

    Attributes:
        buffer: The one written first.
        other: The one that takes its bytes.
        start: First shared byte of the arena.
        end: One after the last shared byte.
        first: A use of ``buffer`` that need not be over yet.
        second: The first use of ``other``.
    """

    buffer: str
    other: str
    start: int
    end: int
    first: Access
    second: Access

    def __str__(self) -> str:
        head = f"buffers {self.buffer!r} and {self.other!r} share bytes {self.start} to {self.end} of the arena"
        return f"{head}:\n  {self.first}\n  {self.second}"
