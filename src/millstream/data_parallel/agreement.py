"""Ask, before anything is exchanged, whether all processes of a group replay one and the same capture.

A collective that is captured in a graph meets only its like: all processes must replay graphs of one capture, or none.
So they ask each other first. Each reduction, and each broadcast of buffers, is one *question*, the same in every way to
run a step: who does not want to replay answers ``NO`` when the first of its collectives is about to begin, who wants to
does so before the step begins.

**Contract**
- The order of questions is that of the reductions and broadcasts, in all processes, whatever each of them runs.
- A question is asked by all or by none: they agree when the group is first used, where all share a host.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from millstream._torch.distributed.collectives import backend_of, gather_later, timeout_of
from millstream._torch.workarounds import is_off
from millstream.data_parallel.board import Board, make_file
from millstream.data_parallel.hyperparameters import MARK_BITS, NOT_KNOWN, differing, marks_differ
from millstream.errors import ArgumentError, DataParallelError

NO = 0
"""The answer of who does not want to replay."""

MARK_SHIFT = 20
"""Where an answer has the mark of what the step trains by."""
_MARKS = ((1 << MARK_BITS) - 1) << MARK_SHIFT

COMPARED_EVERY, WAITED_FOR_AFTER = 64, 8
"""Questions of which one is compared where nobody asks, and after how many more its answers are looked at."""

REMEMBERED = 200
"""Questions: long enough to tell a straggler from chance, and short enough to forget what compiling took."""

COMPARISON = "comparison"
"""In ``MILLSTREAM_WITHOUT``: processes do not compare what they train by."""

CHOICES = ("auto", "captured", "between")
"""Of ``MILLSTREAM_COLLECTIVES``: whether collectives are captured with the step they are in, or issued in between."""


class Agreement:
    """The agreement of one group's processes.

    Attributes:
        label: What it is, for people.
        board: Through which.
        num_captures: How many captures all processes have made together: the next one's number.
        arrivals: When each process came to be asked, of the last ``REMEMBERED`` questions.
        hyperparameters: What the step that this process runs trains by, as far as it is known.
    """

    label = "whether all processes are there"

    def __init__(self, board: Board, group: dist.ProcessGroup | None = None) -> None:
        self.board, self._group = board, group
        self.hyperparameters = NOT_KNOWN
        self.num_captures = 0
        self.arrivals: deque[list[int]] = deque(maxlen=REMEMBERED)
        self._answered = self._is_silent = False
        self._compares = not is_off(COMPARISON)  # and processes have told the same names so far

    def ask(self, answer: int, what: str) -> list[int]:
        """Answer the question of the next exchange, and hear what all processes do. Where they differ it is answered.

        Args:
            answer: What this process wants; not ``NO``.
            what: What comes next, for an error.

        Raises:
            DataParallelError: A process is gone, or does not come, or has other hyperparameters, in all of them.
        """
        answers = self.gather(answer, what)
        self._answered = len(set(answers)) > 1
        return answers

    def decline(self, what: str) -> None:
        """An exchange begins by itself: answer ``NO``, unless that question has been asked."""
        if self._is_silent:
            return
        if not self._answered:
            self.gather(NO, what)
        self._answered = False

    def gather(self, answer: int, what: str) -> list[int]:
        """Tell all processes an answer, and hear theirs."""
        mark = self.hyperparameters.mark if self._compares else NOT_KNOWN.mark
        answers = self.board.gather(answer | mark << MARK_SHIFT, what)
        self.arrivals.append(self.board.arrivals_ns())
        marks = {each & _MARKS for each in answers}
        if len(marks) > 1 and marks_differ(each >> MARK_SHIFT for each in marks):
            error = differing(self.hyperparameters.told, self._group)
            if error is not None:
                self._answered = False  # what they asked about does not take place
                raise error
            self._compares = False
        return [each & ~_MARKS for each in answers]

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Within the context all processes do the same, and nobody asks."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False


class PeriodicComparison:
    """What processes compare who do not ask each other: now and then, and nobody waits for it.

    Args:
        group: The processes.
        device: Where they exchange what is compared.

    Attributes:
        hyperparameters: As of ``Agreement``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.hyperparameters = NOT_KNOWN
        self._count = 0  # of questions
        self._compared = NOT_KNOWN
        self._marks: Callable[[], list[int]] | None = None  # of all, since they were told
        self._compares = True

    def decline(self, what: str) -> None:  # noqa: ARG002  as of ``Agreement``
        """An exchange begins, the same in all processes.

        Raises:
            DataParallelError: In one before, processes differed in what they train by; in all of them.
        """
        if not self._compares:
            return
        self._count += 1
        turn = self._count % COMPARED_EVERY
        if turn == 0:
            self._compared, self._marks = (
                self.hyperparameters,
                gather_later(self._group, self._device, self.hyperparameters.mark),
            )
        elif turn == WAITED_FOR_AFTER and self._marks is not None:
            marks, self._marks = self._marks, None
            try:
                differ = marks_differ(marks())
            except RuntimeError:  # a process is gone, which the exchange tells better
                return
            if differ:
                since = f"That was so {WAITED_FOR_AFTER} exchanges ago"
                error = differing(self._compared.told, self._group, since)
                self._compares = error is not None
                if error is not None:
                    raise error


_known: WeakKeyDictionary[dist.ProcessGroup, tuple[Board | None, Agreement | PeriodicComparison | None]] = (
    WeakKeyDictionary()
)


def collectives_wanted() -> str:
    """Return where collectives are to be issued, by ``MILLSTREAM_COLLECTIVES``.

    Raises:
        ArgumentError: It says none of ``CHOICES``.
    """
    wanted = os.environ.get("MILLSTREAM_COLLECTIVES") or "auto"
    if wanted not in CHOICES:
        raise ArgumentError(f"MILLSTREAM_COLLECTIVES={wanted!r} is none of {', '.join(map(repr, CHOICES))}.")
    return wanted


def agreement_of(group: dist.ProcessGroup, *, on_gpu: bool) -> Agreement | PeriodicComparison | None:
    """Return what the processes of a group ask each other by, or else compare by.

    Made in all at once, when first asked for.

    Args:
        group: The processes.
        on_gpu: Whether it is GPUs that exchange.

    Returns:
        ``PeriodicComparison`` where nobody is to capture collectives, or processes are on several hosts; ``None`` where
        there are no others, or nothing is to be compared.

    Raises:
        ArgumentError: As ``collectives_wanted``.
        DataParallelError: A process is gone.
    """
    if group not in _known:
        wanted = collectives_wanted()
        board = meet(group)
        mine = wanted == "captured" or (wanted == "auto" and on_gpu)
        asks = board is not None and all(board.gather(mine, "begin together"))
        _known[group] = (
            board,
            Agreement(board, group) if board is not None and asks else _comparison_of(group, on_gpu=on_gpu),
        )
    return _known[group][1]


def _comparison_of(group: dist.ProcessGroup, *, on_gpu: bool) -> PeriodicComparison | None:
    backend = backend_of(group, torch.device("cuda" if on_gpu else "cpu"))
    if dist.get_world_size(group) == 1 or backend not in ("gloo", "nccl") or is_off(COMPARISON):
        return None
    on_host = backend == "gloo"
    return PeriodicComparison(
        group, torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    )


def compare_over(group: dist.ProcessGroup, name: str, mine: list[str], wanted: str) -> None:
    """See that all processes say the same of what they are about to train. All call it at once.

    Args:
        group: The processes.
        name: Of the model, for people.
        mine: What this one says, entry by entry.
        wanted: What all must do, in a sentence.

    Raises:
        DataParallelError: They differ, or one does not answer.
    """
    rank, everyone = dist.get_rank(group), [list[str]()] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        raise DataParallelError(
            f"Rank {rank} could not compare {name} with the other processes: {error} One of them is gone or does not "
            "answer; nothing has changed yet."
        ) from error
    for other, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip(everyone[0], theirs, strict=False)
            one, two = next(((a, b) for a, b in pairs if a != b), (f"{len(everyone[0])} entries", f"{len(theirs)}"))
            raise DataParallelError(
                f"{name} differs between processes: rank 0 has {one!r} where rank {other} has {two!r}. {wanted}"
            )


def board_known(group: dist.ProcessGroup | None) -> Board | None:
    """The board of a group's processes, where ``agreement_of`` has made one; ``None``: of all processes."""
    group = group or dist.group.WORLD
    return None if group is None else _known.get(group, (None, None))[0]


def meet(group: dist.ProcessGroup) -> Board | None:
    """A new board of the processes of a group, made in all of them at once.

    Returns:
        ``None`` where they are on several hosts, or there is one alone, or others are made up.

    Raises:
        DataParallelError: A process is gone.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return None
    path = make_file(size) if rank == 0 else ""
    try:
        met = _tell(group, (_host(), os.getpid(), path))
        if not all(host == _host() for host, *_ in met) or len({process for _, process, _ in met}) < size:
            return None
        board = _opened(lambda: Board(met[0][2], rank, size, timeout_of(group)))
        has_all = all(_tell(group, board is not None))
        return board if has_all else None
    finally:
        if path:
            Path(path).unlink()


def _opened(make: Callable[[], Board]) -> Board | None:
    try:
        return make()
    except OSError:  # another container of the host's
        return None


def _tell(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    theirs: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(theirs, mine, group=group)
    except RuntimeError as error:
        raise DataParallelError(f"Rank {dist.get_rank(group)} could not reach the other processes: {error}") from error
    return theirs


def _host() -> str:
    """A name that no other running system has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
