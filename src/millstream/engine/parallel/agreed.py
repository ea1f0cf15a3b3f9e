"""A step that exchanges something between processes: as one graph when all of them agree, otherwise in segments.

**Life.** Every process begins with segments, each for itself. Once its segments are captured it offers its program in
every call. When all offer the same one, they try it as one graph, in the midst of that call, and keep it if that is
quicker. From then on each asks, before a call, for a replay of that capture; when one does not, because it runs plain
Python or has a batch of another size, all run that call in segments, or as they can.

**Memory.** The graph has all of it in its arena, collectives' included. What segments held is given back then; where
they run a call at times, as at the end of an epoch, it is kernel by kernel, in memory that stays with nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from millstream._torch.modes.switches import present
from millstream.data_parallel.agreement import MARK_SHIFT, Agreement, collectives_wanted
from millstream.data_parallel.board import NotTogetherError
from millstream.data_parallel.communicators import communicators_of
from millstream.data_parallel.hyperparameters import NOT_KNOWN, Hyperparameters
from millstream.device import context
from millstream.engine.assembly import with_environment
from millstream.engine.by_size import BySize
from millstream.engine.engine import Engine
from millstream.engine.parallel.communicator_trial import choose_communicator
from millstream.engine.parallel.described import Described, describe
from millstream.engine.parallel.lockstep import time_steps, together
from millstream.engine.parallel.segmented import SegmentedEngine
from millstream.engine.parallel.whole import (
    WholeGraph,
    WholeOnHost,
    capture_together,
    costs_of,
    digest_of,
    merge_lowered,
)
from millstream.engine.traced_run import trace_host, trace_replays
from millstream.engine.unchanged import unchanged
from millstream.errors import LoweringError
from millstream.graph import Timeline
from millstream.lower import Lowered
from millstream.lower.segmented.segments import Segments
from millstream.schedule import Scheduling
from millstream.settings import Settings
from millstream.simulate import with_collectives

OFFER, REPLAY = 1 << 40, 2 << 40
"""Answers: with the digest of what is exchanged and given, or with the number of a capture."""

WHAT_BITS = MARK_SHIFT
"""Of an answer: that digest or number."""

PATIENCE_S = 10.0
"""So long a process that is to measure waits for the others."""

CALLS_BEFORE = 2
"""So many calls at least run in segments; they warm up what a capture needs."""

MEMORY = 1.1
"""Budget of the graph, as ``Scheduling.memory``, where the user has not named another: streams that compute beside
collectives need little more, and each process has memory of DDP's and of NCCL's besides."""

SHARDED_MEMORY = 1.05
"""The same where parameters are divided, so that memory is what counts; parameters that travel ahead need as much."""

RARE = 8
"""So many more calls in segments than as one graph make it worth while to capture segments beside the graph."""


class AgreedEngine:
    """Runs a step in the way that all processes can take.

    Args:
        segments: Of its graph, cut at the collectives.
        executables: One a segment; ``None`` where it has nothing to compute.
        num_given: Of the inputs, the last ones: those that each call brings.
        settings: What the user asks for.

    Attributes:
        notes: Why it does not become one graph; empty while it may.
    """

    def __init__(
        self,
        segments: Segments,
        executables: Sequence[Any],
        num_given: int,
        *,
        settings: Settings,
    ) -> None:
        self.segmented = SegmentedEngine(segments, executables)
        self.notes: list[str] = []
        self.whole: WholeGraph | WholeOnHost | None = None
        self._executables, self._num_given, self._switches = list(executables), num_given, present()
        self._scheduling, self._copies = with_environment(settings.scheduling), settings.copy_outputs
        if settings.scheduling.memory == Scheduling.memory:
            is_sharded = any(each.is_paced for each in self.segmented.exchanges)
            self._scheduling = replace(self._scheduling, memory=SHARDED_MEMORY if is_sharded else MEMORY)
        self._agreement = self._find_agreement()
        self._lowered: Lowered | None = None
        self._offer = self._number = self._calls = 0
        self._apart = 0  # how many more calls ran in segments than as one graph, since there is one; 0 at least
        if self._agreement is not None:
            for executable in executables:
                if isinstance(executable, Engine):
                    executable.gives_memory_back = True
        self.tell_hyperparameters([])

    def tell_hyperparameters(self, told: list[str]) -> None:
        """Numbers of optimizers, by name, that all processes are to have alike from the next call on."""
        self._hyperparameters = Hyperparameters(told, self.segmented.segments.updates)

    @property
    def executables(self) -> list[Engine | BySize]:
        """What runs it at present."""
        if self.whole is not None:
            return [self.whole]
        return [executable for executable in self._executables if executable is not None]

    def describe(self) -> Described:
        """Return what it exchanges, and how it runs at present.

        Raises:
            LoweringError: Its segments make no single program.
        """
        if not all(isinstance(each, Engine) for each in self._executables if each is not None):
            raise LoweringError("Its sizes are left open.")
        if self._lowered is None:
            self._lowered = merge_lowered(self.segmented.segments, self._executables, self.segmented.exchanges)
        return describe(self.segmented, self._lowered, self.whole)

    def measure(self) -> tuple[Timeline | None, str]:
        """A run of it as one graph, measured; all processes are to ask for it at about the same time.

        Returns:
            The run, on a GPU that of median length of some replays; ``None`` and the reason where it is not measured.

        Raises:
            DataParallelError: A process is gone.
        """
        agreement, whole, what = self._agreement, self.whole, "measure a step"
        if agreement is None or whole is None:
            return None, "its collectives are issued between segments"
        board = agreement.board
        if not board.meet(PATIENCE_S, what):
            return (
                None,
                f"its processes did not all ask for it within {PATIENCE_S:.0f} s: call ms.explain in all of them",
            )
        if len(set(board.gather(self._number, what))) > 1:
            return None, "its processes ask for different graphs first"
        if isinstance(whole, WholeOnHost):
            return trace_host(whole.lowered.program), ""
        with whole.replays_unchanged() as replay:

            def replay_together() -> None:
                board.gather(0, what)
                replay()

            timeline = trace_replays(whole.plan, replay_together)
        return with_collectives(whole.plan.graph, timeline), ""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        asked = self.segmented.exchanges[0].agreement
        if asked is None:
            return self.segmented(inputs)
        asked.hyperparameters = self._hyperparameters
        try:
            return self._run(inputs)
        finally:
            asked.hyperparameters = NOT_KNOWN  # of what runs without this engine

    def _run(self, inputs: list[Any]) -> list[Any]:
        agreement = self._agreement
        if agreement is None or (self.whole is None and not self._may_offer(inputs)):
            return self.segmented(inputs)
        answer = self._offer if self.whole is None else REPLAY | self._number
        answers = agreement.ask(answer, "begin a step")
        if all(other == answer for other in answers):
            if self.whole is None:
                self._try_together(agreement, inputs)
            if self.whole is not None:
                return self._run_whole(self.whole, inputs)
        elif self.whole is not None and self._offer in answers:  # another process has lost it
            self._drop()
        return self._run_apart(inputs)

    def _run_whole(self, whole: WholeGraph | WholeOnHost, inputs: list[Any]) -> list[Any]:
        if self._apart:
            self._apart -= 1
            if not self._apart:
                self.segmented.release()
        return whole(inputs)

    def _run_apart(self, inputs: list[Any]) -> list[Any]:
        """Run a call in segments, beside the graph if there is one."""
        if self.whole is not None:
            self._apart += 1
        return self.segmented(inputs, captured=self.whole is None or self._apart > RARE)

    def release(self) -> None:
        """Give back the memory that is held between calls; in the end all processes capture again."""
        self._drop()
        self.segmented.release()

    def _note(self, reason: str) -> None:
        self.notes.append(reason)
        next(executable for executable in self._executables if executable is not None).notes.append(reason)

    def _drop(self) -> None:
        if self.whole is not None:
            self.whole.release()
        self.whole, self._apart = None, 0

    def _find_agreement(self) -> Agreement | None:
        """Return what processes ask each other by, if all collectives of the step are asked about."""
        found = {exchange.agreement for exchange in self.segmented.exchanges}
        known = [executable for executable in self._executables if executable is not None]
        if len(found) != 1 or not known or not all(isinstance(each, Engine) for each in known):
            return None
        agreement = found.pop()
        return agreement if isinstance(agreement, Agreement) else None

    def _may_offer(self, inputs: Sequence[Any]) -> bool:
        """Return whether this process is ready to run the step as one graph."""
        self._calls += 1
        if self.notes or self._calls <= CALLS_BEFORE:
            return False
        memory = self.segmented.exchanges[0].memory
        if memory.is_cuda:
            if not all(_is_ready(executable) for executable in self._executables if executable is not None):
                return False
            if context(str(memory.device)).is_capturing():
                return False
        elif collectives_wanted() != "captured":
            return False
        if not self._offer:
            try:
                self._lowered = merge_lowered(self.segmented.segments, self._executables, self.segmented.exchanges)
            except LoweringError as error:
                self._note(f"not one graph: {error}")
                return False
            given = inputs[len(inputs) - self._num_given :]
            self._offer = OFFER | digest_of(self.segmented.exchanges, given) % (1 << WHAT_BITS)
        return True

    def _try_together(self, agreement: Agreement, inputs: Sequence[Any]) -> None:
        assert self._lowered is not None
        agreement.num_captures = (agreement.num_captures + 1) % (1 << WHAT_BITS)
        self._number = agreement.num_captures
        if not self.segmented.exchanges[0].memory.is_cuda:
            settled = choose_communicator(agreement, self.segmented.exchanges, None)
            self.whole = WholeOnHost(self._lowered)
            self.whole.notes.append(_joined("collectives are among its kernels", settled.told))
            self.segmented.release()
            return
        costs = costs_of(self._lowered, self.segmented.segments, self._executables)
        copied = self._lowered.visible if self._copies else frozenset[int]()
        try:
            whole = capture_together(agreement, self._lowered, costs, inputs, self._scheduling, copied, self._switches)
            with agreement.silent(), contextlib.ExitStack() as stack:
                rewind = together(agreement, lambda: stack.enter_context(self._unchanged(inputs)))

                def run(engine: Callable[[list[Any]], Any]) -> None:
                    rewind()
                    engine([*inputs])

                own_ns, segmented_ns = time_steps(agreement, lambda: run(whole), lambda: run(self.segmented))
        except NotTogetherError as error:
            self._stay_apart(str(error))
            return
        except BaseException:  # others shall not wait
            agreement.board.fail()
            raise
        told = f"one graph takes {own_ns / 1e6:.3f} ms, segments with collectives in between {segmented_ns / 1e6:.3f}"
        told = _joined(told, whole.settled.told)
        if own_ns > segmented_ns:
            self._stay_apart(told)
            return
        self.whole = whole
        whole.notes.append(told)
        self.segmented.release()
        torch.cuda.empty_cache()

    def _stay_apart(self, reason: str) -> None:
        """Go on in segments, in all processes."""
        communicators_of(self.segmented.exchanges[0].group).current = None
        self._note(f"not one graph: {reason}")

    @contextlib.contextmanager
    def _unchanged(self, inputs: Sequence[Any]) -> Iterator[Callable[[], None]]:
        assert self._lowered is not None
        program = self._lowered.program
        written = [tensor for name, tensor in zip(program.inputs, inputs, strict=False) if name in program.mutated]
        index = context(next(iter(program.devices))).place.index
        with unchanged(program, written, torch.cuda.default_generators[index]) as rewind:
            yield rewind


def _joined(*told: str) -> str:
    return "; ".join(filter(None, told))


def _is_ready(executable: Engine) -> bool:
    """Return whether a segment has been captured, if there is anything to capture."""
    return executable.lowered.program.does_nothing or executable.is_captured
