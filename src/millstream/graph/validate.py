"""Check that a graph or plan makes sense by itself: its names, roles and counts."""

from __future__ import annotations

from millstream.errors import GraphError, PlanError
from millstream.graph.kernel_graph import Buffer, Kernel, KernelGraph, Role
from millstream.graph.plan import Allocate, Free, Launch, Plan, Record, Wait
from millstream.graph.text import format_step

CALLER_ROLES = frozenset({Role.INPUT, Role.STATE})
"""Roles of the buffers whose memory the caller owns."""

PLANNED_ROLES = frozenset({Role.TEMPORARY, Role.OUTPUT})
"""Roles of the buffers whose memory a plan takes; that of the others exists before it begins."""


def validate_graph(graph: KernelGraph) -> None:
    """Raise for the first contradiction in a graph. Linear in its size.

    Contract, for a graph that passes:
        - Kernel ids count from 0, buffer ids are unique, no size is negative, and every name refers to a buffer.
        - Views end at a buffer on the same device that owns its memory.
        - Inputs have role input or state and are listed once; every buffer of these roles is one of them, or a view.
        - An output's memory has role output, or was there before; every memory of role output is returned.
        - Temporaries and outputs are written before they are read; outputs are written; constants are not.
        - What an operator allocates has its own memory, and the operator is the first to write it.

    Raises:
        GraphError: The message names kernel and buffer, and what to do.
    """
    _check_buffers(graph)
    _check_inputs(graph)
    written: set[str] = set()
    for position, kernel in enumerate(graph.kernels):
        if kernel.id != position:
            text = f"stands at position {position}: kernel ids must count from 0 in program order"
            raise _kernel_error(kernel, None, text)
        _check_names(graph, kernel)
    for kernel in graph.kernels:
        _check_kernel(graph, kernel, written)
        written.update(graph.touched_by[kernel.id][1])
    _check_outputs(graph, written)


def validate_plan(plan: Plan) -> None:
    """Raise for the first contradiction in a plan or its graph. Linear in their size.

    Contract, for a plan that passes:
        - There is at least one stream, and every step is on one of them.
        - Every kernel is launched exactly once.
        - An event is recorded at most once, and before it is waited for.
        - Only temporaries and outputs are allocated, by the name of their memory's owner, and not where an operator
          allocates them itself. Only temporaries are freed.
        - Copies are between buffers of the same size, and not into a constant.

    What happens in which order is not looked at here; ``millstream.check`` does that.

    Raises:
        GraphError: The graph itself is not valid.
        PlanError: The message names step, kernel and buffer, and what to do.
    """
    validate_graph(plan.graph)
    if plan.num_streams < 1:
        raise PlanError(f"the plan has {plan.num_streams} streams: it needs at least one")
    launched_at: dict[int, int] = {}
    recorded_at: dict[int, int] = {}
    allocated_by = {buffer: kernel for kernel in plan.graph.kernels for buffer in kernel.allocates}
    for position, step in enumerate(plan.steps):
        if not 0 <= step.stream < plan.num_streams:
            text = f"is on stream {step.stream}, but the plan's streams are 0 to {plan.num_streams - 1}"
            raise _step_error(plan, position, text)
        match step:
            case Launch(kernel=kernel):
                _check_launch(plan, position, kernel, launched_at)
            case Record(event=event):
                if event in recorded_at:
                    text = f"records the event again, after step {recorded_at[event]}: use a new event each time"
                    raise _step_error(plan, position, text)
                recorded_at[event] = position
            case Wait(event=event):
                if event not in recorded_at:
                    text = "waits for an event that no earlier step records: record it before"
                    raise _step_error(plan, position, text)
            case Allocate() | Free():
                _check_memory_step(plan, position, step, allocated_by)
    if len(launched_at) < len(plan.graph.kernels):
        missing = next(kernel for kernel in plan.graph.kernels if kernel.id not in launched_at)
        count = len(plan.graph.kernels) - len(launched_at)
        raise PlanError(f"{missing.label} is never launched ({count} such in all): add its launch", kernel=missing.name)


# --- graphs ----------------------------------------------------------------------------------------------------------


def _buffer_error(buffer: str, text: str) -> GraphError:
    return GraphError(f"buffer {buffer!r} {text}", buffer=buffer)


def _kernel_error(kernel: Kernel, buffer: str | None, text: str) -> GraphError:
    return GraphError(f"{kernel.label} {text}", kernel=kernel.name, buffer=buffer)


def _check_buffers(graph: KernelGraph) -> None:
    seen: set[str] = set()
    for buffer in graph.buffers:
        if buffer.id in seen:
            raise _buffer_error(buffer.id, "appears twice: ids must be unique")
        if buffer.num_bytes < 0:
            raise _buffer_error(buffer.id, f"has {buffer.num_bytes} bytes: the size cannot be negative")
        seen.add(buffer.id)
    for buffer in graph.buffers:
        owner = graph.buffer_of[graph.storage_of[buffer.id]]
        if owner.device != buffer.device:
            text = f"on {buffer.device} is a view of {owner.id!r} on {owner.device}: a view stays on its device"
            raise _buffer_error(buffer.id, text)


def _check_inputs(graph: KernelGraph) -> None:
    listed: set[str] = set()
    for position, buffer_id in enumerate(graph.inputs):
        buffer = graph.buffer_of.get(buffer_id)
        if buffer is None:
            raise _buffer_error(buffer_id, f"is input {position} but unknown: add it to the buffers")
        if buffer.role not in CALLER_ROLES:
            text = f"is input {position} but has role {buffer.role}: an input has role input or state"
            raise _buffer_error(buffer_id, text)
        if buffer_id in listed:
            raise _buffer_error(buffer_id, f"is listed again as input {position}: pass it once")
        listed.add(buffer_id)
    for buffer in graph.buffers:
        if buffer.role in CALLER_ROLES and buffer.alias_of is None and buffer.id not in listed:
            text = f"has role {buffer.role} but is not among the inputs: list it there, or change its role"
            raise _buffer_error(buffer.id, text)


def _check_names(graph: KernelGraph, kernel: Kernel) -> None:
    for verb, buffers in (
        ("reads", kernel.reads),
        ("writes", kernel.writes),
        ("allocates", kernel.allocates),
        ("writes a part of", kernel.parts),
    ):
        for buffer in buffers:
            if buffer not in graph.buffer_of:
                raise _kernel_error(kernel, buffer, f"{verb} unknown buffer {buffer!r}: add it to the buffers")


def _check_kernel(graph: KernelGraph, kernel: Kernel, written: set[str]) -> None:
    if kernel.num_bytes < 0 or kernel.flops < 0:
        text = f"has num_bytes={kernel.num_bytes} and flops={kernel.flops}: neither can be negative"
        raise _kernel_error(kernel, None, text)
    reads, writes = graph.touched_by[kernel.id]
    for storage in reads:
        role = graph.buffer_of[storage].role
        if role in PLANNED_ROLES and storage not in written:
            text = f"reads {role} {storage!r}, which no earlier kernel writes: write it before, or make it an input"
            raise _kernel_error(kernel, storage, text)
    for storage in writes:
        if graph.buffer_of[storage].role is Role.CONSTANT:
            raise _kernel_error(kernel, storage, f"writes constant {storage!r}: give it role state if it must change")
    for buffer in kernel.parts:
        _check_part(graph, kernel, buffer, written)
    if len({*kernel.allocates}) < len(kernel.allocates):
        raise _kernel_error(kernel, None, "allocates a buffer twice: list each once")
    for buffer in kernel.allocates:
        _check_allocated(graph, kernel, graph.buffer_of[buffer], written)


def _check_part(graph: KernelGraph, kernel: Kernel, buffer: str, written: set[str]) -> None:
    storage = graph.storage_of[buffer]
    reads, writes = graph.touched_by[kernel.id]
    if storage not in writes:
        reason = "without writing it: list it among its writes too"
    elif storage in reads:
        reason = "which it also reads: it must come after the others, so that it is no part"
    elif any(graph.storage_of[name] == storage for name in kernel.writes if name not in kernel.parts):
        reason = "and the whole too: list it among its parts only if it writes nothing else of it"
    elif storage not in written and graph.buffer_of[storage].role in PLANNED_ROLES:
        reason = "which no earlier kernel writes: let one write the whole first"
    else:
        return
    raise _kernel_error(kernel, buffer, f"writes a part of {buffer!r}, {reason}")


def _check_allocated(graph: KernelGraph, kernel: Kernel, buffer: Buffer, written: set[str]) -> None:
    if buffer.id not in kernel.writes:
        reason = "without writing it: list it among its writes too"
    elif buffer.alias_of is not None:
        reason = f"which is a view: name the owner of the memory, {graph.storage_of[buffer.id]!r}"
    elif buffer.role not in PLANNED_ROLES:
        reason = f"which has role {buffer.role}: only temporaries and outputs are allocated"
    elif buffer.id in written:
        reason = "which an earlier kernel writes: its memory exists before, so do not list it here"
    else:
        return
    raise _kernel_error(kernel, buffer.id, f"allocates {buffer.id!r}, {reason}")


def _check_outputs(graph: KernelGraph, written: set[str]) -> None:
    returned: set[str] = set()
    for position, buffer_id in enumerate(graph.outputs):
        if buffer_id not in graph.buffer_of:
            raise _buffer_error(buffer_id, f"is output {position} but unknown: add it to the buffers")
        owner = graph.buffer_of[graph.storage_of[buffer_id]]
        place = f"is output {position}" + ("" if owner.id == buffer_id else f", a view of {owner.id!r},")
        if owner.role is Role.TEMPORARY:
            text = f"{place} but has role temporary: give its memory role output, so that it outlives the run"
            raise _buffer_error(buffer_id, text)
        if owner.role is Role.OUTPUT and owner.id not in written:
            raise _buffer_error(buffer_id, f"{place} but no kernel writes it: write it, or return another buffer")
        returned.add(owner.id)
    for buffer in graph.buffers:
        if buffer.role is Role.OUTPUT and buffer.alias_of is None and buffer.id not in returned:
            text = "has role output but is not returned: list it among the outputs, or make it temporary"
            raise _buffer_error(buffer.id, text)


# --- plans -----------------------------------------------------------------------------------------------------------


def _step_error(plan: Plan, position: int, text: str, *, buffer: str | None = None) -> PlanError:
    step = plan.steps[position]
    kernel = None
    if isinstance(step, Launch) and 0 <= step.kernel < len(plan.graph.kernels):
        kernel = plan.graph.kernels[step.kernel].name
    message = f"step {position} ({format_step(plan.graph, step)}) {text}"
    return PlanError(message, kernel=kernel, buffer=buffer, step=position)


def _check_launch(plan: Plan, position: int, kernel: int, launched_at: dict[int, int]) -> None:
    num_kernels = len(plan.graph.kernels)
    if not 0 <= kernel < num_kernels:
        text = f"launches unknown kernel {kernel}: graph {plan.graph.name!r} has {num_kernels} kernels, counted from 0"
        raise _step_error(plan, position, text)
    if kernel in launched_at:
        text = f"launches the kernel again, after step {launched_at[kernel]}: each kernel runs once"
        raise _step_error(plan, position, text)
    launched_at[kernel] = position


def _known_buffer(plan: Plan, position: int, buffer_id: str) -> Buffer:
    buffer = plan.graph.buffer_of.get(buffer_id)
    if buffer is None:
        text = f"names unknown buffer {buffer_id!r}: graph {plan.graph.name!r} has no such buffer"
        raise _step_error(plan, position, text, buffer=buffer_id)
    return buffer


def _check_memory_step(plan: Plan, position: int, step: Allocate | Free, allocated_by: dict[str, Kernel]) -> None:
    buffer = _known_buffer(plan, position, step.buffer)
    if buffer.alias_of is not None:
        text = f"names a view: name the owner of the memory, {plan.graph.storage_of[buffer.id]!r}"
    elif isinstance(step, Free) and buffer.role is not Role.TEMPORARY:
        text = f"frees a buffer of role {buffer.role}: only temporaries are the plan's to free"
    elif buffer.role not in PLANNED_ROLES:
        text = f"allocates a buffer of role {buffer.role}: only temporaries and outputs are the plan's to allocate"
    elif isinstance(step, Allocate) and buffer.id in allocated_by:
        text = f"allocates a buffer that {allocated_by[buffer.id].label} allocates itself: drop this step"
    else:
        return
    raise _step_error(plan, position, text, buffer=buffer.id)
