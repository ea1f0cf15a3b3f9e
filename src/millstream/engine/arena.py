"""Memory of a plan in one piece, and one piece that several programs have in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch

from millstream._torch.tensors import reinterpret
from millstream.check import check_plan
from millstream.graph import MemoryLayout, Plan, Role, alignment_of
from millstream.locks import ForkSafeLock
from millstream.program import Program, TensorLayout
from millstream.schedule import assign_offsets

HEADROOM = 16  # an arena that grows takes a sixteenth more than it needs: where sizes rise, it then grows more rarely
GRAIN_BYTES = {"cuda": 2 << 20}  # PyTorch takes no less from a GPU: small ones, as of a model that decodes, never grow


class User(Protocol):
    """Whoever has memory of an arena."""

    def release(self) -> None:
        """Forget where the memory was: it is given back."""
        ...


class Arena(ForkSafeLock):
    """Memory of one device that programs have in turn: as large as the largest of them needs, and no larger.

    Nothing in it outlives a call. Where it has to grow it is given back and taken again, and all users that had memory
    of it are told: each prepares itself when it is called next. On a GPU it serves calls on one stream; where
    calls come on a second one, it is given up, and everybody has memory of their own from then on.

    Attributes:
        lock: On a CPU, held by the thread that runs. On a GPU, calls are in order anyway: see
            ``SharedGraphMemory.lock``.
        latest: Whose values are in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: object = None
        self._memory: torch.Tensor | None = None
        self._users: WeakSet[User] = WeakSet()
        self._stream: int | None = None
        self._is_given_up = False

    @property
    def num_bytes(self) -> int:
        """How large it is at present."""
        return 0 if self._memory is None else self._memory.numel()

    def serves(self, stream: int) -> bool:
        """Return whether a call on the stream with this handle may use it; where not, nobody may any more."""
        if self._stream is None:
            self._stream = stream
        if stream != self._stream and not self._is_given_up:
            self._is_given_up = True
            self._release_all()
        return not self._is_given_up

    def take(self, num_bytes: int, device: torch.device | str, user: User) -> torch.Tensor:
        """Memory for a user, until they are released or give it back."""
        if self._memory is None or self._memory.numel() < num_bytes:
            grown = num_bytes if self._memory is None else num_bytes + num_bytes // HEADROOM
            grain = GRAIN_BYTES.get(torch.device(device).type, 1)
            grown = -(-grown // grain) * grain
            self._release_all()  # before more is taken
            self._memory = torch.empty(grown, dtype=torch.uint8, device=device)
        self._users.add(user)
        return self._memory[:num_bytes]

    def _release_all(self) -> None:
        for user in list(self._users):
            user.release()
        self.latest = self._memory = None

    def give_back(self, user: User) -> None:
        """Say that a user needs their memory no more; that of the last one goes back to the device."""
        self._users.discard(user)
        if not self._users:
            self.latest = self._memory = None


@dataclass(frozen=True)
class Space:
    """The layout of everything that a call needs in one piece of memory: temporaries, slots for inputs, outputs.

    Attributes:
        temporaries: Their layout; it begins at the start.
        slots: Offset of each.
        outputs: Offset of each that a kernel writes into memory made for it, by buffer id.
        num_bytes: Of all.
    """

    temporaries: MemoryLayout
    slots: tuple[int, ...]
    outputs: dict[str, int]
    num_bytes: int


def lay_out(program: Program, plan: Plan, slot_bytes: Sequence[int]) -> Space:
    """Find places for all memory of a plan but that which operators allocate themselves.

    Args:
        program: What is run.
        plan: On one device, without races.
        slot_bytes: Of each slot.
    """
    temporaries = plan.layout or assign_offsets(plan)
    alignment = alignment_of(temporaries.device)
    end = temporaries.arena_bytes

    def place(num_bytes: int) -> int:
        nonlocal end
        start = -(-end // alignment) * alignment
        end = start + num_bytes
        return start

    slots = tuple(map(place, slot_bytes))
    allocated = {name for kernel in program.graph.kernels for name in kernel.allocates}
    outputs = {
        buffer.id: place(buffer.num_bytes)
        for buffer in program.graph.buffers
        if buffer.role is Role.OUTPUT and buffer.id in program.layouts and buffer.id not in allocated
    }
    return Space(temporaries, slots, outputs, end)


def bind_arena(program: Program, layout: MemoryLayout, memory: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Put the buffers of a layout into memory, of their own unless some is given; returns them by buffer id."""
    if memory is None:
        memory = torch.empty(layout.arena_bytes, dtype=torch.uint8, device=layout.device)
    return bind_buffers(program, layout.offset_of, memory)


def bind_arenas(
    program: Program, plan: Plan, take: Callable[[MemoryLayout], torch.Tensor | None] = lambda layout: None
) -> dict[str, torch.Tensor]:
    """Put the temporaries of each device into an arena of its own; returns them by buffer id.

    Args:
        program: What is run.
        plan: On several devices.
        take: Gives memory for an arena; ``None`` leaves that to PyTorch.

    Raises:
        PlanError: They would overwrite each other; a bug.
    """
    bound: dict[str, torch.Tensor] = {}
    for device in sorted({buffer.device for buffer in plan.graph.buffers}):
        layout = assign_offsets(plan, device)
        check_plan(plan, layout)
        bound |= bind_arena(program, layout, take(layout))
    return bound


def bind_buffers(program: Program, offset_of: dict[str, int], memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """The buffers at these offsets in memory, by buffer id, but for those that need memory of their own."""
    return {
        name: view_memory(memory, offset, program.graph.buffer_of[name].num_bytes, program.layouts[name])
        for name, offset in offset_of.items()
        if name not in program.apart
    }


def view_memory(memory: torch.Tensor, offset: int, num_bytes: int, layout: TensorLayout | Any) -> torch.Tensor:
    """A tensor of the given layout at an offset in memory."""
    return reinterpret(memory[offset : offset + num_bytes].view(layout.dtype), layout.size, layout.stride, 0)
