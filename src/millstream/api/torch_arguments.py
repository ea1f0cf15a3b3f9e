"""Translate the arguments of ``torch.compile`` for ``ms.compile``, and our own among a backend's ``options``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from millstream.errors import ArgumentError
from millstream.settings import Settings

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
BACKENDS = ("inductor", "millstream")
OPTIONS = ("engine", "streams", "policy", "memory", "tune", "copy_outputs", "strict")
"""Arguments of ``ms.compile`` that ``torch.compile(backend="millstream", options=…)`` takes."""
_OF_COMPILE_ONLY = ("freeze", "max_graphs")


def translate(settings: Settings, *, mode: str | None, fullgraph: bool, backend: str | None) -> Settings:
    """Say what ``torch.compile``'s arguments mean here.

    ``mode`` adds its options of TorchInductor to ``options``, whose values win; CUDA graphs are the engine ``graph``'s
    own. ``fullgraph=True`` is ``strict=True``.

    Raises:
        ArgumentError: One of them has no meaning.
    """
    if mode is not None and mode not in MODES:
        raise ArgumentError(f"mode={mode!r} is unknown; choose one of {', '.join(map(repr, MODES))}.")
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError(
            f"backend={backend!r}: ms.compile is a backend itself, whose kernels are TorchInductor's. "
            f"Leave backend out, or call torch.compile(model, backend={backend!r})."
        )
    if not isinstance(fullgraph, bool):
        raise ArgumentError(f"fullgraph={fullgraph!r} is neither True nor False.")
    return replace(settings, options=with_mode(mode, settings.options), strict=settings.strict or fullgraph)


def with_mode(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Options of TorchInductor, those of a mode included, without its CUDA graphs."""
    if mode in (None, "default"):
        return options
    of_mode = dict(torch._inductor.list_mode_options(mode))
    of_mode.pop("triton.cudagraphs", None)
    return {**of_mode, **(options or {})} or None


def split_options(options: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate our own arguments from TorchInductor's options.

    Raises:
        ArgumentError: One is an argument of ``ms.compile`` that a backend cannot take.
    """
    options = options or {}
    for name in _OF_COMPILE_ONLY:
        if name in options:
            raise ArgumentError(f"{name} is no option of a backend: call ms.compile(model, {name}={options[name]!r}).")
    ours = {name: options[name] for name in OPTIONS if name in options}
    return ours, {name: value for name, value in options.items() if name not in ours}
