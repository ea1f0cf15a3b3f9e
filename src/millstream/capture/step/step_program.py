"""What runs a captured step: a program of kernels, called with the flat list of its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from millstream.capture.model import Runnable
from millstream.capture.step.graph import STATE_NAMES
from millstream.errors import ArgumentError, CaptureError, EmptyCaptureError, MillstreamError
from millstream.lower import Cutting, Lowered, LoweredForSizes, Segments, compile_graph, describe_failure
from millstream.lower.kept import ProgramFile
from millstream.passes import join_norms, split_gradients

Runner = Callable[[list[Any]], list[Any]]


def most_cuts() -> int:
    """After how many segments gradients may be sent off: 1, all of them at the end, or ``MILLSTREAM_CUTS``.

    Raises:
        ArgumentError: That is no number of segments.
    """
    asked = os.environ.get("MILLSTREAM_CUTS") or "1"
    if not asked.isdecimal() or int(asked) < 1:
        raise ArgumentError(f"MILLSTREAM_CUTS={asked!r} is no number of segments; give 1 or more.")
    return int(asked)


class Joined(Runnable, Protocol):
    """What runs the segments of a step between which processes exchange something."""

    @property
    def executables(self) -> list[Any]: ...

    def tell_hyperparameters(self, told: list[str]) -> None: ...


@dataclass(frozen=True)
class Compiling:
    """How a step is compiled.

    Attributes:
        options: Of TorchInductor, the user's.
        tries_now: Whether a program on disk is of use only with what came of its alternatives.
        begin_elsewhere: Called with the record of a step that is not on disk; raises ``NotYet`` where it has begun.
    """

    options: dict[str, Any] | None = None
    tries_now: bool = False
    begin_elsewhere: Callable[[ProgramFile], None] | None = None


class StepProgram:
    """A captured step, lowered: runs it on the flat list of state and inputs, and returns the flat results.

    PyTorch's own run-time wrapper around a compiled graph costs tens of microseconds with hundreds of inputs. It is
    there for cases that a step has not (outputs that alias inputs, subclasses); the first call goes through it and
    looks whether it passed everything on as it was, and if so later calls go straight to the executable.

    Attributes:
        direct: That executable; ``None`` as long as nobody knows whether it can be called so.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        inputs: Sequence[Any],
        static: frozenset[int],
        *,
        name: str,
        build: Callable[..., Runnable],
        join: Callable[[Segments, Sequence[Any], int], Joined],
        how: Compiling,
    ) -> None:
        self._seen: tuple[list[Any], list[Any]] | None = None
        self._runner: Runnable | None = None
        self._joined: Joined | None = None  # the same, where it is in segments
        self._hyperparameters: list[str] = []
        self.direct: Runner | None = None
        self._keep: Callable[[list[Any]], None] | None = None

        def finish(lowered: Lowered | LoweredForSizes) -> Runner:
            self._runner = build(lowered)
            self._keep = getattr(lowered, "keep_step", None)
            return self._watch

        def finish_segments(segments: Segments, programs: Sequence[Lowered | LoweredForSizes | None]) -> Runner:
            executables = [None if lowered is None else build(lowered) for lowered in programs]
            self._runner = self._joined = join(segments, executables, len(inputs) - len(static))
            self.tell_hyperparameters(self._hyperparameters)
            return self._watch

        if all(node.op in ("placeholder", "output") for node in gm.graph.nodes):
            raise EmptyCaptureError("The step computes nothing with tensors.", remedy="Run it without ms.step.")
        names = gm.meta.get(STATE_NAMES, ())
        gm = join_norms(split_gradients(gm))
        self._run = compile_graph(
            gm,
            inputs,
            finish,
            _refuse,
            name=name,
            options=how.options,
            step_state=static,
            cutting=Cutting(finish_segments, most_cuts(), names),
            tries_now=how.tries_now,
            begin_elsewhere=how.begin_elsewhere,
        )

    @property
    def runner(self) -> Runnable | None:
        """What runs it as a whole; ``None`` before the first call."""
        return self._runner

    @property
    def executables(self) -> list[Runnable]:
        """What runs it: one, or one a segment where gradients are reduced between processes."""
        if self._joined is not None:
            return self._joined.executables
        return [] if self._runner is None else [self._runner]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.direct is not None:
            return self.direct(inputs)
        outputs = list(self._run(*inputs))
        if self._seen is not None:
            passed, returned = self._seen
            added = len(passed) - len(inputs)  # tensors that the step has made while it was traced
            if added >= 0 and _same_objects(passed[added:], inputs) and _same_objects(returned, outputs):
                if not added:
                    self.direct = self._runner
                if self._keep is not None:
                    self._keep(passed[:added])
            self._seen = self._keep = None
        return outputs

    def tell_hyperparameters(self, told: list[str]) -> None:
        """Numbers of optimizers, by name, as the calls from now on have them."""
        self._hyperparameters = told
        if self._joined is not None:
            self._joined.tell_hyperparameters(told)

    def release(self) -> None:
        """Give back the memory held between calls."""
        if self._runner is not None:
            self._runner.release()

    def _watch(self, inputs: list[Any]) -> list[Any]:
        assert self._runner is not None
        passed = list(inputs)
        outputs = self._runner(inputs)
        self._seen = (passed, outputs)
        return outputs


def _refuse(error: Exception, _: str) -> None:
    """A step that cannot be lowered is run eagerly by its caller, which is told why."""
    if isinstance(error, MillstreamError):
        raise error
    failure = describe_failure(error)
    raise CaptureError(
        f"The captured step could not be compiled ({failure.reason}).", where=failure.where, remedy=failure.remedy
    ) from error


def _same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
