"""Plans on several threads: plan + program → compiled code that runs each stream on a thread of its own.

On a CPU the streams of a plan are threads: the caller's, and the workers of the pool. What would keep them from running
at the same time is the GIL: handing it over takes longer than a small kernel, and there are two at each. So they run
without: ``_native/threads.cpp`` walks through the steps of a stream, calls C++ kernels by address and library operators
through PyTorch's dispatcher, and waits for other streams, awake for a while before it sleeps. What it cannot call, it
gives back to Python.

**Contract**
- Steps keep the plan's order on each stream. A wait blocks until the record has been issued: on a CPU, what was issued
  is over.
- A tensor is a register, written by one stream: whoever uses it comes after, because the plan says so. A view is made
  again at each use, for no plan orders the streams by views.
- An error on one stream ends the others at their next wait. It is raised in the caller, as the type that PyTorch gives
  it, be it a signal's; the compiled plan is of no use afterwards.
- Not for two calls at once: signals and bound memory serve one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from millstream._torch.dispatcher import is_users
from millstream._torch.tensors import (
    ALIGNMENT_BYTES,
    copy_elements,
    from_handle,
    place_of_implementation,
    realign,
)
from millstream.engine.cpu.worker_pool import Library, WorkerPool, library
from millstream.engine.plan_source import callee
from millstream.engine.promises import Promise, fit, promised
from millstream.errors import InternalError
from millstream.graph import Allocate, Free, Kernel, Launch, Plan, Record, Wait
from millstream.program import KernelCall, Program, Value

Runner = Callable[[list[Any]], list[Any]]


def compile_threads(
    program: Program, plan: Plan, bound: Mapping[str, torch.Tensor], worker_pool: WorkerPool, num_threads: int
) -> Runner:
    """Compile a plan into a function that runs each stream on a thread of its own.

    Args:
        program: What the kernels call, on the CPU.
        plan: In which order, and on which streams.
        bound: As for ``compile_plan``.
        worker_pool: Lends the threads; the caller must have it.
        num_threads: Intra-op threads for each of them.

    Raises:
        InternalError: There is no compiled code to run it.
    """
    return _NativePlan(program, plan, {**program.constants, **bound}, worker_pool, num_threads)


class _NativePlan:
    """A compiled plan."""

    def __init__(
        self, program: Program, plan: Plan, bound: dict[str, torch.Tensor], worker_pool: WorkerPool, num_threads: int
    ) -> None:
        self._library, self._program, self._num_threads = library(), program, num_threads
        self._outputs = program.outputs
        self._workers = worker_pool.workers(plan.num_streams - 1)
        builder = _StepsBuilder(program, plan, bound, self._library)
        builder.add_steps()
        self._values = builder.values
        self._plan = self._values.plan
        weakref.finalize(self, self._library.drop, self._plan)
        registers = self._values.registers
        names = [name for name in program.inputs if name in registers]
        names.sort(key=lambda name: name not in program.aligned)
        self._positions = [program.inputs.index(name) for name in names]
        self._num_aligned = sum(name in program.aligned for name in names)
        self._objects = ctypes.py_object * len(names)
        self._given = _integers(registers[name] for name in names)
        self._variable = _integers(number for name, number in registers.items() if name not in self._values.bound)
        self._written = [index for index, name in enumerate(names[: self._num_aligned]) if name in program.mutated]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        given = [inputs[position] for position in self._positions]
        inputs.clear()
        tensors = given
        try:
            if self._load(given):
                tensors = [
                    realign(tensor) if index < self._num_aligned and tensor.data_ptr() % ALIGNMENT_BYTES else tensor
                    for index, tensor in enumerate(given)
                ]
                self._load(tensors)
            self._library.releasing.millstream_run(self._plan, self._workers, self._num_threads)
            if self._library.has_failed(self._plan):
                self._raise()
            if tensors is not given:
                for index in self._written:
                    if tensors[index] is not given[index]:
                        copy_elements(given[index], tensors[index])
            return [self._values.tensor(item.name) if isinstance(item, Value) else item for item in self._outputs]
        finally:
            self._library.clear(self._plan, self._variable, len(self._variable))

    def _load(self, tensors: Sequence[torch.Tensor]) -> int:
        tensors_at = self._objects(*tensors)
        counts = len(tensors), self._num_aligned
        return self._library.load(self._plan, tensors_at, place_of_implementation(), self._given, *counts)  # type: ignore[no-any-return]

    def _raise(self) -> None:
        """Raise the first error."""
        error = self._library.take_error(self._plan)  # its traceback holds tensors
        failed = self._library.failed(self._plan)
        if failed >= 0:
            kernel = self._program.graph.kernels[failed]
            error.add_note(f"It was raised by kernel {kernel.name}{f', {kernel.source}' if kernel.source else ''}.")
        raise error


class _RegisterValues:
    """What Python knows of the registers; and the steps that it does."""

    plan: ctypes.c_void_p

    def __init__(self, program: Program, bound: dict[str, torch.Tensor], library: Library) -> None:
        self.bound, self.registers = bound, dict[str, int]()
        self._program, self._library = program, library

    def fetch(self, tree: Any) -> Any:
        """Arguments or results, with tensors for values."""
        return tree_map_only(Value, lambda value: self.tensor(value.name), tree)

    def step(self, kernel: int) -> None:
        """Call what a kernel calls."""
        call = self._program.calls[kernel]
        result = callee(call)(*self.fetch(call.args), **self.fetch(call.kwargs))
        for index, name in call.results:
            tensor = self._fit(kernel, name, result if index is None else result[index])
            self._library.set(self.plan, self.registers[name], ctypes.c_void_p(tensor._cdata))

    def _fit(self, kernel: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A result as it was promised, see ``promises``."""
        if (layout := promised(self._program, name)) is None:
            return tensor
        call, entry = self._program.calls[kernel], self._program.graph.kernels[kernel]
        return fit(tensor, layout.size, layout.stride, Promise(layout, name, entry, is_users(call.target), []))

    def bind(self, name: str) -> bool:
        """Return whether a value stays in place from call to call; one that is a view of such a value becomes one."""
        view = self._program.views.get(name)
        if name not in self.bound and view is not None and view.base in self.bound:
            self.bound[name] = self.tensor(name)
        return name in self.bound

    def tensor(self, name: str) -> torch.Tensor:
        """The Python object for a value."""
        if name in self.bound:
            return self.bound[name]
        view = self._program.views.get(name)
        if view is not None:
            return view.of(self.tensor(view.base))
        return from_handle(self._library.get(self.plan, self.registers[name]))


class _StepsBuilder:
    """Gives compiled code its steps."""

    def __init__(self, program: Program, plan: Plan, bound: dict[str, torch.Tensor], library: Library) -> None:
        self.values = _RegisterValues(program, bound, library)
        self._program, self._steps, self._library = program, plan.steps, library
        recorded = {step.event: step.stream for step in plan.steps if isinstance(step, Record)}
        self._recorder = recorded
        values = [leaf for call in program.calls for leaf in tree_leaves((call.args, call.kwargs, call.results))]
        most = len(program.inputs) + len(program.layouts) + len(values)
        self.values.plan = self._plan = ctypes.c_void_p(
            library.make(most, max(recorded, default=0) + 1, plan.num_streams, ctypes.py_object(self.values.step))
        )
        self._live: dict[str, set[str]] = {}  # storage -> values in registers that hold it

    def add_steps(self) -> None:
        """Add all steps of the plan."""
        waited: set[tuple[int, int]] = set()
        for step in self._steps:
            match step:
                case Launch(kernel, stream):
                    self._add_call(kernel, stream)
                case Allocate(buffer, stream):
                    self._add_allocation(buffer, stream)
                case Free(buffer, stream):
                    for name in sorted(self._live.pop(self._program.graph.storage(buffer), ())):
                        self._library.add_free(self._plan, stream, self.values.registers[name])
                case Record(event, stream):
                    self._library.add_record(self._plan, stream, event)
                case Wait(event, stream):
                    if self._recorder[event] != stream and (event, stream) not in waited:
                        waited.add((event, stream))
                        self._library.add_wait(self._plan, stream, event)
                case _:
                    raise InternalError(f"No engine knows how to run {step}.")
        for leaf in tree_leaves(self._program.outputs):
            if isinstance(leaf, Value):
                self._register(leaf.name)

    def _add_call(self, kernel: int, stream: int) -> None:
        call = self._program.calls[kernel]
        for leaf in tree_leaves((call.args, call.kwargs)):
            if isinstance(leaf, Value):
                self._register(leaf.name)
        results: list[tuple[int, ...]]
        results = [(index or 0, self._make(name), *self._promise(name)) for index, name in call.results]
        entry = getattr(call.target, "entry", None)
        if entry and all(isinstance(arg, (Value, int)) for arg in call.args):
            operands = _integers(number for arg in call.args for number in self._operand(arg))
            self._library.add_kernel(self._plan, stream, kernel, ctypes.c_void_p(entry), operands, len(call.args))
        elif not self._add_operator(kernel, stream, results):
            self._library.add_python(self._plan, stream, kernel)

    def _operand(self, arg: Value | int) -> tuple[int, int]:
        """An argument of a C++ kernel: a number, or a register and from which element on."""
        if isinstance(arg, int):
            return -1, arg
        if arg.name in self.values.bound:
            return -1, self.values.bound[arg.name].data_ptr()
        view = self._program.views.get(arg.name)
        return self._register(arg.name), view.offset if view else 0

    def _promise(self, name: str) -> tuple[int, ...]:
        """Return how a result is to lie: the number of its dimensions, sizes and strides; see ``promises``."""
        layout = promised(self._program, name)
        return (-1,) if layout is None else (len(layout.size), *layout.size, *layout.stride)

    def _add_operator(self, kernel: int, stream: int, results: list[tuple[int, ...]]) -> bool:
        """Let compiled code call an operator, if it can."""
        call = self._program.calls[kernel]
        operator = operator_of(call, self._program.graph.kernels[kernel])
        arguments = None if operator is None else arguments_by_schema(operator, call)
        if operator is None or arguments is None or not all(map(is_simple, tree_leaves(arguments))):
            return False
        if is_users(operator):  # what it returns is to be looked at
            return False
        for argument in arguments:
            self._push(argument)
        schema = operator._schema
        name, overload = schema.name.encode(), schema.overload_name.encode()
        wanted = _integers(number for result in results for number in result)
        return bool(self._library.add_operator(self._plan, stream, kernel, name, overload, wanted, len(results)))

    def _push(self, argument: Any) -> None:
        library, plan = self._library, self._plan
        match argument:
            case None:
                library.push_none(plan)
            case bool():
                library.push_bool(plan, ctypes.c_bool(argument))
            case int():
                library.push_int(plan, ctypes.c_int64(argument))
            case float():
                library.push_float(plan, ctypes.c_double(argument))
            case str():
                library.push_string(plan, argument.encode())
            case Value(name):
                view = None if name in self.values.bound else self._program.views.get(name)
                if view is None:
                    library.push_tensor(plan, self._register(name))
                else:
                    size, stride, offset = _integers(view.size), _integers(view.stride), ctypes.c_int64(view.offset)
                    library.push_view(plan, self._register(name), size, stride, len(view.size), offset)
            case _:
                for item in argument:
                    self._push(item)
                library.push_list(plan, len(argument))

    def _add_allocation(self, buffer: str, stream: int) -> None:
        if buffer in self.values.bound:
            return
        layout = self._program.layouts[buffer]
        size, stride, like = _integers(layout.size), _integers(layout.stride), torch.empty((), dtype=layout.dtype)
        arguments = size, stride, len(layout.size), ctypes.c_void_p(like._cdata)
        self._library.add_allocation(self._plan, stream, self._make(buffer), *arguments)

    def _make(self, name: str) -> int:
        """The register of a value that the plan makes."""
        self._live.setdefault(self._program.graph.storage(name), set()).add(name)
        return self._register(name)

    def _register(self, name: str) -> int:
        """Return where a value is, or what it is a view of; it stays there if it is bound."""
        registers, is_bound = self.values.registers, self.values.bind(name)
        name = name if is_bound else self._program.base(name)
        if name not in registers:
            registers[name] = len(registers)
            if is_bound:
                tensor = ctypes.c_void_p(self.values.bound[name]._cdata)
                self._library.set(self._plan, registers[name], tensor)
        return registers[name]


def operator_of(call: KernelCall, kernel: Kernel) -> OpOverload | None:
    """The operator that a call comes to in the end; ``None`` for what is none."""
    if isinstance(call.target, BuiltinFunctionType):  # torch's own binding of it
        namespace, packet, overload = kernel.name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)  # type: ignore[no-any-return]
    return call.target if isinstance(call.target, OpOverload) else None


def arguments_by_schema(operator: OpOverload, call: KernelCall) -> list[Any] | None:
    """All arguments in order, with the values of those that were left out; ``None`` where one is missing."""
    given = dict(call.kwargs)
    arguments = list(call.args)
    for argument in operator._schema.arguments[len(arguments) :]:
        if argument.name not in given and not argument.has_default_value():
            return None
        arguments.append(given.pop(argument.name, argument.default_value))
    return None if given else arguments


def is_simple(leaf: Any) -> bool:
    """Return whether compiled code can be given such an argument."""
    return leaf is None or isinstance(leaf, (Value, bool, int, float, str))


def _integers(numbers: Iterable[int]) -> ctypes.Array[ctypes.c_int64]:
    numbers = tuple(numbers)
    return (ctypes.c_int64 * len(numbers))(*numbers)
