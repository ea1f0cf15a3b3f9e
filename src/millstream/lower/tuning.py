"""Which configuration of a Triton kernel was found fastest: found once on a machine, and taken from then on.

Another configuration may sum in another order, so that two runs from one seed would differ in their last bits. Upstream
remembers its choices too, but not where a worker process has loaded the same source before, nor for kernels that lack
one of the usual block sizes: then it measures again.

Private APIs, tried on torch 2.11 and 2.13. Where they have changed, upstream chooses as it does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from millstream.cache import cache_folder, write

Choice = dict[str, Any]  # of a configuration: block sizes, warps, stages

_known: dict[Path, Choice] = {}  # for where nothing can be written


def keep_choice(tuner: Any, source: str) -> None:
    """Let a tuner take the configuration that was found fastest before, or else remember the one that it will find.

    Args:
        tuner: A ``CachingAutotuner`` whose configurations are compiled and which has not run yet.
        source: Of its kernel.
    """
    with contextlib.suppress(AttributeError, TypeError):  # not as upstream's used to be
        launchers = list(tuner.launchers)  # another thread may run it meanwhile
        choices = [_describe(launcher.config) for launcher in launchers]
        if len(choices) < 2 or tuner.device_props.type != "cuda":
            return
        path = _path(source, torch.cuda.get_device_name(tuner.device_props.index))
        if (known := _read(path)) in choices:
            tuner.launchers = [launchers[choices.index(known)]]
            return
        save = tuner.save_cache_hook

        def remember(config: Any, *args: Any, **kwargs: Any) -> None:
            if save:
                save(config, *args, **kwargs)
            choice = _describe(config)
            # Not what coordinate descent went on to; and what another process has noted meanwhile stays.
            if choice in choices and _read(path) not in choices:
                _known[path] = choice
                write(path, json.dumps(choice))

        tuner.save_cache_hook = remember


def _describe(config: Any) -> Choice:
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _path(source: str, device: str) -> Path:
    # Not the configurations: upstream adds some that it derives, in one process more than in another.
    facts = json.dumps([source, device, versions()], sort_keys=True)
    return cache_folder() / "tuning" / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


def versions() -> dict[str, str]:
    """Everything that the time of a kernel depends on beside the device, and so what is chosen by it."""
    libraries = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    with contextlib.suppress(ImportError):
        import triton  # pyrefly: ignore[missing-import]

        libraries["triton"] = triton.__version__
    return libraries


def _read(path: Path) -> Choice | None:
    if path in _known:
        return _known[path]
    with contextlib.suppress(OSError, ValueError):
        choice = json.loads(path.read_text())
        return choice if isinstance(choice, dict) else None
    return None
