"""What a user asks of ``ms.compile``, ``ms.step`` or the backend: checked once, and handed down as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from millstream.errors import ArgumentError
from millstream.lower import check_options
from millstream.schedule import HAND_STREAMS, Scheduling

#: Names that ``engine=`` and ``MILLSTREAM_ENGINE`` accept.
ENGINES = ("serial", "streams", "graph", "threads")


@dataclass(frozen=True)
class Settings:
    """What all three have in common; the docstring of ``ms.compile`` tells what each means.

    Attributes:
        engine: One of ``ENGINES``; ``None`` for the quickest that the device has.
        scheduling: Streams, policy, memory, and when a plan is chosen.
        copy_outputs: Whether results are the caller's own.
        strict: Raise where otherwise a warning is given and something else takes over.
        max_graphs: So many graphs keep their memory.
        options: Of TorchInductor.
        freeze: Fold parameters in as constants.
        dynamic: Whether sizes are symbolic: those that change, all, or none.

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

    @classmethod
    def of(
        cls,
        streams: int | str = "auto",
        policy: str | None = None,
        memory: float | int = 1.25,
        tune: Literal["first", "background"] = "first",
        **others: Any,
    ) -> Settings:
        """Turn the arguments into settings; ``"auto"`` leaves the number of streams open.

        Raises:
            ArgumentError: One of them has no meaning.
        """
        if streams == "manual":
            if policy not in (None, "manual"):
                raise ArgumentError(f"streams='manual' says which streams; policy={policy!r} has nothing to decide.")
            return cls(scheduling=Scheduling(HAND_STREAMS, "manual", memory, tune), **others)
        if streams != "auto" and not isinstance(streams, int):
            raise ArgumentError(f"streams={streams!r} is no number of streams; give 1 or more, 'auto' or 'manual'.")
        number: Any = None if streams == "auto" else streams
        return cls(scheduling=Scheduling(number, policy, memory, tune), **others)
