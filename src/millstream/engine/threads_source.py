"""Plans on several threads: plan + program → straight-line Python, a function for each stream.

On a CPU the streams of a plan are threads: the caller's, and the workers of ``team``. What keeps them from running at
the same time is the GIL, so C++ kernels are called by address, without it; library operators release it themselves.

**Contract**
- Steps keep the plan's order on each stream. A wait blocks until the record has been issued: on a CPU, what was issued
  is over.
- A value is a variable of the enclosing function: whoever uses it comes behind whoever made it, because the plan says
  so. A view is made anew at each use, for no plan orders the streams by views.
- An error on one stream ends the others at their next wait. It is raised in the caller, with the traceback of the
  thread; the compiled plan is of no use afterwards.
- Not for two calls at once: signals and bound memory serve one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from millstream.engine.source import Run, Writer
from millstream.engine.team import Team
from millstream.errors import InternalError
from millstream.graph import Allocate, Free, Launch, Plan, Record, Wait
from millstream.lower.program import Program, Value
from millstream.lower.tensors import reinterpret


class _StoppedError(Exception):
    """Ends a stream because another one has failed."""


class Signals:
    """What the streams of one plan tell each other: for each event and stream that waits for it, a lock to be opened.

    A lock is the quickest signal that Python has, 3 µs from thread to thread where the other one waits already; taking
    it shuts it again for the next call.

    Attributes:
        errors: What went wrong; a stream looks behind each wait.
    """

    def __init__(self, plan: Plan) -> None:
        self.errors: list[BaseException] = []
        self._locks: dict[tuple[int, int], threading.Lock] = {}
        self._recorder = {step.event: step.stream for step in plan.steps if isinstance(step, Record)}
        for step in plan.steps:
            if isinstance(step, Wait) and self._recorder[step.event] != step.stream:
                lock = self._locks[step.event, step.stream] = threading.Lock()
                lock.acquire()

    def recorded(self, event: int) -> list[tuple[int, Callable[[], None]]]:
        """What to call where an event is recorded: the streams that wait for it, and what wakes them."""
        return [(stream, lock.release) for (other, stream), lock in self._locks.items() if other == event]

    def awaited(self, event: int, stream: int) -> Callable[[], bool] | None:
        """What to call where a stream waits; ``None`` for an event of its own."""
        lock = self._locks.get((event, stream))
        return lock.acquire if lock else None

    def fail(self, stream: int, error: BaseException) -> None:
        """Note why a stream has ended too early, and wake all that wait for it."""
        self.errors.append(error)
        for (event, _), lock in self._locks.items():
            if self._recorder[event] == stream and lock.locked():  # nobody else opens it
                lock.release()

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self.errors:
            error = self.errors[0]
            try:
                raise error
            finally:
                self.errors = []  # their tracebacks hold the streams' tensors
                del error


def compile_threads(
    program: Program, plan: Plan, bound: Mapping[str, torch.Tensor], team: Team, num_threads: int
) -> Run:
    """Compile a plan into a Python function that runs each stream on a thread of its own.

    Args:
        program: What the kernels call, on the CPU.
        plan: In which order, and on which streams.
        bound: As for ``compile_plan``.
        team: Lends the threads; the caller must have it.
        num_threads: Intra-op threads for each of them.
    """
    return _ThreadsWriter(program, plan, {**program.constants, **bound}, team, num_threads).compile()


class _ThreadsWriter(Writer):
    def __init__(
        self, program: Program, plan: Plan, bound: dict[str, torch.Tensor], team: Team, num_threads: int
    ) -> None:
        super().__init__(program, plan, bound, None, None)
        self.signals = Signals(plan)
        self.scope |= {
            "signals": self.signals,
            "errors": self.signals.errors,
            "StoppedError": _StoppedError,
            "run_streams": lambda jobs: team.run(jobs, num_threads),
            "bound": bound,  # addresses in the text hold nothing alive
        }
        self.counts.update(list(self.scope))
        self.bodies: list[list[str]] = [[] for _ in range(plan.num_streams)]
        self.assigned: list[set[str]] = [set() for _ in range(plan.num_streams)]

    def compile(self) -> Run:
        self._write_inputs()
        head = self.lines
        self.assigned[0].clear()  # of the inputs, which the enclosing function assigns
        given = set(self.names.values())
        waited: set[tuple[int, int]] = set()
        for step in self.plan.steps:
            self.current = step.stream
            self.lines = self.bodies[step.stream]
            match step:
                case Launch(kernel, stream):
                    self._write_call(kernel, stream)
                case Allocate(buffer, stream):
                    self._write_allocation(buffer, stream)
                case Free(buffer, stream):
                    self.assigned[stream].update(self.live.get(self.program.graph.storage(buffer), ()))
                    self._write_free(buffer)
                case Record(event, _):
                    for stream, wake in self.signals.recorded(event):
                        self.scope[f"wake_{event}_{stream}"] = wake
                        self.lines.append(f"wake_{event}_{stream}()")
                case Wait(event, stream):
                    wait = self.signals.awaited(event, stream)
                    if wait is not None and (event, stream) not in waited:
                        waited.add((event, stream))
                        self.scope[f"wait_{event}_{stream}"] = wait
                        self.lines += [f"wait_{event}_{stream}()", "if errors: raise StoppedError"]
                case _:
                    raise InternalError(f"No engine knows how to run {step}.")
        made = sorted(set().union(*self.assigned) - given)
        if made:
            head.append(f"{' = '.join(made)} = None")
        for stream, body in enumerate(self.bodies):
            assigned = sorted(self.assigned[stream])
            head += [f"def stream_{stream}():"] + [f"    nonlocal {', '.join(assigned)}"] * bool(assigned)
            head += ["    try:", *(f"        {line}" for line in body or ["pass"])]
            head += ["    except BaseException as error:", f"        signals.fail({stream}, error)"]
        names = "".join(f"stream_{stream}, " for stream in range(self.plan.num_streams))
        head += [f"run_streams(({names}))", "if errors: signals.raise_first()"]
        self.lines = head
        self._write_outputs()
        return self._finish(head)

    def _write_call(self, kernel: int, stream: int) -> None:
        call = self.program.calls[kernel]
        by_address = getattr(call.target, "by_address", None)
        if by_address is None:
            super()._write_call(kernel, stream)
        else:
            target = self._global(call.target.__name__, by_address)
            self.lines.append(f"{target}({', '.join(self._address(arg) for arg in call.args)})")

    def _address(self, argument: Any) -> str:
        """Python text for an argument of a C++ kernel: a number, or where a tensor begins."""
        if not isinstance(argument, Value):
            return self._expression(argument)
        view = self.program.views.get(argument.name)
        base, offset = (view.base, view.offset) if view else (argument.name, 0)
        if argument.name in self.bound:
            return str(self.bound[argument.name].data_ptr())
        if base in self.bound:
            return str(self.bound[base].data_ptr() + offset * self.bound[base].element_size())
        return f"{self._value(base if offset == 0 else argument.name)}.data_ptr()"

    def _value(self, name: str) -> str:
        view = self.program.views.get(name)
        if view is None or name in self.bound or view.base in self.bound:
            return super()._value(name)
        make = self._global("reinterpret", reinterpret)
        return f"{make}({self._value(view.base)}, {view.size}, {view.stride}, {view.offset})"

    def _local(self, name: str, base: str | None = None) -> str:
        local = super()._local(name, base)
        self.assigned[self.current].add(local)
        return local
