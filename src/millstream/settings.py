"""The user's arguments to ``ms.compile``, ``ms.step`` or the backend: checked once, and handed down as they are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from millstream.errors import ArgumentError
from millstream.lower import check_options
from millstream.schedule import HAND_STREAMS, Scheduling, Tune

#: Names that ``engine=`` and ``MILLSTREAM_ENGINE`` accept.
ENGINES = ("serial", "streams", "graph", "threads")


@dataclass(frozen=True)
class Settings:
    """The settings that all three share; the docstring of ``ms.compile`` tells what each means.

    Attributes:
        engine: One of ``ENGINES``; ``None`` for the quickest that the device has.
        scheduling: Streams, policy, memory, and when a plan is chosen.
        copy_outputs: Whether results are the caller's own.
        strict: Raise where otherwise a warning is given and something else takes over.
        max_graphs: So many graphs keep their memory.
        options: Of TorchInductor.
        freeze: Fold parameters in as constants.
        dynamic: Whether sizes are symbolic: those that change, all, or none.
        devices: Names of those that kernels may be placed on, the user's first; empty for that alone.

    Raises:
        ArgumentError: One of them has no meaning; the message lists the choices.
    """

    engine: str | None = None
    scheduling: Scheduling = field(default_factory=Scheduling)
    copy_outputs: bool = True
    strict: bool = False
    max_graphs: int = 8
    options: dict[str, Any] | None = None
    freeze: bool = False
    dynamic: bool | None = None
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            raise ArgumentError(
                f"Unknown engine {self.engine!r}; choose one of {', '.join(map(repr, ENGINES))}, or None."
            )
        for name in ("copy_outputs", "strict", "freeze", "dynamic"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "dynamic" and value is None):
                raise ArgumentError(f"{name}={value!r} is neither True nor False.")
        if not isinstance(self.max_graphs, int) or isinstance(self.max_graphs, bool):
            raise ArgumentError(f"max_graphs={self.max_graphs!r} is no number of graphs; give an int, 1 or more.")
        if self.max_graphs < 1:
            raise ArgumentError(f"max_graphs={self.max_graphs} leaves no graph to run; give 1 or more.")
        if self.options is not None and not isinstance(self.options, dict):
            raise ArgumentError(f"options={self.options!r} is no dict; give one such as {{'max_autotune': True}}.")
        if self.options:
            check_options(self.options)
        if self.devices:
            self._check_devices()
            # A frozen dataclass: branches that are fused into one kernel are on one device.
            object.__setattr__(self, "options", {"joint_branches": False, **(self.options or {})})

    def _check_devices(self) -> None:
        told, names = f"devices={list(self.devices)}", [name.partition(":")[0] for name in self.devices]
        if not all(re.fullmatch(r"(cpu|cuda):\d+", name) for name in self.devices) or (
            len({*self.devices}) < len(self.devices)
        ):
            raise ArgumentError(f"{told}: give different ones, as in ['cuda:0', 'cuda:1'].")
        if len({*names}) > 1:
            raise ArgumentError(f"{told}: kernels are compiled for one kind of device; give CUDA devices or CPUs.")
        if names[0] == "cuda" and self.engine in ("serial", "threads"):
            raise ArgumentError(f"engine={self.engine!r} knows one CUDA device; leave out devices= or engine=.")
        if names[0] == "cpu" and self.engine in ("streams", "graph"):
            raise ArgumentError(f"engine={self.engine!r} is for CUDA devices, and devices= names CPUs; leave it out.")
        if self.scheduling.policy is not None:
            raise ArgumentError(f"policy={self.scheduling.policy!r} is for one device; leave it out with devices=.")

    @classmethod
    def of(
        cls,
        streams: int | str = "auto",
        policy: str | None = None,
        memory: float | int = 1.25,
        tune: Tune = "auto",
        **others: Any,
    ) -> Settings:
        """Turn the arguments into settings; ``"auto"`` leaves the number of streams open.

        ``MILLSTREAM_TUNE`` overrules ``tune``.

        Raises:
            ArgumentError: One of them has no meaning.
        """
        tune = os.environ.get("MILLSTREAM_TUNE") or tune  # type: ignore[assignment]
        others["devices"] = tuple(map(str, others.get("devices") or ()))
        if len(others["devices"]) == 1:
            others["devices"] = ()  # the user's
        if streams == "manual":
            if policy not in (None, "manual"):
                raise ArgumentError(f"streams='manual' says which streams; policy={policy!r} has nothing to decide.")
            return cls(scheduling=Scheduling(HAND_STREAMS, "manual", memory, tune), **others)
        if streams != "auto" and not isinstance(streams, int):
            raise ArgumentError(f"streams={streams!r} is no number of streams; give 1 or more, 'auto' or 'manual'.")
        number: Any = None if streams == "auto" else streams
        return cls(scheduling=Scheduling(number, policy, memory, tune), **others)
