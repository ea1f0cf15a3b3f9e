"""A program that tries alternatives to its kernels between calls, and goes on as the fastest of its variants.

**Contract**
- The first calls are as ever: nothing is tried before the usual program has its plan.
- What is tried runs on the caller's inputs, before their own call; afterwards memory and generators are what they were.
- Trials take at most a share of the time since the program was first called; what is tried next is taken to last as
  long as lowering took. With ``tune="now"`` they all take place in the first call in which they can.
- A variant that fails, takes more memory, or gives what does not lie as the usual program's, is none.
- Calls of other threads wait while something is tried.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from millstream._torch.dispatcher import num_modes
from millstream.engine.engine import Engine
from millstream.engine.planning.background import SHARE, Background
from millstream.engine.unchanged import unchanged
from millstream.graph import PLANNED_ROLES
from millstream.locks import ForkSafeLock
from millstream.lower import Lowered
from millstream.program import Program, Value
from millstream.schedule.improve import NOTHING, Choice, improve_stepwise
from millstream.schedule.scheduling import GRANULE_BYTES

SHARES = {"background": SHARE, "auto": 0.05, "first": 0.05, "now": 1e9}
"""Of the time, by ``tune=``, that trials may take."""
BETWEEN = 16  # calls from one look at the clock to the next; a power of two
MOST_CALLS = 6  # until a variant has measured its kernels, has a plan, and is captured
PAIRS = 15  # of runs that are compared
LEAST_NS = 1_000_000  # a sample takes: shorter programs run several times
LEAST_S, KERNEL_S = 3.0, 0.05  # that long lowering a program takes, at least, and for each kernel
MEMORY = 1.03  # a variant may hold so many times what the usual program does
ERROR = 0.05  # of the length of all results: rounding is never so much, but a fault is

Build = Callable[[Lowered], Engine]


class Improving(ForkSafeLock):
    """Runs a program, and tries alternatives.

    Args:
        lowered: The usual program.
        build: Makes the engine of a program.
        build_variant: Makes that of a variant that is tried, with the first one's engine.
        tune: When something is tried.

    Attributes:
        current: What runs.
    """

    def __init__(
        self, lowered: Lowered, build: Build, build_variant: Callable[[Lowered, Engine], Engine], tune: str
    ) -> None:
        super().__init__()
        assert lowered.variants is not None, "else there is nothing to try"
        self._variants = lowered.variants
        self.current = build(replace(lowered, variants=None))  # which holds the graph, until all is tried
        self._build, self._build_variant = build, build_variant
        self._inputs: list[Any] = []
        self._running: deque[None] = deque()
        self._is_trying = False
        self._work: Background[Any] | None = Background(
            self._improve(), share=SHARES[tune], longest=0.0 if tune == "now" else _expected_s(lowered)
        )
        self._at_once = tune == "now"
        self._calls, self._mask = 0, 0 if self._at_once else BETWEEN - 1

    def __call__(self, inputs: list[Any]) -> list[Any]:
        return self.current(inputs) if self._work is None else self._call(inputs, self._work)

    def release(self) -> None:
        """Give back the memory held between calls."""
        self.current.release()

    def _call(self, inputs: list[Any], work: Background[Any]) -> list[Any]:
        self._calls += 1
        if self._calls & self._mask or not work.is_due:
            self._running.append(None)  # no lock: of one program, threads may run several calls at once
            try:
                if not self._is_trying:
                    return self.current(inputs)
            finally:
                self._running.pop()
        with self.lock:
            self._is_trying = True  # from now on other calls wait for the lock; those that run already are counted
            try:
                if work.is_due and not self._running and self.current.is_settled and not _is_within_capture():
                    self._advance(inputs, work)
            finally:
                self._is_trying = False
            return self.current(inputs)

    def _advance(self, inputs: list[Any], work: Background[Any]) -> None:
        if num_modes() or (_is_cuda(self.current) and not self.current.is_captured):
            return  # under a mode, as in the first call of all, each operator takes longer
        self._inputs = list(inputs)
        try:
            work.advance()
            while self._at_once and not work.is_over:
                work.advance()
        except Exception as error:  # noqa: BLE001  whatever lowering raises: the usual program goes on
            self.current.notes.append(f"alternatives were tried no further: {str(error).partition(chr(10))[0]}")
        finally:
            self._inputs = []
            if work.is_over:
                self._work = None
                del self._variants

    def _improve(self) -> Any:
        """Try everything, and take what is best."""
        usual, variants = self.current, self._variants
        yield
        trial = _Trial(usual, variants.lower, lambda lowered: self._build_variant(lowered, usual), self)
        steps = improve_stepwise(variants.find(self._at_once), trial)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                choice, tried = done.value
                break
            finally:
                trial.give_back()
            yield
        chosen = trial.lowered[choice] if choice else usual.lowered
        variants.keep(choice, tried, chosen)
        if choice:
            trial.release()
            usual.release()
            self.current = self._build(chosen)
        self.current.tried = tried


def _expected_s(lowered: Lowered) -> float:
    """Return what lowering a program again takes, where it was found on disk, too."""
    return max(lowered.seconds, LEAST_S, KERNEL_S * len(lowered.program.graph.kernels))


class _Trial:
    """Runs variants of a program in turn with the best so far.

    Attributes:
        lowered: The variants that there are, by their choice.
    """

    def __init__(self, usual: Engine, lower: Callable[[Choice], Lowered], build: Build, owner: Any) -> None:
        self.lowered: dict[Choice, Lowered] = {NOTHING: usual.lowered}
        self._usual, self._lower, self._build, self._owner = usual, lower, build, owner
        self._engines: dict[Choice, Engine] = {NOTHING: usual}
        self._latest: set[Choice] = {NOTHING}  # what was compared last: either is the best from now on

    def compare(self, choice: Choice, best: Choice) -> Sequence[tuple[int, int]] | str:
        self._latest = {NOTHING, choice, best}
        try:
            own = self._engine(choice)
            if why := _why_not(own, self._usual):
                return why
            return self._compare(own, self._engine(best))
        except Exception as error:  # noqa: BLE001  whatever lowering or a kernel raises: the usual program goes on
            return f"failed: {str(error).partition(chr(10))[0]}"

    def give_back(self) -> None:
        """Give back the memory of what was timed: between calls it is the user's."""
        for choice, engine in list(self._engines.items()):
            if choice != NOTHING:
                engine.release()
            if choice not in self._latest:
                del self._engines[choice]

    def release(self) -> None:
        """Give back the memory of all variants."""
        for engine in self._engines.values():
            engine.release()
        self._engines = {}

    def _engine(self, choice: Choice) -> Engine:
        if choice not in self.lowered:
            self.lowered[choice] = self._lower(choice)
        if choice not in self._engines:
            self._engines[choice] = self._build(self.lowered[choice])
        return self._engines[choice]

    def _compare(self, own: Engine, best: Engine) -> Sequence[tuple[int, int]] | str:
        program, inputs = self._usual.lowered.program, self._owner._inputs
        written = [value for name, value in zip(program.inputs, inputs, strict=True) if name in program.mutated]
        results = []
        for engine in (best, own):
            with unchanged(program, written, _generator(program)) as rewind:
                for _ in range(MOST_CALLS):
                    rewind()
                    outputs = engine(list(inputs))
                    if engine.is_settled and (engine.is_captured or not _is_cuda(engine)):
                        break
            with unchanged(program, written, _generator(program)):
                outputs = engine(list(inputs))
                results.append([_copy(value) for value in (*outputs, *written)])
        if not _agree(*results):
            return "gives other results"
        with unchanged(program, written, _generator(program)) as rewind:
            runs = [_timed(engine, inputs, rewind) for engine in (own, best)]
            number = max(1, LEAST_NS // max(min(run(1) for run in runs), 1))
            return [(runs[0](number), runs[1](number)) for _ in range(PAIRS)]


def _timed(engine: Engine, inputs: list[Any], rewind: Callable[[], None]) -> Callable[[int], int]:
    """Return what runs an engine so many times and returns the ns of one."""

    def replay(number: int) -> int:
        total_ms = 0.0
        for _ in range(number):
            rewind()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            engine.replay()
            end.record()
            end.synchronize()
            total_ms += start.elapsed_time(end)
        return round(total_ms * 1e6 / number)

    def call(number: int) -> int:
        total_ns = 0
        for _ in range(number):
            rewind()
            start = time.perf_counter_ns()
            engine(list(inputs))
            if _is_cuda(engine):
                torch.cuda.synchronize()
            total_ns += time.perf_counter_ns() - start
        return round(total_ns / number)

    return replay if engine.is_captured else call


def _why_not(own: Engine, usual: Engine) -> str:
    """Say why a variant cannot take the place of the usual program; empty where it can."""
    new, old = own.lowered.program, usual.lowered.program
    if new.inputs != old.inputs or new.mutated != old.mutated or _results(new) != _results(old):
        return "gives results in another form"
    held = _held_bytes(usual)
    return "takes more memory" if _held_bytes(own) > max(MEMORY * held, held + GRANULE_BYTES) else ""


def _results(program: Program) -> list[Any]:
    return [program.layout(each.name) if isinstance(each, Value) else each for each in program.outputs]


def _held_bytes(engine: Engine) -> int:
    owned = (buffer for buffer in engine.plan.graph.buffers if buffer.alias_of is None)
    return engine.peak_bytes + sum(buffer.num_bytes for buffer in owned if buffer.role not in PLANNED_ROLES)


def _agree(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether results differ by rounding alone: a look, for faults; that rounding is no worse, tests show."""
    if [type(each) for each in left] != [type(each) for each in right]:
        return False
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in pairs):
        return False
    lengths = [(_length(a - b), _length(b)) for a, b in pairs]
    distance, length = (sum(each) for each in zip(*lengths, strict=True)) if lengths else (0.0, 0.0)
    return distance <= ERROR**2 * length


def _length(value: torch.Tensor) -> float:
    """The square of its length, as far as it is finite."""
    return float(value.float().nan_to_num(0, 0, 0).norm()) ** 2


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_cuda(engine: Engine) -> bool:
    return engine.lowered.program.devices != {"cpu"}


def _is_within_capture() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _generator(program: Program) -> torch.Generator:
    place = next((each for each in sorted(program.devices) if each != "cpu"), None)
    return torch.default_generator if place is None else torch.cuda.default_generators[torch.device(place).index or 0]
