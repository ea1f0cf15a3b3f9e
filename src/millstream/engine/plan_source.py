"""Plan + program → straight-line Python.

Dispatching a kernel from generated straight-line code costs about 1 µs, through an interpreter about twice that, and
all engines share one text: what differs between them is which values are *bound* before the first call (memory that
stays where it is, views of it included) and which are made in every call, and which streams there are.

**Contract**
- Steps are issued in the order of the plan; a value is made right before its first use and forgotten where the plan
frees its buffer.
- Stream 0 of the plan is the stream that is current at the call. The others wait for it at the start; what is allocated
for a stream is allocated while that stream is current, so that PyTorch's allocator takes the memory for its own.
- A bound value costs nothing per call.
- An input that does not lie as kernels were compiled for is copied before they run, and back after them if they write
it. A graph that is captured from such an input does that in every replay.
- The function takes the list of inputs, empties it, and returns the list of outputs; it holds no reference afterwards.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Protocol

import torch

from millstream._torch.devices.raw_streams import current_stream_handle
from millstream._torch.dispatcher import is_users
from millstream._torch.tensors import ALIGNMENT_BYTES, allocator, copy_elements, realign, reinterpret, tracked_view
from millstream.device import DeviceContext, Event
from millstream.engine.control import Run, prepare
from millstream.engine.promises import Promise, fit, promised
from millstream.errors import InternalError
from millstream.graph import Allocate, Free, Launch, Plan, Record, Wait
from millstream.lower.control_flow import Control
from millstream.lower.symbolic import Named
from millstream.program import KernelCall, Program, Value

#: ``observe(kernel, launch, written) -> result``: launches a kernel in its own way. Launching it again would write
#: other values to these tensors, because it updates some of them in place. One with ``sees_all`` is shown all tensors
#: that are written.
Observe = Callable[[int, Callable[[], Any], tuple[torch.Tensor, ...]], Any]

#: Makes what runs a kernel of control flow.
Flows = Callable[[Control], Run]

#: Names that the text gives a meaning of its own, and those that become such with a number after them.
_OWN_NAMES = re.compile(
    r"run|inputs|results|pending|torch|observe|enter|raw_stream|current_stream|fork"
    r"|(stream|handle|event)(_\d+)?|(given_)?v(_.*)?|numbers|size_\d+"
)


_numbers = itertools.count()  # of texts


class Numbers(Protocol):
    """Numbers that a call brings."""

    names: tuple[str, ...]

    def values(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the names stand for in a call with these inputs."""
        ...


class CompiledPlan(Protocol):
    """A compiled plan.

    Attributes:
        source: Its text.
        events: Lent by the contexts, each to be given back to its own when the function is not used any more.
    """

    source: str
    events: list[tuple[DeviceContext, Event]]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Take the inputs, empty the list, and return the outputs."""
        ...


def compile_plan(  # noqa: PLR0913  all but three by name
    program: Program,
    plan: Plan,
    bound: Mapping[str, torch.Tensor] | None = None,
    *,
    context: DeviceContext | None = None,
    observe: Observe | None = None,
    numbers: Numbers | None = None,
    repeats: bool = False,
    placed: Sequence[str] = (),
    elsewhere: Mapping[int, DeviceContext] | None = None,
    flows: Flows | None = None,
) -> CompiledPlan:
    """Compile a plan into a Python function.

    Args:
        program: What the kernels call.
        plan: In which order, on which streams, and when memory is taken and given back.
        bound: Tensors by value name that stay valid and in place for as long as the function is used: constants need
            not be named, static inputs and preallocated temporaries may be.
        context: Lends the streams from 1 on, and events; a plan on one stream needs none.
        observe: Called for every kernel instead of it (one stream only).
        numbers: What the program leaves open until it is called, where it was made with named numbers.
        repeats: Whether numbers are to stay out of the text: then it is the same at another size, or with other inputs,
            and Python need not compile it again.
        placed: Buffers that are not made: the memory for each is given, after the inputs.
        elsewhere: Contexts of streams that are on other devices than ``context``. The function leaves other streams
            current there.
        flows: Makes functions of control flow; without it the host decides.

    Returns:
        The function; tracebacks through it show its source. With several streams it may leave another one current when
        it raises.
    """
    bound = {**program.constants, **(bound or {})}
    writer = PlanWriter(program, plan, bound, context, observe, numbers, repeats=repeats, placed=placed)
    writer.elsewhere, writer.flows = elsewhere or {}, flows
    return writer.compile()


def callee(call: KernelCall, flows: Flows | None = None) -> Callable[..., Any]:
    """Return what Python is to call.

    Args:
        call: In the plan.
        flows: Makes what runs control flow; the host decides unless it is given.
    """
    if isinstance(call.target, Control):
        return prepare(call.target, compile_plan) if flows is None else flows(call.target)
    return getattr(call.target, "binding", call.target)


class PlanWriter:
    """Writes the text of ``compile_plan``; ``threads_source`` makes a writer of other texts from it."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        bound: dict[str, torch.Tensor],
        context: DeviceContext | None,
        observe: Observe | None,
        numbers: Numbers | None = None,
        *,
        repeats: bool = False,
        placed: Sequence[str] = (),
    ) -> None:
        self.program, self.plan, self.repeats, self.placed = program, plan, repeats, placed
        self.context, self.observe, self.numbers = context, observe, numbers
        self.parallel = plan.num_streams > 1
        self.current = 0  # the stream that is current at this point of the text
        self.scope: dict[str, Any] = {}
        self.globals: dict[int, str] = {}  # id of an object in scope -> its name there
        self.counts: Counter[str] = Counter()  # the last number given to a name
        self.bound = bound
        self.lines: list[str] = []
        self.elsewhere: Mapping[int, DeviceContext] = {}
        self.flows: Flows | None = None
        self.events: list[tuple[DeviceContext, Event]] = []
        self.pending = ["first call"]  # see ``Promise``
        self.num_numbers = 0  # that were kept out of the text
        self.names: dict[str, str] = {}  # value name -> Python name
        self.live: dict[str, list[str]] = {}  # storage -> Python names of the locals that hold it

    def compile(self) -> CompiledPlan:
        self._write_inputs()
        self._write_streams()
        for step in self.plan.steps:
            match step:
                case Launch(kernel, stream):
                    self._write_call(kernel, stream)
                case Allocate(buffer, stream):
                    self._write_allocation(buffer, stream)
                case Free(buffer, _):
                    self._write_free(buffer)
                case Record(event, stream):
                    self.lines.append(f"{self._event(event, stream)}.record(stream_{stream})")
                case Wait(event, stream):
                    self.lines.append(f"stream_{stream}.wait_event({self._event(event, stream)})")
                case _:
                    raise InternalError(f"No engine knows how to run {step}.")
        self._enter(0)
        self._write_outputs()
        return self._finish(self.lines)

    def _write_outputs(self) -> None:
        for name in sorted(self.program.aligned & self.program.mutated & self.names.keys() - self.bound.keys()):
            local, copy = self.names[name], self._global("copy_elements", copy_elements)
            self.lines.append(f"if {local} is not given_{local}: {copy}(given_{local}, {local})")
        if "pending" in self.scope:
            self.lines.append("if len(pending) == 1: pending.clear()")
        results = ", ".join(self._expression(item) for item in self.program.outputs)
        self.lines.append(f"return [{results}]")

    def _finish(self, lines: list[str]) -> CompiledPlan:
        source = "def run(inputs):\n" + "".join(f"    {line}\n" for line in lines)
        make_code = _code_of if self.repeats else _code_of.__wrapped__
        exec(make_code(source, self.program.graph.name), self.scope)  # noqa: S102  our own text, from a checked plan
        run: Any = self.scope.pop("run")  # which holds the scope, and so the arena: in a cycle it would outlive its use
        run.source, run.events = source, self.events
        return run  # type: ignore[no-any-return]

    def _write_inputs(self) -> None:
        if self.numbers is not None and self.numbers.names:
            self.scope["numbers"] = self.numbers.values
            self.lines.append(f"{', '.join(self.numbers.names)}, = numbers(inputs)")
        used = {self.program.base(leaf.name) for leaf in self._all_values()}
        for position, name in enumerate(self.program.inputs):
            if name is not None and name in used and name not in self.bound:
                self.lines.append(f"{self._local(name)} = inputs[{position}]")
                if name in self.program.aligned:
                    self._write_alignment(name)
        for position, name in enumerate(self.placed, len(self.program.inputs)):
            self.lines.append(f"{self._local(name)} = inputs[{position}]")
        self.lines.append("inputs.clear()")

    def _write_alignment(self, name: str) -> None:
        local, copy = self.names[name], self._global("realign", realign)
        if name in self.program.mutated:
            self.lines.append(f"given_{local} = {local}")
        self.lines.append(f"if {local}.data_ptr() % {ALIGNMENT_BYTES}: {local} = {copy}({local})")

    def _raw_stream(self) -> Callable[[], int]:
        """Return a function that gives the raw handle of the device's current stream."""
        if self.elsewhere and self.context is not None:
            return functools.partial(current_stream_handle, self.context.place.index)
        device = torch.device(next(name for name in sorted(self.program.devices) if name != "cpu"))
        return lambda: current_stream_handle(device.index)

    def _write_streams(self) -> None:
        """Find the current stream, and let the others begin after it."""
        if any(call.stream_keyword for call in self.program.calls):
            self.scope["raw_stream"] = self._raw_stream()
            self.lines.append("handle_0 = raw_stream()")
        if not self.parallel:
            return
        if self.context is None:
            raise InternalError(f"{self.program.graph.name} needs {self.plan.num_streams} streams and got no context.")
        on_cuda = self.context.place.kind == "cuda"
        self.scope["enter"] = torch.cuda.set_stream if on_cuda else lambda stream: None
        self.scope["current_stream"] = self.context.current_stream
        self.lines += ["stream_0 = current_stream()", f"{self._event(None)}.record(stream_0)"]
        for index in range(1, self.plan.num_streams):
            stream = self._context_of(index).streams[index]
            self.scope[f"stream_{index}"] = stream
            self.scope[f"handle_{index}"] = getattr(stream, "cuda_stream", 0)
            self.lines.append(f"stream_{index}.wait_event({self._event(None)})")

    def _context_of(self, stream: int) -> DeviceContext:
        """Lends a stream, and events to be recorded there."""
        assert self.context is not None, "only plans with several streams have streams and events"
        return self.elsewhere.get(stream, self.context)

    def _event(self, event: int | None, stream: int = 0) -> str:
        """Name of one of the plan's events, or of the one after which the streams begin; it is recorded first of all.

        Args:
            event: Its number in the plan.
            stream: On which it is recorded, where it has not been.
        """
        name = "fork" if event is None else f"event_{event}"
        if name not in self.scope:
            context = self._context_of(stream)
            self.scope[name] = context.events.acquire()
            self.events.append((context, self.scope[name]))
        return name

    def _enter(self, stream: int) -> None:
        if stream != self.current:
            self.lines.append(f"enter(stream_{stream})")
            self.current = stream

    def _all_values(self) -> list[Value]:
        trees = [(call.args, call.kwargs) for call in self.program.calls]
        return [*_values_in((trees, self.program.outputs))]

    def _write_allocation(self, buffer: str, stream: int) -> None:
        if buffer in self.bound or buffer in self.placed:
            return
        self._enter(stream)
        layout = self.program.layouts[buffer]
        empty = self._global(f"empty_{layout.device.type}", allocator(layout.device))
        size, stride = self._expression(layout.size), self._expression(layout.stride)
        self.lines.append(f"{self._local(buffer)} = {empty}({size}, {stride}, {layout.dtype!r})")
        self.scope["torch"] = torch

    def _write_call(self, kernel: int, stream: int) -> None:
        call = self.program.calls[kernel]
        target = self._global(_readable(call.target), callee(call, self.flows))
        args = [self._expression(arg) for arg in call.args]
        args += [f"{key}={self._expression(value)}" for key, value in call.kwargs.items()]
        if call.stream_keyword:
            args.append(f"{call.stream_keyword}={'raw_stream()' if self.observe else f'handle_{stream}'}")
        if not call.stream_keyword or (
            self.elsewhere and self._context_of(stream) is not self._context_of(self.current)
        ):
            self._enter(stream)  # also to a device: a handle may stand for the default stream of whichever is current
        text = f"{target}({', '.join(args)})"
        if self.observe is not None:
            text = self._observed(kernel, text)
        where = self.program.graph.kernels[kernel].source
        where = f"  # {where}" if where else ""  # a traceback shows it
        if not call.results:
            self.lines.append(text + where)
        elif call.results[0][0] is None:
            self._write_result(kernel, call.results[0][1], text, where)
        else:
            self.lines.append(f"results = {text}{where}")
            for index, name in call.results:
                self._write_result(kernel, name, f"results[{index}]")
            self.lines.append("del results")

    def _write_result(self, kernel: int, name: str, text: str, where: str = "") -> None:
        """Bind what an operator returns, as it has promised it to be; see ``promises``."""
        layout, local = promised(self.program, name), self._local(name)
        if layout is None:
            self.lines.append(f"{local} = {text}{where}")
            return
        is_always = is_users(self.program.calls[kernel].target)
        promise = Promise(layout, name, self.program.graph.kernels[kernel], is_always, self.pending)
        size, stride = self._expression(layout.size), self._expression(layout.stride)
        fitted, rest = self._global("fit", fit), f"{size}, {stride}, {self._global('promise', promise)})"
        if is_always:
            self.lines.append(f"{local} = {fitted}({text}, {rest}{where}")
            return
        self.scope["pending"] = self.pending
        self.lines.append(f"{local} = {text}{where}")
        self.lines.append(f"if pending: {local} = {fitted}({local}, {rest}")

    def _observed(self, kernel: int, text: str) -> str:
        """Let the observer launch a kernel; if launching it again would change what it wrote, name all of that."""
        self.scope["observe"] = self.observe
        entry = self.program.graph.kernels[kernel]
        updates = set(entry.reads) & set(entry.writes)
        stored = {*self.program.inputs, *self.program.layouts, *self.program.constants, *self.names}
        is_shown = updates or getattr(self.observe, "sees_all", False)
        written = (
            [self._value(name) for name in entry.writes if name in stored - {*entry.allocates}] if is_shown else []
        )
        return f"observe({kernel}, lambda: {text}, ({''.join(name + ', ' for name in written)}))"

    def _write_free(self, buffer: str) -> None:
        names = self.live.pop(self.program.graph.storage(buffer), [])
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def _expression(self, tree: Any) -> str:
        """Python text for an argument; a view that is not bound is made on the way and kept while its memory lives."""
        if isinstance(tree, Value):
            return self._value(tree.name)
        if isinstance(tree, (list, tuple)) and any(_values_in(tree)):
            inner = ", ".join(self._expression(item) for item in tree)
            return f"[{inner}]" if isinstance(tree, list) else f"({inner},)"
        if self.repeats and type(tree) in (int, float):
            self.num_numbers += 1
            self.scope[f"size_{self.num_numbers}"] = tree
            return f"size_{self.num_numbers}"
        if isinstance(tree, (int, bool, type(None), str)) or (isinstance(tree, float) and tree - tree == 0):
            return repr(tree)
        plain = (int, bool, type(None))
        if (
            isinstance(tree, (list, tuple))
            and not self.repeats
            and all(type(each) in plain or isinstance(each, Named) for each in tree)
        ):
            return repr(tree)
        return self._global("constant", tree)

    def _value(self, name: str) -> str:
        if name in self.names:
            return self.names[name]
        if name in self.bound:
            self.names[name] = self._global(name, self.bound[name])
            return self.names[name]
        view = self.program.views.get(name)
        if view is None:
            raise InternalError(f"{name} is used in {self.program.graph.name} before anything makes it.")
        if view.base in self.bound and not any(isinstance(n, Named) for n in (*view.size, *view.stride, view.offset)):
            self.names[name] = self._global(name, view.of(self.bound[view.base]))
            return self.names[name]
        base = self._value(view.base)
        make = self._global(*(("tracked_view", tracked_view) if view.is_tracked else ("reinterpret", reinterpret)))
        text = f"{make}({base}, {', '.join(map(self._expression, (view.size, view.stride, view.offset)))})"
        self.lines.append(f"{self._local(name, view.base)} = {text}")
        return self.names[name]

    def _local(self, name: str, base: str | None = None) -> str:
        local = "v_" + "".join(c if c.isalnum() else "_" for c in name)
        self.names[name] = local
        self.live.setdefault(self.program.graph.storage(base or name), []).append(local)
        return local

    def _global(self, name: str, value: Any) -> str:
        """Name ``value`` in the function's globals, each object once."""
        if id(value) not in self.globals:
            wanted = "".join(c if c.isalnum() else "_" for c in name)
            if keyword.iskeyword(wanted) or _OWN_NAMES.fullmatch(wanted):
                wanted = f"_{wanted}"
            free = wanted
            while free in self.scope:
                self.counts[wanted] += 1
                free = f"{wanted}_{self.counts[wanted]}"
            self.globals[id(value)] = free
            self.scope[free] = value  # also keeps the object, and so its id, alive
        return self.globals[id(value)]


def _values_in(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _values_in(item)
    elif isinstance(tree, dict):
        yield from _values_in([*tree.values()])


@functools.lru_cache(8)
def _code_of(source: str, name: str) -> CodeType:
    """Compile a text that defines ``run``; as long as that lives, tracebacks through it show the text."""
    filename = f"<millstream {name} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec")
    (function,) = (part for part in code.co_consts if isinstance(part, CodeType))
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return code


def _readable(target: Callable[..., Any]) -> str:
    owner = getattr(target, "__self__", None)
    name = getattr(getattr(owner, "fn", None), "__name__", None) or getattr(target, "__name__", None) or "kernel"
    return str(name).replace(".", "_")
