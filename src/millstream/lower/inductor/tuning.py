"""Configurations of Triton kernels that were found fastest: found once on a machine, and taken from then on.

Another configuration may sum in another order, so that two runs from one seed would differ in their last bits. Upstream
remembers its choices too, but not where a worker process has loaded the same source before, nor for kernels that lack
one of the usual block sizes: then it measures again.

Private APIs, tried on torch 2.11 and 2.13. Where they have changed, upstream chooses as it does.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from math import inf
from pathlib import Path
from typing import Any

import torch

from millstream.cache import cache_folder, file_lock, write

PATIENCE_S = 20.0
"""Longer than it takes to measure a kernel, its compilation included."""

Choice = dict[str, Any]  # of a configuration: block sizes, warps, stages

_known: dict[Path, Choice] = {}  # for where nothing can be written


def keep_choice(tuner: Any, source: str) -> None:
    """Let a tuner take the configuration that was found fastest before, or else remember the one that it will find.

    Args:
        tuner: A ``CachingAutotuner`` whose configurations are compiled and which has not run yet.
        source: Of its kernel.
    """
    with contextlib.suppress(AttributeError, TypeError):  # not as upstream's used to be
        measure = tuner.benchmark_all_configs
        if tuner.device_props.type != "cuda" or hasattr(measure, "keeps_choice"):
            return  # of two programs with one kernel, upstream gives both the same tuner
        launchers = _launchers(tuner)
        path = _path(source, torch.cuda.get_device_name(tuner.device_props.index))
        if (known := _find(tuner, path)) is not None:
            tuner.launchers = [known]
            return
        if len(launchers) < 2:
            _settle(tuner, launchers, path)
            return

        def measure_alone(*args: Any, **kwargs: Any) -> dict[Any, float]:
            with file_lock(path, PATIENCE_S):  # else each would take what it found itself
                if (known := _find(tuner, path)) is not None:  # another process has found it meanwhile
                    return {known: 0.0}
                timings: dict[Any, float] = measure(*args, **kwargs)
                fastest = min(timings, key=lambda launcher: timings[launcher])
                if timings[fastest] < inf:  # it could be launched
                    _remember(path, fastest.config)
                return timings

        measure_alone.keeps_choice = source  # type: ignore[attr-defined]
        tuner.benchmark_all_configs = measure_alone


def _settle(tuner: Any, launchers: list[Any], path: Path) -> None:
    """Where upstream leaves no choice, as it remembers one: keep to what was found here before, or else to that one.

    What upstream remembers may have been found by another process, at the same time or without Millstream.
    """
    info = getattr(tuner, "autotune_cache_info", None) or {}
    if not launchers or info.get("autotune_cache_state") != "hit":
        return
    known = _read(path)
    if known is None:
        _remember(path, launchers[0].config)
    elif (launcher := _compile(tuner, launchers[0].config, known)) is not None:
        tuner.launchers = [launcher]


def _compile(tuner: Any, config: Any, choice: Choice) -> Any:
    """Return what launches another configuration than ``config``; ``None`` where it cannot be had."""
    with contextlib.suppress(Exception), torch.cuda.device(tuner.device_props.index):
        wanted = copy.deepcopy(config)
        blocks = {name: value for name, value in choice.items() if name not in ("num_warps", "num_stages")}
        if blocks.keys() != wanted.kwargs.keys():
            return None
        wanted.kwargs, wanted.num_warps, wanted.num_stages = blocks, choice["num_warps"], choice["num_stages"]
        if tuner.fn.fn is None:  # it came out of a cache without its source
            tuner.fn = tuner._reload_kernel().fn
        return tuner._precompile_config(wanted).make_launcher()
    return None


def tuner_elsewhere(tuner: Any, index: int) -> Any:
    """Return a tuner that launches the same kernel, in the configuration that it has, on another GPU of the same kind.

    What is loaded on one device can't be launched on another; compiled it has been, so that this takes milliseconds.

    Args:
        tuner: A ``CachingAutotuner``. One that has not chosen its configuration yet is left as it is, and chooses, as
            does the result: what the first one has found is kept.
        index: Of the other device.

    Raises:
        RuntimeError: Its configurations cannot be had there.
    """
    launchers = _launchers(tuner)
    name = getattr(tuner.fn, "__name__", "a kernel")
    other = object.__new__(type(tuner))  # a copy would be pickled, which tuners refuse once they have run
    other.__dict__.update(vars(tuner))
    other.device_props = tuner.device_props._replace(index=index)
    other.triton_meta = {**tuner.triton_meta, "device": index}
    other.compile_results, other.launchers = [], []
    if hasattr(tuner, "_cached_launcher"):  # since 2.13
        other._cached_launcher = None
    found = [_compile(other, each.config, _describe(each.config)) for each in launchers]
    if not found or None in found:
        raise RuntimeError(f"{name} could not be loaded on cuda:{index}")
    other.launchers = found
    if len(found) > 1 and (measure := vars(other).pop("benchmark_all_configs", None)) is not None:
        keep_choice(other, measure.keeps_choice)
    return other


def _remember(path: Path, config: Any) -> None:
    _known[path] = _describe(config)
    write(path, json.dumps(_known[path]))


def _launchers(tuner: Any) -> list[Any]:
    return list(tuner.launchers)  # another thread may run it meanwhile


def _find(tuner: Any, path: Path) -> Any:
    """Return what launches the configuration that was found fastest, if there is such."""
    known = _read(path)
    return next((each for each in _launchers(tuner) if _describe(each.config) == known), None)


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
