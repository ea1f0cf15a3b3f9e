"""The order of a process group's end: captured graphs with its collectives, then further groups beside it.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist


class Releasable(Protocol):
    """An object that holds collectives in captured graphs."""

    def release(self) -> None: ...


_captures: WeakKeyDictionary[Releasable, Any] = WeakKeyDictionary()
_beside: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def release_before_shutdown(capture: Releasable, group: Any) -> None:
    """Have ``capture`` released before ``group``, which otherwise waits for its graph's end for ever, is destroyed."""
    _captures[capture] = group
    _watch()


def end_with(group: Any, other: Any) -> None:
    """Have the process group ``other`` destroyed before ``group`` is."""
    _beside.setdefault(group, []).append(other)
    _watch()


def destroy(group: Any, other: Any) -> None:
    """Destroy ``other`` now, in all processes at once; no graph has its collectives any more."""
    _beside[group].remove(other)
    dist.destroy_process_group(other)


def _watch() -> None:
    """Have PyTorch's ``destroy_process_group`` go through ours, until there is no group any more."""
    original = dist.distributed_c10d.destroy_process_group
    if hasattr(original, "restore"):
        return

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        is_all = group is None or group is dist.group.WORLD
        for capture, of in list(_captures.items()):
            if is_all or of is group:
                capture.release()
                _captures.pop(capture, None)
        if is_all:
            _beside.clear()  # PyTorch ends them, the latest first
            destroy_process_group.restore()  # type: ignore[attr-defined]
        else:
            for other in _beside.pop(group, []):
                original(other)
        original(group)

    def restore() -> None:
        for module in (dist, dist.distributed_c10d):
            module.destroy_process_group = original

    destroy_process_group.restore = restore  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        module.destroy_process_group = destroy_process_group
