"""The user's arguments to ``ms.compile``, ``ms.step`` or the backend: checked once, and handed down as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from millstream.errors import ArgumentError
from millstream.lower import check_options
from millstream.schedule import HAND_STREAMS, Scheduling, Tune

#: Names that ``engine=`` and ``MILLSTREAM_ENGINE`` accept.
ENGINES = ("serial", "streams", "graph", "threads")
_AS_IN = "as in ['cuda:0', 'cuda:1']"


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
        micro_batches: So many pieces a step's batch is divided into.
        devices: Names of those that kernels may be placed on, the user's first; empty for that, whichever it is.

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
    micro_batches: int = 1

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
        self._check_micro_batches()
        if self.devices:
            self._check_devices()
        if self.has_several_devices:
            # A frozen dataclass: branches that are fused into one kernel are on one device.
            object.__setattr__(self, "options", {"joint_branches": False, **(self.options or {})})

    def _check_micro_batches(self) -> None:
        if not isinstance(self.micro_batches, int) or isinstance(self.micro_batches, bool) or self.micro_batches < 1:
            raise ArgumentError(f"micro_batches={self.micro_batches!r} is no number of pieces; give an int, 1 or more.")
        if self.micro_batches > 1:
            if self.dynamic:
                raise ArgumentError("micro_batches= divides batches of known sizes; leave out dynamic=True.")
            object.__setattr__(self, "dynamic", False)  # each size is a graph
            object.__setattr__(self, "options", {**(self.options or {}), "micro_batches": self.micro_batches})

    @property
    def has_several_devices(self) -> bool:
        """Whether there is something to place."""
        return len(self.devices) > 1

    def _check_devices(self) -> None:
        told = f"devices={list(self.devices)}"
        if twice := next((name for name in self.devices if self.devices.count(name) > 1), None):
            raise ArgumentError(f"{told} has {twice} twice; give each device once.")
        kinds = {name.partition(":")[0] for name in self.devices}
        if len(kinds) > 1:
            raise ArgumentError(f"{told}: kernels are compiled for one kind of device; give CUDA devices or CPUs.")
        if kinds == {"cpu"} and self.engine in ("streams", "graph"):
            raise ArgumentError(f"engine={self.engine!r} is for CUDA devices, and {told} names CPUs; leave out either.")
        if not self.has_several_devices:
            return
        if kinds == {"cuda"} and self.engine in ("serial", "threads"):
            raise ArgumentError(f"engine={self.engine!r} knows one CUDA device; leave out devices= or engine=.")
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
        others["devices"] = _names_of(others.get("devices"))
        if streams == "manual":
            if policy not in (None, "manual"):
                raise ArgumentError(f"streams='manual' says which streams; policy={policy!r} has nothing to decide.")
            return cls(scheduling=Scheduling(HAND_STREAMS, "manual", memory, tune), **others)
        if streams != "auto" and not isinstance(streams, int):
            raise ArgumentError(f"streams={streams!r} is no number of streams; give 1 or more, 'auto' or 'manual'.")
        number: Any = None if streams == "auto" else streams
        return cls(scheduling=Scheduling(number, policy, memory, tune), **others)


def _names_of(devices: Any) -> tuple[str, ...]:
    """The names of devices, however they are given.

    Raises:
        ArgumentError: They have no order, or one of them is no device that could have kernels.
    """
    if devices is None:
        return ()
    told = f"devices={devices!r}"
    if isinstance(devices, (set, frozenset)):
        raise ArgumentError(f"{told} has no order, and the first is where your tensors are; give a list, {_AS_IN}.")
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ArgumentError(f"{told} is no list of devices; give one, {_AS_IN}.")
    entries = list(devices)
    return tuple(_name_of(entry, entries) for entry in entries)


def _name_of(device: Any, among: list[Any]) -> str:
    """The name of one of ``among``; a number is that of a CUDA device, as PyTorch has it."""
    name = f"cuda:{device}" if isinstance(device, int) and not isinstance(device, bool) else str(device)
    if name in ("cpu", "cuda"):
        raise ArgumentError(f"devices={among}: {name!r} is several; say which, {_AS_IN}.")
    found = re.fullmatch(r"(cpu|cuda):(\d+)", name)
    if found is None:
        raise ArgumentError(f"devices={among}: {device!r} is no device to put kernels on; name them {_AS_IN}.")
    return f"{found[1]}:{int(found[2])}"
