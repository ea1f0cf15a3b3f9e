"""Notes on the nodes of a graph that is being captured, by ``torch.fx.traceback``. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.fx.traceback

STREAM = "millstream_stream"
"""Where a node's ``meta["custom"]`` has the name of the stream that it was written for."""


def annotate_stream(name: str) -> AbstractContextManager[None]:
    """Note operators that are captured meanwhile, and later their gradients, as written for a stream."""
    return torch.fx.traceback.annotate({STREAM: name})


def current_stream_hint() -> str | None:
    """The name of the stream that operators are noted for at present; ``None`` where there is none."""
    hint = torch.fx.traceback.current_meta.get("custom", {}).get(STREAM)
    return None if hint is None else str(hint)


def note_stream_hint(node: Any, name: str) -> None:
    """Note a node as written for a stream."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), STREAM: name}


def stream_hint_of(node: Any) -> str | None:
    """The stream that a node was written for: empty for the caller's, ``None`` where nothing is noted."""
    hint = (node.meta.get("custom") or {}).get(STREAM)
    return None if hint is None else str(hint)
